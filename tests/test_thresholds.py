"""Lengths that a graph compares with: a number that no sequence reaches hides no other one."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.isolated import FIXTURES, kvdoctor
from support.text_fixtures import load_all

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.diagnose.examine import list_thresholds

RIGHT = FIXTURES / "from_scratch" / "right.onnx"
"""A decoder with 64 positions; its past length is the value `/Gather_output_0`."""
LENGTH = "/Gather_output_0"
CONCAT = "/blocks.1/attn/Concat_3"


def write(path: Path, *thresholds: int, cleared: bool) -> Path:
    """Write a copy that compares its past with numbers: from these on the new keys of layer 1 are zero, or kept."""
    model = onnx.load(RIGHT)
    concat = next(node for node in model.graph.node if node.name == CONCAT)
    at = list(model.graph.node).index(concat)
    before, below = [], None
    for number in thresholds:
        model.graph.initializer.append(numpy_helper.from_array(np.array(number, np.int64), f"limit_{number}"))
        before.append(helper.make_node("Less", [LENGTH, f"limit_{number}"], [f"below_{number}"], f"below_{number}"))
        if below is not None:
            before.append(helper.make_node("And", [below, f"below_{number}"], [f"all_{number}"]))
        below = f"below_{number}" if below is None else f"all_{number}"
    before.append(helper.make_node("Cast", [below], ["number"], to=onnx.TensorProto.FLOAT))
    # The factor is the number itself, 0 or 1, or the larger of it and 1, which changes nothing.
    model.graph.initializer.append(numpy_helper.from_array(np.array(0 if cleared else 1, np.float32), "least"))
    before.append(helper.make_node("Max", ["number", "least"], ["factor"]))
    before.append(helper.make_node("Mul", [concat.input[1], "factor"], ["new_keys"]))
    concat.input[1] = "new_keys"
    for node in reversed(before):
        model.graph.node.insert(at, node)
    onnx.save(model, path)
    return path


@pytest.mark.parametrize("thresholds", [(50,), (50, 100)])
def test_a_fault_behind_a_length_is_found_beside_one_that_no_sequence_reaches(
    thresholds: tuple[int, ...], tmp_path: Path
) -> None:
    path = write(tmp_path / "model.onnx", *thresholds, cleared=True)
    done = kvdoctor("step-test", path, "--format", "json")
    assert [each["name"] for each in json.loads(done.stdout)["findings"] if each["severity"] == "error"] == [
        "wrong-at-lengths"
    ]
    assert done.returncode == 1


def test_the_same_comparison_without_a_fault_is_healthy_and_what_is_out_of_reach_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx", 50, 100, cleared=False)
    document = json.loads(kvdoctor("step-test", path, "--format", "json").stdout)
    assert document["verdict"] == "healthy"
    runs = {run["experiment"]: run["outcome"] for run in document["runs"]}
    assert runs["near-thresholds"] == "passed"
    assert [each["reason"].count("100 (Less") for each in document["not_checked"]] == [1]
    thorough = json.loads(kvdoctor("step-test", path, "--format", "json", "--thorough").stdout)
    assert not any("--thorough" in each["reason"] for each in thorough["not_checked"])


COMPUTED = {
    "the rows of a table": ([("Shape", ["table"], ["sizes"]), ("Gather", ["sizes", "zero"], ["limit"])], 50),
    "the last row of a table": (
        [("Shape", ["table"], ["sizes"]), ("Gather", ["sizes", "zero"], ["rows"]), ("Sub", ["rows", "one"], ["limit"])],
        49,
    ),
    "a power": ([("Exp", ["exponent"], ["power"]), ("Cast", ["power"], ["limit"])], 54),
}
"""Nodes that compute a limit of constants alone, and the limit."""


@pytest.mark.parametrize("way", COMPUTED)
def test_a_limit_that_is_computed_of_constants_is_a_threshold(way: str, tmp_path: Path) -> None:
    nodes, limit = COMPUTED[way]
    model = onnx.load(write(tmp_path / "model.onnx", 30, cleared=False))
    constants = {"table": np.zeros((50, 8), np.float32), "zero": np.array(0), "one": np.array(1)}
    for name, value in (constants | {"exponent": np.array(4, np.float32)}).items():
        model.graph.initializer.append(numpy_helper.from_array(value, name))
    for kind, inputs, outputs in reversed(nodes):
        kept = {"to": onnx.TensorProto.INT64} if kind == "Cast" else {}
        model.graph.node.insert(0, helper.make_node(kind, inputs, outputs, **kept))
    next(node for node in model.graph.node if node.name == "below_30").input[1] = "limit"
    onnx.save(model, tmp_path / "model.onnx")
    folder = open_folder(str(tmp_path / "model.onnx"))
    contract = read_contract(folder.stacks[0], folder.side_cars)
    found = {threshold.length: threshold.node for threshold in list_thresholds(folder.stacks[0], contract)}
    assert found[limit] == 'Less "below_30"'
    assert 30 not in found


@pytest.mark.parametrize(
    ("kind", "ends"), [("INT8", (128, 256)), ("BFLOAT16", (256,)), ("FLOAT16", (2048,)), ("INT32", ())]
)
def test_a_type_that_ends_or_rounds_is_a_threshold_of_positions(
    kind: str, ends: tuple[int, ...], tmp_path: Path
) -> None:
    fixture = load_all()["context-limit-fails-narrow"]
    text = fixture.files["model.onnx"].replace("<to = 3>", f"<to = {onnx.TensorProto.DataType.Value(kind)}>")
    folder = open_folder(str(replace(fixture, files={"model.onnx": text}).write(tmp_path)))
    contract = read_contract(folder.stacks[0], folder.side_cars)
    assert tuple(one.length for one in list_thresholds(folder.stacks[0], contract) if "Cast" in one.node) == ends
