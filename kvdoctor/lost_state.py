"""Finds the cache that was kept inside a module: an export turns it into constants, and no state leaves the graph."""

from collections.abc import Iterator

from kvdoctor.dataflow import Dataflow
from kvdoctor.flow import FlowNode
from kvdoctor.graph import GraphView
from kvdoctor.roles import INTEGERS, Looks
from kvdoctor.stacks import OnnxFile, has_logits

BUFFERS = {"ScatterND": 2, "ScatterElements": 2, "TensorScatter": 1}
"""Operators that write into a buffer, their first input: which input brings the new entries."""


def gives_logits(file: OnnxFile) -> bool:
    """Whether a graph gives logits: by name, or by a float output as wide as the table that tokens are looked up in."""
    view, flow = file.view, file.dataflow
    if view is None or has_logits(view):
        return view is not None
    if flow is None:
        return False
    looks = Looks(flow, view.inputs)
    words = {looks.words(name) for name, port in view.inputs.items() if port.dtype in INTEGERS} - {None}
    return any(_width(view, name) in words for name in view.outputs)


def constant_caches(file: OnnxFile) -> tuple[str, ...]:
    """Constants that new keys or values join on their way to an attention, in the order of the graph."""
    flow = file.dataflow
    return tuple(dict.fromkeys(_joined(flow))) if flow is not None else ()


def _joined(dataflow: Dataflow) -> Iterator[str]:
    for node in dataflow.flow.nodes:
        if (constant := _constant_side(node, dataflow.flow.fixed)) is not None and dataflow.effort.goes_on():
            use = dataflow.uses.of(node.outputs[0])
            if use is not None and use.proven and use.part in ("key", "value", "key-value"):
                yield constant


def _constant_side(node: FlowNode, fixed: set[str]) -> str | None:
    """What a node joins new entries to, if that is constant."""
    if node.op == "Concat":
        constants = [name for name in node.inputs if name in fixed]
        return constants[0] if constants and len(constants) < len(node.inputs) else None
    new = BUFFERS.get(node.op)
    if new is None or new >= len(node.inputs) or node.inputs[0] not in fixed or node.inputs[new] in fixed:
        return None
    return node.inputs[0]


def _width(view: GraphView, name: str) -> int | None:
    """The last size of a float output with two axes or more, where it is a number."""
    port = view.outputs[name]
    if not port.shape or len(port.shape) < 2 or "float" not in port.dtype:
        return None
    return port.shape[-1] if isinstance(port.shape[-1], int) else None
