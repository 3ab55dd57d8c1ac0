"""LoRA: decoders that take the matrices of an adapter as inputs."""

import json
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper
from support.isolated import EXPORTS, kvdoctor

LAYERS, WIDTH, OUT = 2, 32, 96
PREFIX = "transformer.h.{}.attn.c_attn.lora_{}.weight"


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


def diagnose(command: str, folder: Path) -> dict[str, Any]:
    done = kvdoctor(command, folder, "--format", "json")
    assert "Traceback" not in done.stderr, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_decoder_that_takes_an_adapter_is_driven_without_one_and_with_one(tmp_path: Path) -> None:
    report = diagnose("step-test", make_model(tmp_path / "model"))
    assert (report["verdict"], report["findings"]) == ("healthy", [])
    run = next(one for one in report["runs"] if one["experiment"] == "adapter")
    assert run["outcome"] == "passed"
    assert {control["corrupted"]: control["visible"] for control in run["controls"]}["adapter left out"]


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
