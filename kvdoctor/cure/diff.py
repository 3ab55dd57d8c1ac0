"""What is other in a changed file, to be read: versions, inputs, outputs, initializers, nodes and their bodies."""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from kvdoctor.contract import describe
from kvdoctor.graph import ELEMENT_TYPES, GraphView, Scope, bodies_of, declared
from kvdoctor.onnx_schema import AttributeProto, ModelProto, NodeProto, TensorProto
from kvdoctor.report.document import FileDiff

MOST_LINES = 400
MOST_VALUES = 8
LARGEST_MATCHED = 4000
"""Nodes of one graph up to which lines are matched one by one; longer ones are compared as sets."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a model that is compared by itself: its title, and one line for each thing in it."""

    title: str
    lines: tuple[str, ...]


def diff(file: str, old: ModelProto, new: ModelProto) -> FileDiff:
    """The lines that only the one or only the other model has, under the title of their part."""
    lines: list[str] = []
    was, now = ({part.title: part.lines for part in _parts(model)} for model in (old, new))
    for title in dict.fromkeys([*was, *now]):
        found = list(_changed(was.get(title, ()), now.get(title, ())))
        lines += [f"  {title}", *found] if found else []
    return FileDiff(file, tuple(lines[:MOST_LINES]), max(len(lines) - MOST_LINES, 0))


def _changed(old: tuple[str, ...], new: tuple[str, ...]) -> Iterator[str]:
    if old == new:
        return
    if max(len(old), len(new)) > LARGEST_MATCHED:
        before, after = set(old), set(new)
        yield from (f"- {line}" for line in old if line not in after)
        yield from (f"+ {line}" for line in new if line not in before)
        return
    for line in difflib.unified_diff(old, new, lineterm="", n=0):
        if line[0] in "+-" and line[:3] not in ("+++", "---"):
            yield f"{line[0]} {line[1:]}"


def _parts(model: ModelProto) -> Iterator[_Part]:
    opsets = tuple(f"opset {entry.domain or 'ai.onnx'} {entry.version}" for entry in model.opset_import)
    yield _Part("model", (f"IR version {model.ir_version}", *opsets))
    for scope in GraphView(model).scopes():
        yield from _graph_parts(scope)
    for function in model.functions:
        yield _Part(f"function {function.name}", tuple(_node(node) for node in function.node))


def _graph_parts(scope: Scope) -> Iterator[_Part]:
    graph, path = scope.graph, scope.path
    for title, values in (("inputs", graph.input), ("outputs", graph.output), ("declared inside", graph.value_info)):
        found = (declared(value) for value in values)
        yield _Part(f"{path}, {title}", tuple(f"{d.name} {describe(d.dtype, d.shape)}" for d in found))
    yield _Part(f"{path}, initializers", tuple(sorted(_tensor(tensor) for tensor in graph.initializer)))
    yield _Part(f"{path}, nodes", tuple(_node(node) for node in graph.node))


def _node(node: NodeProto) -> str:
    kind = f"{node.domain}.{node.op_type}" if node.domain else str(node.op_type)
    attributes = ", ".join(filter(None, (_attribute(attribute) for attribute in node.attribute)))
    text = f"{', '.join(node.output)} = {kind}({', '.join(node.input)}" + (f"; {attributes}" if attributes else "")
    return f"{text})" + (f'  "{node.name}"' if node.name else "")


def _attribute(attribute: AttributeProto) -> str:
    if any(True for _ in bodies_of(attribute)):
        return ""  # a part of its own
    if attribute.HasField("t"):
        return f"{attribute.name}={_tensor(attribute.t)}"
    for values in ([attribute.i] if attribute.HasField("i") else [], attribute.ints, attribute.floats):
        if values:
            return f"{attribute.name}={list(values)[:MOST_VALUES]}"
    if attribute.HasField("f"):
        return f"{attribute.name}={attribute.f:g}"
    return f"{attribute.name}={attribute.s[:60]!r}" if attribute.HasField("s") else str(attribute.name)


def _tensor(tensor: TensorProto) -> str:
    dtype = ELEMENT_TYPES.get(tensor.data_type, "?")
    size = 1
    for dim in tensor.dims:
        size *= dim
    values = ""
    if size <= MOST_VALUES and tensor.data_location != TensorProto.EXTERNAL and tensor.data_type != TensorProto.STRING:
        from onnx import numpy_helper

        try:
            values = f" = {numpy_helper.to_array(tensor).tolist()}"
        except (ValueError, TypeError):
            values = " = (damaged)"
    return f"{tensor.name} {describe(dtype, tuple(tensor.dims))}{values}".strip()
