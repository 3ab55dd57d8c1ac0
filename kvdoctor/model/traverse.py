"""Read-only walks over nodes, subgraphs and functions, and the names in them. No weights, no meaning.

A subgraph sees the values of the graphs around it; a value that it makes itself under the same name shadows them (ONNX
forbids that, and files have it). Source: "Names Within a Graph" in ONNX's IR.md.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

STANDARD = ("", "ai.onnx")
"""Both names of the domain of ONNX's own operators."""

NEW, OPEN, SORTED, CYCLIC = range(4)
"""States of a node while nodes are sorted."""


def normalize_domain(domain: str) -> str:
    """The domain of an operator, with one name for the standard domain: the empty one."""
    return "" if domain in STANDARD else str(domain)


def opset_version(imports: Iterable[Any]) -> int:
    """The version of the standard operators that a model or function imports; 1 where it names none."""
    return next((int(entry.version) for entry in imports if entry.domain in STANDARD), 1)


def explain_old_opset(model: ModelProto, file: str, least: int, operator: str) -> str | None:
    """Why an operator of a later opset cannot be put into a model; None where it can."""
    opset = opset_version(model.opset_import)
    return f"{file} has opset {opset}, where {operator} needs {least}" if opset < least else None


def bodies_of(attribute: AttributeProto) -> Iterator[GraphProto]:
    """The subgraphs that an attribute holds."""
    if attribute.HasField("g"):
        yield attribute.g
    yield from attribute.graphs


def describe_node(node: NodeProto) -> str:
    """A node as reports name it: by its operator and its name, or by its first output where it has none."""
    return f'{node.op_type} "{name_node(node)}"'


def name_node(node: NodeProto) -> str:
    """The name of a node, or that of its first output where it has none; empty where it has neither."""
    return str(node.name or next(filter(None, node.output), ""))


def input_of(node: NodeProto, index: int) -> str:
    """The input of that number; empty where there is none, as in a node that is cut short."""
    return str(node.input[index]) if index < len(node.input) else ""


def output_of(node: NodeProto, index: int = 0) -> str:
    """The output of that number; empty where there is none."""
    return str(node.output[index]) if index < len(node.output) else ""


def find_attribute(node: NodeProto, name: str) -> AttributeProto | None:
    """The attribute of a node that has this name."""
    return next((attribute for attribute in node.attribute if attribute.name == name), None)


def constant_tensor(node: NodeProto) -> TensorProto | None:
    """The tensor that a Constant holds as such."""
    value = find_attribute(node, "value")
    return value.t if value is not None and value.HasField("t") else None


def constant_value(node: NodeProto) -> TensorProto | None:
    """The tensor of a Constant, also of one that gives plain numbers."""
    for attribute in node.attribute:
        if attribute.name == "value_ints":
            return TensorProto(data_type=TensorProto.INT64, dims=[len(attribute.ints)], int64_data=attribute.ints)
        if attribute.name == "value_int":
            return TensorProto(data_type=TensorProto.INT64, int64_data=[attribute.i])
        if attribute.name == "value_float":
            return TensorProto(data_type=TensorProto.FLOAT, float_data=[attribute.f])
        if attribute.name == "value_floats":
            return TensorProto(data_type=TensorProto.FLOAT, dims=[len(attribute.floats)], float_data=attribute.floats)
    return constant_tensor(node)


def are_equal_constants(one: NodeProto, other: NodeProto) -> bool:
    """Whether two nodes are the same constant: ONNX Runtime turns both into one initializer, and loads the graph."""
    if one.op_type != "Constant" or other.op_type != "Constant":
        return False
    return _content(one) == _content(other)


def _content(node: NodeProto) -> tuple[bytes, ...]:
    """What a Constant holds, without the name of its tensor and the place of its values in the file."""
    held = [AttributeProto.FromString(attribute.SerializeToString()) for attribute in node.attribute]
    for attribute in (one for one in held if one.HasField("t")):
        for name in ("name", "doc_string", "external_data", "data_location"):
            attribute.t.ClearField(name)
    return tuple(sorted(attribute.SerializeToString() for attribute in held))


def subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    """The subgraphs of a node, without those inside them."""
    for attribute in node.attribute:
        if attribute.HasField("g") or attribute.graphs:  # few attributes hold any
            yield from bodies_of(attribute)


