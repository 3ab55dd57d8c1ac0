"""`diff` compares weights by content: what differs is named with its layer and its size; equal content never is."""

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import GraphProto, TensorProto, helper
from onnx.numpy_helper import from_array, to_array
from support.graph_faults import EXPORTS, broken
from support.isolated import kvdoctor

from kvdoctor.addons.comparison.document import WeightsDiff
from kvdoctor.addons.comparison.files_diff import compare_weights
from kvdoctor.model.weights import list_weights

WEIGHT = "transformer.h.1.mlp.c_fc.weight"


def changed(change: Callable[[np.ndarray], np.ndarray], name: str = WEIGHT) -> Callable[[GraphProto], None]:
    def operate(graph: GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == name)
        tensor.CopyFrom(from_array(change(to_array(tensor).copy()), name))

    return operate


def add_half(values: np.ndarray) -> np.ndarray:
    values[0, 0] += 0.5
    return values


def rename(graph: GraphProto) -> None:
    for tensor in graph.initializer:
        if tensor.name == WEIGHT:
            tensor.name = "onnx::MatMul_1"
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name == WEIGHT:
                node.input[index] = "onnx::MatMul_1"


def compared(surgery: Callable[[GraphProto], None], folder: Path) -> WeightsDiff:
    model = broken("gpt2", "model.onnx", surgery, folder) / "model.onnx"
    return compare_weights([("model.onnx", EXPORTS / "gpt2" / "model.onnx", model)])


def test_a_changed_weight_is_named_with_its_layer_and_size(tmp_path: Path) -> None:
    found = compared(changed(add_half), tmp_path)
    (one,) = found.changed
    assert (one.name, one.other, one.layer, one.type) == (WEIGHT, WEIGHT, 1, "float32[32, 128]")
    assert one.largest == pytest.approx(0.5)
    assert one.relative == pytest.approx(0.026, rel=0.05)
    assert one.correlation == pytest.approx(0.9997, abs=1e-4)
    assert (found.equal, found.only_a, found.only_b) == (False, (), ())


def test_equal_content_is_equal_whatever_its_name(tmp_path: Path) -> None:
    found = compared(rename, tmp_path)
    assert found.equal
    assert found.renamed == 1
    assert compared(lambda _graph: None, tmp_path / "same").renamed == 0


def test_weights_that_are_exchanged_are_changed(tmp_path: Path) -> None:
    other = "transformer.h.0.mlp.c_fc.weight"

    def exchange(graph: GraphProto) -> None:
        for tensor in graph.initializer:
            tensor.name = {WEIGHT: other, other: WEIGHT}.get(tensor.name, tensor.name)

    found = compared(exchange, tmp_path)
    assert {one.name for one in found.changed} == {WEIGHT, other}
    assert not found.equal


def test_a_renamed_and_changed_weight_is_matched_by_its_sizes(tmp_path: Path) -> None:
    def both(graph: GraphProto) -> None:
        changed(add_half)(graph)
        rename(graph)

    (one,) = compared(both, tmp_path).changed
    assert (one.name, one.other, one.layer) == (WEIGHT, "onnx::MatMul_1", 1)


@pytest.mark.parametrize(
    ("change", "kind", "reason"),
    [
        (lambda v: v.astype(np.float16), "float32[32, 128] -> float16[32, 128]", ""),
        (lambda v: v.T.copy(), "float32[32, 128] -> float32[128, 32]", "their sizes differ"),
        (lambda v: v.astype(np.int8), "float32[32, 128] -> int8[32, 128]", "one side is quantized"),
        (lambda v: v * np.nan, "float32[32, 128]", "NaN or Inf"),
    ],
)
def test_types_and_sizes_are_said(
    change: Callable[[np.ndarray], np.ndarray], kind: str, reason: str, tmp_path: Path
) -> None:
    (one,) = compared(changed(change), tmp_path).changed
    assert one.type == kind
    assert reason in one.reason
    assert (one.largest is None) == bool(reason)
    if not reason:
        assert one.correlation == pytest.approx(1, abs=1e-4)


def save(path: Path, tensors: list[TensorProto], external: bool = False) -> Path:
    graph = helper.make_graph([], "weights", [], [], tensors)
    onnx.save(helper.make_model(graph), path, save_as_external_data=external, location=f"{path.name}.data")
    return path


def save_chain(path: Path, weights: list[str], first: bool = False) -> Path:
    """A chain of products whose i-th reads the i-th name; each has content of its own. `first` puts one in front."""
    rng = np.random.default_rng(0)
    values = {f"content {at}": rng.standard_normal((4, 4)).astype(np.float32) for at in range(len(weights))}
    tensors = [from_array(one, name) for one, name in zip(values.values(), weights, strict=True)]
    nodes = [helper.make_node("MatMul", [f"x{at}", name], [f"x{at + 1}"]) for at, name in enumerate(weights)]
    if first:
        nodes.insert(0, helper.make_node("MatMul", ["x", "w0"], ["x0"]))
        tensors.insert(0, from_array(np.ones((4, 4), np.float32), "w0"))
    onnx.save(helper.make_model(helper.make_graph(nodes, "chain", [], [], tensors)), path)
    return path


