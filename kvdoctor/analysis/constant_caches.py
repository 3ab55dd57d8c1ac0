"""Finds a cache that an export turned into constants: it was kept inside a module, so no state leaves the graph."""

from collections.abc import Iterator

from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.analysis.dataflow.uses import ATTENTION_PARTS
from kvdoctor.analysis.port_roles import INTEGERS, InputFlow
from kvdoctor.analysis.stacks import OnnxFile, has_named_logits
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.view import GraphView

BUFFERS = {"ScatterND": 2, "ScatterElements": 2, "TensorScatter": 1}
"""Operators that write into their first input, by the index of the input with the new entries."""


def returns_logits(file: OnnxFile) -> bool:
    """Whether a graph returns logits: by name, or as a float output as wide as the embedding table has rows."""
    view, flow = file.view, file.dataflow
    if view is None or has_named_logits(view):
        return view is not None
    if flow is None:
        return False
    by_use = InputFlow(flow, view.inputs)
    rows = {by_use.table_rows(name) for name, port in view.inputs.items() if port.dtype in INTEGERS} - {None}
    return any(_last_size(view, name) in rows for name in view.outputs)


def find_constant_caches(file: OnnxFile) -> tuple[str, ...]:
    """Find constants that new keys or values join before an attention, in the order of the graph."""
    flow = file.dataflow
    return tuple(dict.fromkeys(_joined_constants(flow))) if flow is not None else ()


def _joined_constants(dataflow: Dataflow) -> Iterator[str]:
    for node in dataflow.flow.nodes:
        if (constant := _constant_operand(node, dataflow.flow.fixed)) is not None and dataflow.budget.goes_on():
            use = dataflow.uses.use_of(node.output())
            if use is not None and use.proven and use.part in ATTENTION_PARTS:
                yield constant


def _constant_operand(node: FlatNode, fixed: set[str]) -> str | None:
    """The constant that a node joins new entries to; None where it is no constant."""
    if node.op == "Concat":
        constants = [name for name in node.inputs if name in fixed]
        return constants[0] if constants and len(constants) < len(node.inputs) else None
    new = BUFFERS.get(node.op)
    if new is None or new >= len(node.inputs) or node.inputs[0] not in fixed or node.inputs[new] in fixed:
        return None
    return node.inputs[0]


def _last_size(view: GraphView, name: str) -> int | None:
    """The last size of a float output with two axes or more, where it is a number."""
    port = view.outputs[name]
    if not port.shape or len(port.shape) < 2 or "float" not in port.dtype:
        return None
    return port.shape[-1] if isinstance(port.shape[-1], int) else None
