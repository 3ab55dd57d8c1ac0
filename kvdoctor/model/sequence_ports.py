"""Takes inputs and outputs that are sequences of tensors apart: one input or output for each element.

A cache may be one sequence, seq(float[batch, kv_heads, past_len, head_dim]), of which the graph reads the elements with
SequenceAt, and which it returns with SequenceConstruct or SequenceInsert. All that reads a graph knows tensors, so the
element at index 3 of `past` becomes the input `past[3]`; the worker makes sequences of such elements again for a
session of the file. Source: https://onnx.ai/onnx/operators/, the operators on sequences.
"""

from typing import Any

from kvdoctor.model.edit import drop_unused, replace_all
from kvdoctor.model.operators import has
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, ValueInfoProto
from kvdoctor.model.traverse import input_of, own_names
from kvdoctor.model.view import Scope, integers, scopes_below

MOST_ELEMENTS = 4096
"""The most elements of a sequence that is taken apart: more than any decoder has layers."""


def name_element(port: str, index: int) -> str:
    """What the element of a sequence is called among the inputs and outputs."""
    return f"{port}[{index}]"


def take_apart(model: ModelProto) -> tuple[str, ...]:
    """Replace the sequences among the inputs and outputs of a model by their elements; returns the names of them.

    A sequence stays what it is where the graph does not say how many elements it has.
    """
    graph = model.graph
    ports = [port.name for port in (*graph.input, *graph.output) if _is_sequence(port)]
    if not ports:
        return ()
    scope, taken = Scope(graph, "graph"), list[str]()
    for port in [port for port in graph.output if _is_sequence(port)]:
        elements = _elements(scope, port.name)
        if elements is not None and not _are_taken(graph, port.name, len(elements)):
            _return_elements(graph, port, elements)
            taken.append(port.name)
    for port in [port for port in graph.input if _is_sequence(port)]:
        reads = _find_reads(graph, port.name)
        if reads and not _are_taken(graph, port.name, max(reads) + 1):
            _take_elements(graph, port, reads)
            taken.append(port.name)
    return tuple(taken)


def _is_sequence(port: ValueInfoProto) -> bool:
    kind = port.type
    return bool(kind.HasField("sequence_type") and kind.sequence_type.elem_type.HasField("tensor_type"))


def _are_taken(graph: GraphProto, port: str, count: int) -> bool:
    """Whether the graph has a name that an element would have."""
    return not own_names(graph).isdisjoint(name_element(port, at) for at in range(count))


def _elements(scope: Scope, name: str) -> list[str] | None:
    """The values that a sequence is made of, in order; None where the graph does not say."""
    inserted: list[NodeProto] = []
    node = scope.producers.get(scope.through(name))
    while node is not None and has(node.op_type, "insert") and len(inserted) < MOST_ELEMENTS:
        inserted.append(node)
        node = scope.producers.get(scope.through(input_of(node, 0)))
    if node is None or not has(node.op_type, "listed"):
        return None
    elements = list(node.input)
    for insert in reversed(inserted):
        at = _index(scope, insert.input[2]) if len(insert.input) > 2 else len(elements)
        if at is None or not -len(elements) <= at <= len(elements):
            return None
        elements.insert(at, input_of(insert, 1))
    return elements


def _index(scope: Scope, name: str) -> int | None:
    """The number that a value is; None where it is computed."""
    tensor = scope.constant(name)
    numbers = integers(tensor) if tensor is not None else None
    return numbers[0] if numbers is not None and len(numbers) == 1 else None


def _find_reads(graph: GraphProto, name: str) -> dict[int, list[NodeProto]]:
    """The nodes that read each element of a sequence; none where one reads the sequence otherwise."""
    found: dict[int, list[NodeProto]] = {}
    for scope in scopes_below(Scope(graph, "graph")):
        for node in (node for node in scope.graph.node if name in node.input):
            at = _index(scope, node.input[1]) if has(node.op_type, "element") and len(node.input) == 2 else None
            if at is None or not 0 <= at < MOST_ELEMENTS:
                return {}
            found.setdefault(at, []).append(node)
    return found


def _return_elements(graph: GraphProto, port: ValueInfoProto, elements: list[str]) -> None:
    """Return each element of a sequence. Axes that are named like those of the past are left open: they may grow."""
    pasts = (other.type.sequence_type.elem_type for other in graph.input if _is_sequence(other))
    named = {dim.dim_param for past in pasts for dim in past.tensor_type.shape.dim}
    made = [ValueInfoProto(name=name_element(port.name, at)) for at in range(len(elements))]
    for value in made:
        value.type.CopyFrom(port.type.sequence_type.elem_type)
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param in named:
                dim.ClearField("dim_param")
    _replace_port(graph.output, port, made)
    for value, source in zip(made, elements, strict=True):
        graph.node.append(NodeProto(op_type="Identity", name=value.name, input=[source], output=[value.name]))
    drop_unused(graph, port.name)


def _take_elements(graph: GraphProto, port: ValueInfoProto, reads: dict[int, list[NodeProto]]) -> None:
    made = [ValueInfoProto(name=name_element(port.name, at)) for at in range(max(reads) + 1)]
    for at, value in enumerate(made):
        value.type.CopyFrom(port.type.sequence_type.elem_type)
        for node in reads.get(at, ()):
            node.op_type = "Identity"
            node.input[:] = [value.name]
    _replace_port(graph.input, port, made)


def _replace_port(ports: Any, old: ValueInfoProto, new: list[ValueInfoProto]) -> None:
    at = next(index for index, port in enumerate(ports) if port is old or port.name == old.name)
    replace_all(ports, [*ports[:at], *new, *ports[at + 1 :]])
