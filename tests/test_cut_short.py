"""Graphs whose nodes are cut short, go in circles or decide: read without a traceback, and not guessed at."""

from pathlib import Path

import onnx
import pytest
from onnx import TensorProto
from onnx.helper import make_graph, make_node, make_tensor_value_info
from support.text_fixtures import load_all

from kvdoctor.contract import CacheContract
from kvdoctor.diagnose.inspection import inspect

PAST = "past_key_values.0.key"
NODES = {
    "a Gather without index": make_node("Gather", [PAST], ["made"]),
    "an Identity without output": make_node("Identity", [PAST], []),
    "a Cast without output": make_node("Cast", [PAST], [], to=1),
    "a Where without an else": make_node("Where", ["attention_mask", PAST], ["made"]),
    "a Transpose without input": make_node("Transpose", [], ["made"]),
    "a Slice without ends": make_node("Slice", [PAST], ["made"]),
    "a Concat of nothing": make_node("Concat", [], ["made"], axis=2),
    "a lookup without table": make_node("EmbedLayerNormalization", ["input_ids"], ["made"], domain="com.microsoft"),
    "an Add of one": make_node("Add", [PAST], ["made"]),
    "a Shape of nothing": make_node("Shape", [], ["made"]),
}


def with_nodes(out: Path, *nodes: onnx.NodeProto) -> Path:
    """The healthy decoder with more nodes in front of its own."""
    folder = load_all()["decoder-only-healthy"].write(out)
    model = onnx.load(str(folder / "model.onnx"))
    own = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend([*nodes, *own])
    onnx.save(model, str(folder / "model.onnx"))
    return folder


def contract_of(folder: Path) -> CacheContract:
    (stack,) = inspect(str(folder)).stacks
    assert stack.contract is not None
    return stack.contract


@pytest.mark.parametrize("what", NODES)
def test_a_node_that_is_cut_short_changes_no_slot(what: str, tmp_path: Path) -> None:
    slots = contract_of(with_nodes(tmp_path, NODES[what])).slots
    assert [slot.present for slot in slots] == ["present.0.key", "present.0.value", "present.1.key", "present.1.value"]


def test_a_circle_of_names_ends(tmp_path: Path) -> None:
    """Two nodes that pass one another's output on, behind an output that looks like a state."""
    folder = with_nodes(tmp_path, make_node("Identity", ["one"], ["other"]), make_node("Identity", ["other"], ["one"]))
    model = onnx.load(str(folder / "model.onnx"))
    model.graph.output.append(make_tensor_value_info("one", TensorProto.FLOAT, ["batch_size", 2, 4]))
    model.graph.input.append(make_tensor_value_info("state", TensorProto.FLOAT, ["batch_size", 2, 4]))
    onnx.save(model, str(folder / "model.onnx"))
    assert contract_of(folder).slots


def test_what_decides_a_branch_is_not_called_unused(tmp_path: Path) -> None:
    """An input that is only the condition of an If chooses what is computed: feeding anything is no answer."""
    bodies = [
        make_graph([make_node("Identity", ["attention_mask"], [f"{name}_out"])], name, [], [_untyped(f"{name}_out")])
        for name in ("yes", "no")
    ]
    node = make_node("If", ["choice"], ["chosen"], then_branch=bodies[0], else_branch=bodies[1])
    folder = with_nodes(tmp_path, node)
    model = onnx.load(str(folder / "model.onnx"))
    model.graph.input.append(make_tensor_value_info("choice", TensorProto.BOOL, [1]))
    onnx.save(model, str(folder / "model.onnx"))
    (choice,) = (one for one in contract_of(folder).ambiguities if one.subject == "choice")
    assert choice.unknown


def test_an_input_that_nothing_reads_is_fed_all_the_same(tmp_path: Path) -> None:
    folder = with_nodes(tmp_path)
    model = onnx.load(str(folder / "model.onnx"))
    model.graph.input.append(make_tensor_value_info("left_over", TensorProto.FLOAT, ["batch_size", 3]))
    onnx.save(model, str(folder / "model.onnx"))
    contract = contract_of(folder)
    assert not contract.missing
    assert {port.name for port in contract.graph("decode").inputs if port.role == "unused"} == {"left_over"}


def _untyped(name: str) -> onnx.ValueInfoProto:
    return make_tensor_value_info(name, TensorProto.INT64, None)