@pytest.mark.parametrize(
    ("after", "first", "changed"),
    [
        ([2, 3, 4, 5, 6, 7], False, []),
        ([2, 3, 4, 5, 6, 7], True, []),
        ([1, 2, 3, 4, 6, 5], False, ["w5", "w6"]),
        ([1, 2, 3, 4, 6, 5], True, ["w5", "w6"]),
        ([4, 5, 6, 1, 2, 3], True, ["w1", "w2", "w3", "w4", "w5", "w6"]),
    ],
    ids=["counted", "counted in a longer graph", "exchanged", "exchanged in a longer graph", "layers exchanged"],
)
def test_names_that_are_counted_anew_are_told_from_weights_that_are_exchanged(
    after: list[int], first: bool, changed: list[str], tmp_path: Path
) -> None:
    a = save_chain(tmp_path / "a.onnx", [f"w{at}" for at in range(1, 7)])
    if changed:  # the nodes read the names that they had, and these have other contents
        content = dict(zip([f"w{at}" for at in after], list_contents(a), strict=True))
        b = save_chain(tmp_path / "b.onnx", [f"w{at}" for at in range(1, 7)], first)
        model = onnx.load(b)
        for tensor in model.graph.initializer:
            tensor.CopyFrom(from_array(content.get(tensor.name, to_array(tensor)), tensor.name))
        onnx.save(model, b)
    else:
        b = save_chain(tmp_path / "b.onnx", [f"w{at}" for at in after], first)
    found = compare_weights([("model.onnx", a, b)])
    assert [one.name for one in found.changed] == changed
    assert (found.only_a, found.only_b) == ((), ("w0",) if first else ())
    assert found.renamed == (0 if changed else 6)


def list_contents(path: Path) -> list[np.ndarray]:
    return [to_array(tensor) for tensor in onnx.load(path).graph.initializer]


def test_parts_of_a_quantized_weight_are_not_new_weights(tmp_path: Path) -> None:
    values = np.ones((4, 8), np.float32)
    a = save(tmp_path / "a.onnx", [from_array(values, "layers.0.mlp.weight")])
    parts = {"Q4": np.ones((4, 4), np.uint8), "scales": np.ones(4, np.float32)}
    b = save(tmp_path / "b.onnx", [from_array(one, f"layers.0.mlp.weight_{end}") for end, one in parts.items()])
    for pair, words in (((a, b), "quantized in B"), ((b, a), "quantized in A")):
        found = compare_weights([("model.onnx", *pair)])
        assert (found.only_a, found.only_b) == ((), ())
        assert [words in one.reason for one in found.changed] == [True]


def test_weights_are_read_in_portions(tmp_path: Path) -> None:
    values = np.zeros((4096, 4096), np.float32)  # 64 MiB
    a = save(tmp_path / "a.onnx", [from_array(values, "w")], external=True)
    values[-1, -1] = 1
    b = save(tmp_path / "b.onnx", [from_array(values, "w")], external=True)
    del values
    tracemalloc.start()
    found = compare_weights([("model.onnx", a, b)])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.changed[0].largest == 1
    assert peak < 60 << 20


@pytest.mark.slow
def test_the_command_shows_them_and_a_report_has_none(tmp_path: Path) -> None:
    other = broken("gpt2", "model.onnx", changed(add_half), tmp_path / "other")
    done = kvdoctor("diff", "--static", EXPORTS / "gpt2", other)
    assert done.returncode == 0, done.stderr
    assert f"~ weight       {WEIGHT} float32[32, 128]: off by at most 0.5" in done.stdout
    assert "B is different, but not worse" in done.stdout
    same = kvdoctor("diff", "--static", EXPORTS / "gpt2", EXPORTS / "gpt2")
    assert same.stdout.splitlines()[-1].startswith("equal in contract, operator counts and weights")
    report = tmp_path / "report.json"
    report.write_text(kvdoctor("inspect", EXPORTS / "gpt2", "--format", "json").stdout, encoding="utf-8")
    done = kvdoctor("diff", "--static", report, other, "--format", "json")
    document: dict[str, Any] = json.loads(done.stdout)
    assert document["stacks"][0]["weights"] is None
    assert [entry["what"] for entry in document["not_compared"]] == ["weights"]


def test_weights_that_are_missing_are_not_compared(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(EXPORTS / "gpt2", tmp_path / "cut"))
    model = onnx.load(folder / "model.onnx")
    onnx.save(model, folder / "model.onnx", save_as_external_data=True, location="w.data", size_threshold=0)
    assert len(list_weights(folder / "model.onnx")) > 10
    with (folder / "w.data").open("r+b") as file:
        file.truncate(100)
    done = kvdoctor("diff", "--static", EXPORTS / "gpt2", folder)
    assert "Traceback" not in done.stderr
    assert "not compared: weights" in done.stdout
    assert "equal" not in done.stdout.splitlines()[-1]