def graphs_in(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and all subgraphs in it, outer ones first. A graph may be changed once it was yielded."""
    waiting = [graph]
    while waiting:
        found = waiting.pop()
        yield found
        waiting += reversed([body for node in found.node for body in subgraphs(node)])


def nodes_in(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    """Nodes with those of their subgraphs."""
    waiting = [iter(nodes)]
    while waiting:
        node = next(waiting[-1], None)
        if node is None:
            waiting.pop()
            continue
        yield node
        waiting += [iter(body.node) for body in subgraphs(node)]


def node_lists(model: ModelProto) -> Iterator[Any]:
    """The list of nodes of every graph, subgraph and function; graphs first, outer ones before inner ones."""
    for graph in graphs_in(model.graph):
        yield graph.node
    for function in model.functions:
        yield function.node
        for node in function.node:
            for body in subgraphs(node):
                yield from (graph.node for graph in graphs_in(body))


def all_nodes(model: ModelProto) -> Iterator[NodeProto]:
    """Every node of a model, in the order of `node_lists`."""
    for nodes in node_lists(model):
        yield from nodes


def producers(graph: GraphProto) -> dict[str, NodeProto]:
    """The node of this graph that makes each value."""
    return {name: node for node in graph.node for name in node.output if name}


def producer(graph: GraphProto, name: str) -> NodeProto | None:
    """The node of this graph that makes a value."""
    return next((node for node in graph.node if name in node.output), None) if name else None


Readers = Mapping[str, Sequence[tuple[NodeProto, int]]]
"""For each value, the nodes that read it and at which of their inputs."""


def readers(graph: GraphProto) -> dict[str, list[tuple[NodeProto, int]]]:
    """For each value, the nodes that read it, at any depth, and at which of their inputs."""
    found: dict[str, list[tuple[NodeProto, int]]] = {}
    for node in graph.node:
        for index, name in enumerate(node.input):
            if name:
                found.setdefault(name, []).append((node, index))
        for body in subgraphs(node):
            own = own_names(body)
            for name, inner in readers(body).items():
                if name not in own:
                    found.setdefault(name, []).extend(inner)
    return found


def own_names(graph: GraphProto) -> set[str]:
    """Names of the values that a graph defines itself: inputs, initializers and outputs of its nodes."""
    names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    names |= {sparse.values.name for sparse in graph.sparse_initializer}
    return names | {name for node in graph.node for name in node.output if name}


def all_names(graph: GraphProto) -> set[str]:
    """Names of the values of a graph and of all subgraphs in it."""
    return {name for inner in graphs_in(graph) for name in own_names(inner)}


def names_in(model: ModelProto) -> set[str]:
    """Every name of a value or node in a model, at any depth and in functions."""
    names = {value.name for graph in graphs_in(model.graph) for value in (*graph.output, *graph.value_info)}
    names |= all_names(model.graph)
    return names | {name for node in all_nodes(model) for name in (node.name, *node.input, *node.output)}


def values_read(node: NodeProto) -> list[str]:
    """The values that a node reads: its inputs, then what its subgraphs capture from around it."""
    names = [name for name in node.input if name]
    for body in subgraphs(node):
        names += captures(body)
    return names


def captures(graph: GraphProto) -> list[str]:
    """The values that a subgraph reads or returns and does not define itself."""
    own = own_names(graph)
    names = [name for node in graph.node for name in values_read(node) if name not in own]
    return names + [value.name for value in graph.output if value.name not in own]


def needed_for(graph: GraphProto, names: Iterable[str], without: Collection[str] = ()) -> set[str]:
    """The values of a graph, and of those around it, that some values depend on; they themselves included.

    Values `without` are taken as given: what only they depend on is left out.
    """
    made, found, waiting = producers(graph), set[str](), list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name in made and name not in without:
            waiting += values_read(made[name])
    return found


def stable_order(reads: Sequence[Iterable[str]], makes: Sequence[Iterable[str]]) -> tuple[list[int], list[int]]:
    """Sort nodes topologically, given the names that each reads and makes; otherwise they stay as they are.

    Returns:
        The indices in order, and those of the nodes in or after a cycle, as they stand.
    """
    made_at: dict[str, int] = {}
    for index, names in enumerate(makes):
        for name in names:
            if name:
                made_at.setdefault(name, index)
    if all(made_at.get(name, -1) < index for index, names in enumerate(reads) for name in names):
        return list(range(len(reads))), []
    order, state = list[int](), [NEW] * len(reads)
    for first in range(len(reads)):
        stack = [first] if state[first] == NEW else []
        while stack:
            index = stack[-1]
            needs = dict.fromkeys(made_at[name] for name in reads[index] if name in made_at)
            if state[index] == NEW:
                state[index] = OPEN
                stack += [at for at in reversed(needs) if state[at] == NEW]
                continue
            stack.pop()
            if state[index] == OPEN and all(state[at] == SORTED for at in needs):
                state[index] = SORTED
                order.append(index)
            elif state[index] == OPEN:
                state[index] = CYCLIC
    return order, [index for index, found in enumerate(state) if found == CYCLIC]
