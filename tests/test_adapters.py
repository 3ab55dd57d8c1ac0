"""LoRA: decoders that take the matrices of an adapter as inputs, and adapter files beside them."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from support.isolated import EXPORTS, kvdoctor

LAYERS, WIDTH, OUT = 2, 32, 96
PREFIX = "transformer.h.{}.attn.c_attn.lora_{}.weight"
CHECK = "adapter-misfits"


def make_model(folder: Path, *, prefill_alone: bool = False) -> Path:
    """GPT-2 with a low-rank product beside each projection; `prefill_alone` adds it to the first step only."""
    model = onnx.load(EXPORTS / "gpt2" / "model.onnx")
    graph, nodes = model.graph, list[onnx.NodeProto]()
    if prefill_alone:
        graph.initializer.append(helper.make_tensor("lora_axis", TensorProto.INT64, [1], [2]))
        graph.initializer.append(helper.make_tensor("lora_zero", TensorProto.INT64, [1], [0]))
        nodes += [
            helper.make_node("Shape", ["past_key_values.0.key"], ["lora_shape"]),
            helper.make_node("Gather", ["lora_shape", "lora_axis"], ["lora_past"]),
            helper.make_node("Equal", ["lora_past", "lora_zero"], ["lora_first"]),
            helper.make_node("Cast", ["lora_first"], ["lora_share"], to=TensorProto.FLOAT),
        ]
    layer = 0
    for node in graph.node:
        nodes.append(node)
        if node.op_type == "Gemm" and any("c_attn.weight" in name for name in node.input):
            first, second, out = PREFIX.format(layer, "A"), PREFIX.format(layer, "B"), node.output[0]
            node.output[0] = f"{out}_base"
            added = [("MatMul", [node.input[0], first], f"{out}_a"), ("MatMul", [f"{out}_a", second], f"{out}_b")]
            if prefill_alone:
                added.append(("Mul", [f"{out}_b", "lora_share"], f"{out}_c"))
            added.append(("Add", [f"{out}_base", added[-1][2]], out))
            nodes += [helper.make_node(kind, inputs, [output]) for kind, inputs, output in added]
            graph.input.extend(
                [
                    helper.make_tensor_value_info(first, TensorProto.FLOAT, [WIDTH, "lora_r"]),
                    helper.make_tensor_value_info(second, TensorProto.FLOAT, ["lora_r", OUT]),
                ]
            )
            layer += 1
    assert layer == LAYERS
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    return folder


def make_adapter(file: Path, shapes: dict[str, tuple[int, ...]], kind: type = np.float32) -> Path:
    """An adapter file, as ONNX Runtime writes it."""
    made = ort.AdapterFormat()
    made.set_adapter_version(1)
    made.set_model_version(1)
    values = {name: np.ones(shape, kind) for name, shape in shapes.items()}
    made.set_parameters({name: ort.OrtValue.ortvalue_from_numpy(value) for name, value in values.items()})
    made.export_adapter(str(file))
    return file


def fitting(rank: int = 4) -> dict[str, tuple[int, ...]]:
    pairs = [(PREFIX.format(layer, "A"), (WIDTH, rank)) for layer in range(LAYERS)]
    return dict(pairs + [(PREFIX.format(layer, "B"), (rank, OUT)) for layer in range(LAYERS)])


def diagnose(command: str, folder: Path) -> dict[str, Any]:
    done = kvdoctor(command, folder, "--format", "json")
    assert "Traceback" not in done.stderr, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def misfits(folder: Path) -> list[str]:
    return [one["observed"] for one in diagnose("inspect", folder)["findings"] if one["name"] == CHECK]


# --- the decoder ------------------------------------------------------------------------------------------------------


def test_a_decoder_that_takes_an_adapter_is_driven_without_one_and_with_one(tmp_path: Path) -> None:
    report = diagnose("step-test", make_model(tmp_path / "model"))
    assert (report["verdict"], report["findings"]) == ("healthy", [])
    run = next(one for one in report["runs"] if one["experiment"] == "adapter")
    assert run["outcome"] == "passed"
    assert {control["spoilt"]: control["visible"] for control in run["controls"]}["adapter left out"]


def test_without_an_adapter_it_computes_what_the_base_computes(tmp_path: Path) -> None:
    golden = tmp_path / "golden.npz"
    assert kvdoctor("record", EXPORTS / "gpt2", "-o", golden).returncode == 0
    done = kvdoctor("step-test", make_model(tmp_path / "model"), "--against", golden)
    assert done.returncode == 0, done.stdout
    assert "34 calls of 3 decodings" in done.stdout


def test_an_adapter_that_the_steps_forget_is_found(tmp_path: Path) -> None:
    report = diagnose("step-test", make_model(tmp_path / "model", prefill_alone=True))
    assert report["verdict"] == "unhealthy"
    assert [one["outcome"] for one in report["runs"] if one["experiment"] in ("plain-loop", "adapter")] == [
        "passed",
        "differs",
    ]
    (error,) = [one for one in report["findings"] if one["severity"] == "error"]
    assert "adapter" in error["where"] + error["cause"]


def test_a_decoder_without_such_inputs_is_not_asked() -> None:
    runs = diagnose("step-test", EXPORTS / "gpt2")["runs"]
    assert not [one for one in runs if one["experiment"] == "adapter" and one["outcome"] != "skipped"]


# --- adapter files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 4, 16])
def test_an_adapter_of_any_rank_fits(rank: int, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    make_adapter(folder / "a.onnx_adapter", fitting(rank))
    assert misfits(folder) == []


WRONG: dict[str, tuple[dict[str, tuple[int, ...]], str]] = {
    "another width": ({PREFIX.format(0, "B"): (4, OUT - 1)}, "it has the shape [4, 95]"),
    "another rank than its partner": ({PREFIX.format(1, "B"): (8, OUT)}, "its rank is 4"),
    "a rank of 0": ({PREFIX.format(1, "A"): (WIDTH, 0)}, "which has no elements"),
    "a matrix too many": ({"layers.9.lora_A.weight": (4, 4)}, "no input of the graph takes it"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_an_adapter_that_does_not_fit_is_named(kind: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    changed, words = WRONG[kind]
    make_adapter(folder / "a.onnx_adapter", fitting() | changed)
    (observed,) = misfits(folder)
    assert words in observed


def test_a_matrix_that_is_missing_and_one_of_another_type_are_named(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    few = fitting()
    del few[PREFIX.format(1, "A")]
    file = make_adapter(folder / "a.onnx_adapter", few)
    assert "no matrix for this input" in misfits(folder)[0]
    file.unlink()
    make_adapter(folder / "b.onnx_adapter", fitting(), np.float16)
    assert "it is float16, and the input takes float" in misfits(folder)[0]


def test_matrices_that_are_stored_the_other_way_fit(tmp_path: Path) -> None:
    """lora_A as [rank, width], lora_B as [out, rank], turned in the graph: ranks are not compared by the wrong axes."""
    model = onnx.load(make_model(tmp_path / "model") / "model.onnx")
    turned = []
    for port in model.graph.input:
        if "lora_" in port.name:
            sizes = [(axis.dim_param, axis.dim_value) for axis in port.type.tensor_type.shape.dim]
            for axis, (name, size) in zip(port.type.tensor_type.shape.dim, reversed(sizes), strict=True):
                axis.Clear()
                axis.MergeFrom(onnx.TensorShapeProto.Dimension(dim_param=name) if name else axis)
                if not name:
                    axis.dim_value = size
            turned.append(helper.make_node("Transpose", [port.name], [f"{port.name}_turned"], perm=[1, 0]))
    names = {node.input[0] for node in turned}
    for node in model.graph.node:
        node.input[:] = [f"{name}_turned" if name in names else name for name in node.input]
    for node in reversed(turned):
        model.graph.node.insert(0, node)
    folder = tmp_path / "turned"
    folder.mkdir()
    onnx.save(model, folder / "model.onnx")
    make_adapter(folder / "a.onnx_adapter", {name: shape[::-1] for name, shape in fitting().items()})
    assert misfits(folder) == []


def test_an_input_with_a_value_of_its_own_needs_no_matrix(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    model = onnx.load(folder / "model.onnx")
    for port in model.graph.input:
        if "lora_" in port.name:
            shape = [axis.dim_value or 2 for axis in port.type.tensor_type.shape.dim]
            model.graph.initializer.append(helper.make_tensor(port.name, TensorProto.FLOAT, shape, np.zeros(shape)))
    onnx.save(model, folder / "model.onnx")
    make_adapter(folder / "a.onnx_adapter", fitting(2))
    assert misfits(folder) == []
    few = fitting(2)
    del few[PREFIX.format(1, "A")], few[PREFIX.format(1, "B")]
    make_adapter(folder / "a.onnx_adapter", few)
    assert misfits(folder) == []


def test_a_misfit_hides_no_fault_of_the_decoder(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", prefill_alone=True)
    make_adapter(folder / "a.onnx_adapter", fitting() | WRONG["another width"][0])
    names = {one["name"] for one in diagnose("step-test", folder)["findings"] if one["severity"] == "error"}
    assert CHECK in names
    assert len(names) == 2


def test_what_is_no_file_is_a_finding(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    (folder / "a.onnx_adapter").symlink_to(tmp_path / "gone")
    assert "it is a link to a file that is not there" in misfits(folder)[0]
    (folder / "a.onnx_adapter").unlink()
    os.mkfifo(folder / "b.onnx_adapter")
    assert "it is no file" in misfits(folder)[0]


def test_a_damaged_adapter_file_is_a_finding(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    whole = make_adapter(folder / "a.onnx_adapter", fitting()).read_bytes()
    rng = np.random.default_rng(0)
    noise = [bytes(rng.integers(0, 256, len(whole) // 8, np.uint8)) for _ in range(4)]
    cut = [whole[:length] for length in (0, 3, 8, 20, 60)]
    flipped = [whole[:8] + b"\xff" * 40 + whole[48:], whole[:4] + b"TORT" + b"\x7f" * 200]
    for content in (*cut, *(b"\x10\0\0\0TORT" + one for one in noise), *flipped):
        (folder / "a.onnx_adapter").write_bytes(content)
        assert len(misfits(folder)) == 1, content[:20]
