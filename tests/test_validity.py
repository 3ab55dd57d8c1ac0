"""Every place at which a graph breaks the rules of ONNX is listed, with and without a run; real graphs have none."""

import json
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import GraphProto, NodeProto, helper
from onnx.defs import onnx_opset_version
from support.graph_faults import EXPORTS, broken
from support.isolated import kvdoctor
from support.text_fixtures import compile_text, load_all

from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.model.validity import find_violations, newest_opset
from kvdoctor.model.view import GraphView

ROOT = Path(__file__).parents[1]
BY_HAND = load_all()


def first(graph: GraphProto, op: str) -> NodeProto:
    return next(node for node in graph.node if node.op_type == op)


def doubled(graph: GraphProto) -> None:
    graph.node.append(helper.make_node("Identity", ["input_ids"], [first(graph, "Add").output[0]], name="again"))


def unknown_input(graph: GraphProto) -> None:
    first(graph, "Add").input[0] = "nowhere"


def unknown_output(graph: GraphProto) -> None:
    graph.output.append(helper.make_tensor_value_info("nobody", onnx.TensorProto.FLOAT, [1]))


def third_input(graph: GraphProto) -> None:
    node = first(graph, "Add")
    node.input.append(node.input[0])


def left_out(graph: GraphProto) -> None:
    first(graph, "MatMul").input[1] = ""


def without_axis(graph: GraphProto) -> None:
    del first(graph, "Concat").attribute[:]


def odd_attribute(graph: GraphProto) -> None:
    first(graph, "MatMul").attribute.append(helper.make_attribute("sharpness", 1))


def another_type(graph: GraphProto) -> None:
    attribute = first(graph, "Concat").attribute[0]
    attribute.CopyFrom(helper.make_attribute(attribute.name, [0]))


def unknown_operator(graph: GraphProto) -> None:
    first(graph, "Add").op_type = "Addd"


def later_operator(graph: GraphProto) -> None:
    node = first(graph, "Add")
    node.CopyFrom(helper.make_node("Gelu", node.input[:1], list(node.output), name=node.name))


def circle(graph: GraphProto) -> None:
    node = first(graph, "Softmax")
    node.input[0] = node.output[0]


PLACES: dict[str, tuple[Callable[[GraphProto], None], str]] = {
    "a value computed twice": (doubled, 'Identity "again" computes '),
    "a value that nothing computes": (unknown_input, "reads 'nowhere', which nothing computes"),
    "an output that nothing computes": (unknown_output, "nothing computes the output 'nobody'"),
    "too many inputs": (third_input, "has 3 inputs; opset 14 allows 2"),
    "an input left out": (left_out, "leaves out its input 1, which is not optional"),
    "an attribute left out": (without_axis, "does not have the attribute 'axis'"),
    "an attribute of no operator": (odd_attribute, "has an attribute 'sharpness', which the operator"),
    "an attribute of another type": (another_type, "has an attribute 'axis' of type INTS in place of INT"),
    "an operator that is none": (unknown_operator, "is no operator of ONNX"),
    "an operator of a later opset": (later_operator, "is an operator of later opsets than "),
    "a cycle": (circle, "needs a value that depends on its own output"),
}


def invalid(command: str, model: Path) -> list[dict[str, Any]]:
    done = kvdoctor(command, model, "--format", "json", "--no-config")
    assert "Traceback" not in done.stderr
    return [one for one in json.loads(done.stdout)["findings"] if one["name"] == "invalid-graph"]


@pytest.mark.parametrize("kind", PLACES)
def test_each_rule_names_its_place_and_no_other(kind: str, tmp_path: Path) -> None:
    damage, words = PLACES[kind]
    (file,) = open_folder(str(broken("gpt2", "model.onnx", damage, tmp_path))).files
    assert file.view is not None
    (problem,) = find_violations(file.view)
    assert problem.startswith("graph: ")
    assert words in problem


def damaged_three_times(graph: GraphProto) -> None:
    for damage in (third_input, without_axis, odd_attribute):
        damage(graph)


@pytest.mark.parametrize(
    ("command", "severity", "confidence"), [("inspect", "warning", "suspected"), ("step-test", "error", "confirmed")]
)
def test_all_places_are_listed_with_and_without_a_run(
    command: str, severity: str, confidence: str, tmp_path: Path
) -> None:
    (finding,) = invalid(command, broken("gpt2", "model.onnx", damaged_three_times, tmp_path))
    assert (finding["severity"], finding["confidence"]) == (severity, confidence)
    assert finding["observed"] == "3 places break its rules"
    assert [words for words in ("3 inputs", "'axis'", "'sharpness'") if words in "\n".join(finding["evidence"])] == [
        "3 inputs",
        "'axis'",
        "'sharpness'",
    ]


def test_real_exports_have_no_such_place() -> None:
    files = [file for export in sorted(EXPORTS.glob("*/")) for file in open_folder(str(export)).files]
    assert len(files) > 15
    assert [(file.name, found) for file in files if file.view and (found := find_violations(file.view))] == []


def test_healthy_text_fixtures_have_no_such_place() -> None:
    models = [
        (name, compile_text(text))
        for name, fixture in BY_HAND.items()
        if fixture.healthy
        for file, text in fixture.files.items()
        if file.endswith(".onnx")
    ]
    assert len(models) > 50
    assert [(name, found) for name, model in models if (found := find_violations(GraphView(model)))] == []


def test_what_the_table_does_not_know_is_not_judged() -> None:
    """A newer opset, another domain and a local function may have any operator; the runtime has some of its own."""
    node = helper.make_node("Novelty", ["x"], ["y"])
    value = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy"]
    newer = helper.make_model(
        helper.make_graph([node], "g", value[:1], value[1:]),
        opset_imports=[helper.make_opsetid("", newest_opset() + 1)],
    )
    assert find_violations(GraphView(newer)) == ()
    newer.opset_import[0].version = 17
    assert find_violations(GraphView(newer)) == ('graph: Novelty "y" is no operator of ONNX',)
    newer.graph.node[0].op_type = "SimplifiedLayerNormalization"
    assert find_violations(GraphView(newer)) == ()
    newer.graph.node[0].op_type, newer.graph.node[0].domain = "Novelty", "org.example"
    assert find_violations(GraphView(newer)) == ()
    newer.functions.append(
        helper.make_function("org.example", "Novelty", ["a"], ["b"], [helper.make_node("Relu", ["c"], ["b"])], [])
    )
    newer.functions[0].opset_import.extend(newer.opset_import)
    assert find_violations(GraphView(newer)) == ("function 'Novelty': Relu \"b\" reads 'c', which nothing computes",)


def test_the_table_of_operators_is_that_of_onnx() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_operators.py"))
    kept = json.loads(made["TABLE"].read_text(encoding="utf-8"))
    if onnx_opset_version() != kept["opset"]:
        pytest.skip(f"this onnx has opset {onnx_opset_version()}, the table that of onnx {kept['onnx']}")
    assert json.loads(json.dumps(made["table"]()["operators"])) == kept["operators"]
