"""Every place at which a graph breaks the rules of ONNX, from its structure alone.

`onnx.checker` stops at the first place, needs the operators of onnx, and refuses graphs that every runtime opens. The
rules here are those that ONNX Runtime shares: it does not open a graph that breaks one. Sources: IR.md of ONNX, "Names
Within a Graph" and "Graphs", and what each version of a standard operator takes and returns: the table
`operator_versions.json`, which `docs/make_operators.py` writes.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from kvdoctor.model import traverse
from kvdoctor.model.proto import AttributeProto, GraphProto, NodeProto
from kvdoctor.model.view import GraphView
from kvdoctor.records import record

OF_RUNTIME = frozenset(
    {"ATen", "Affine", "ConstantFill", "Crop", "DynamicSlice", "GRUUnit", "GivenTensorFill", "ImageScaler"}
    | {"LayerNormalization", "ParametricSoftplus", "Scale", "ScaledTanh", "SimplifiedLayerNormalization"}
)
"""Operators that ONNX Runtime has under the standard domain in addition to those of ONNX, at any version of it.

Source: onnxruntime/core/graph/contrib_ops/contrib_defs.cc, `.SetDomain(kOnnxDomain)`.
"""


@record
class Signature:
    """What one version of an operator takes and returns.

    Attributes:
        since: The first opset that has this version.
        inputs: The least and the greatest number of inputs; the greatest is None where any number is allowed.
        outputs: The same of the outputs.
        needed: The places of the inputs that may not be left out by an empty name.
        attributes: The type of each attribute, a number of `AttributeProto.AttributeType`.
        required: The attributes without a default.
        deprecated: Whether this version says only that the operator is no more.
    """

    since: int
    inputs: tuple[int, int | None]
    outputs: tuple[int, int | None]
    needed: tuple[int, ...]
    attributes: dict[str, int]
    required: tuple[str, ...]
    deprecated: bool


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(Path(__file__).with_name("operator_versions.json").read_text(encoding="utf-8"))
    return table


def newest_opset() -> int:
    """The newest opset of the table."""
    return int(_table()["opset"])


@cache
def find_signature(name: str, opset: int) -> Signature | None:
    """The version of a standard operator in an opset; None where it has none yet."""
    fitting = [entry for entry in _table()["operators"].get(name, ()) if entry[0] <= opset]
    if not fitting:
        return None
    since, inputs, outputs, needed, attributes, required, deprecated = fitting[-1]
    return Signature(since, tuple(inputs), tuple(outputs), tuple(needed), attributes, tuple(required), deprecated)


Names = frozenset[str]


def find_violations(view: GraphView) -> tuple[str, ...]:
    """Each violation as text, in the order of the file: graphs before the subgraphs of their nodes, functions last.

    Operators of other domains and of local functions, and opsets newer than the table, are not judged.
    """
    local = frozenset((function.domain, function.name) for function in view.model.functions)
    rules = _Rules(local, _standard_opset(view.model.opset_import))
    found = list(rules.judge_graph(view.model.graph, "graph", frozenset()))
    for function in view.model.functions:
        visible = frozenset([*function.input, *(name for node in function.node for name in node.output if name)])
        rules, path = _Rules(local, _standard_opset(function.opset_import)), f"function {function.name!r}"
        found += rules.judge(function.node, path, visible, function.input, function.output)
    return tuple(found)


def _standard_opset(imports: Iterable[Any]) -> int | None:
    """The version of the standard operators; None where none is imported, for which ONNX Runtime takes its newest."""
    return next((int(entry.version) for entry in imports if entry.domain in traverse.STANDARD), None)


class _Rules:
    """The rules for a model or function. `opset` is its version of the standard operators, None where it names none."""

    def __init__(self, local: frozenset[tuple[str, str]], opset: int | None) -> None:
        self.local, self.opset = local, opset

    def judge_graph(self, graph: GraphProto, path: str, outer: Names) -> Iterator[str]:
        """The violations of a graph and of the subgraphs in it; `outer` are the values of the graphs around it."""
        given, returned = ([value.name for value in values] for values in (graph.input, graph.output))
        yield from self.judge(graph.node, path, outer | traverse.own_names(graph), given, returned)

    def judge(
        self, nodes: Iterable[NodeProto], path: str, visible: Names, given: Iterable[str], returned: Iterable[str]
    ) -> Iterator[str]:
        """The violations of nodes with the values that they see, those that they are given, and those they return."""
        listed = list(nodes)
        yield from _made_twice(listed, given, path)
        _, cyclic = traverse.stable_order(
            [traverse.values_read(node) for node in listed], [node.output for node in listed]
        )
        if cyclic:
            yield f"{path}: {traverse.describe_node(listed[cyclic[0]])} needs a value that depends on its own output"
        for node in listed:
            unmade = [name for name in dict.fromkeys(node.input) if name and name not in visible]
            problems = [*(f"reads {name!r}, which nothing computes" for name in unmade), *self._judge_operator(node)]
            yield from (f"{path}: {traverse.describe_node(node)} {problem}" for problem in problems)
            for attribute in node.attribute:
                for body in traverse.bodies_of(attribute):
                    inner = f"{traverse.describe_node(node)}, {attribute.name}"
                    yield from self.judge_graph(body, inner, visible)
        yield from (f"{path}: nothing computes the output {name!r}" for name in returned if name not in visible)

    def _judge_operator(self, node: NodeProto) -> Iterator[str]:
        if node.domain not in traverse.STANDARD or (node.domain, node.op_type) in self.local:
            return
        if self.opset is None or self.opset > newest_opset():
            return
        signature = find_signature(node.op_type, self.opset)
        if signature is None and node.op_type in OF_RUNTIME:
            return
        if signature is None and node.op_type in _table()["operators"]:
            yield f"is an operator of later opsets than {self.opset}"
        elif signature is None:
            yield "is no operator of ONNX"
        elif signature.deprecated:
            yield f"is an operator that opset {signature.since} removed"
        else:
            yield from _judge_numbers(node, signature)
            yield from _judge_attributes(node, signature)


def _judge_numbers(node: NodeProto, signature: Signature) -> Iterator[str]:
    """Inputs and outputs: their number, and those that may not be left out."""
    for kind, count, (least, most) in (
        ("input", len(node.input), signature.inputs),
        ("output", len(node.output), signature.outputs),
    ):
        if count < least or (most is not None and count > most):
            allowed = f"{least}" if least == most else f"{least} or more" if most is None else f"{least} to {most}"
            yield f"has {count} {kind}{'s' * (count != 1)}; opset {signature.since} allows {allowed}"
    empty = [at for at in signature.needed if at < len(node.input) and not node.input[at]]
    for at in empty:
        yield f"leaves out its input {at}, which is not optional"


def _judge_attributes(node: NodeProto, signature: Signature) -> Iterator[str]:
    """Attributes that the operator lacks, does not know, or has as another type."""
    given: Mapping[str, AttributeProto] = {attribute.name: attribute for attribute in node.attribute}
    for name in signature.required:
        if name not in given:
            yield f"does not have the attribute {name!r}"
    for name, attribute in given.items():
        wanted = signature.attributes.get(name)
        if wanted is None:
            yield f"has an attribute {name!r}, which the operator of opset {signature.since} does not have"
        elif attribute.type and attribute.type != wanted:
            kinds = AttributeProto.AttributeType
            yield f"has an attribute {name!r} of type {kinds.Name(attribute.type)} in place of {kinds.Name(wanted)}"


def _made_twice(nodes: Iterable[NodeProto], given: Iterable[str], path: str) -> Iterator[str]:
    """Values that two nodes compute, or a node and an input."""
    inputs = set(given)
    made: dict[str, NodeProto] = {}
    for node in nodes:
        for name in filter(None, node.output):
            if name in inputs or (name in made and not traverse.are_equal_constants(made[name], node)):
                other = "is an input" if name in inputs else f"{traverse.describe_node(made[name])} computes"
                too = "" if name in inputs else " too"
                yield f"{path}: {traverse.describe_node(node)} computes {name!r}, which {other}{too}"
            made[name] = node
