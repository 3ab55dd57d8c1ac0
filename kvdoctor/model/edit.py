"""Changes to a graph: values renamed and returned, nodes sorted, unused parts dropped.

Every function here changes the graph that it is given. Names inside the subgraphs of a node are those of the graph
around it, unless the subgraph defines a value of that name itself.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from kvdoctor.model import traverse
from kvdoctor.model.operators import has
from kvdoctor.model.proto import (
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    ValueInfoProto,
)
from kvdoctor.model.view import GraphView


def replace_all(items: Any, kept: Iterable[Any]) -> None:
    """Give a repeated field new messages, which may be its own."""
    copies = list(map(deepcopy, kept))
    del items[:]
    items.extend(copies)


def keep_only(items: Any, keep: Callable[[Any], bool]) -> None:
    """Drop all other messages from a repeated field."""
    for index in reversed([index for index, item in enumerate(items) if not keep(item)]):
        del items[index]


def fresh_name(wanted: str, known: set[str]) -> str:
    """A name like the one wanted that is not known yet; it is added to the known ones."""
    name, number = wanted, 0
    while name in known:
        number += 1
        name = f"{wanted}_{number}"
    known.add(name)
    return name


def new_name(model: ModelProto, wanted: str) -> str:
    """A name like the one wanted that no value or node of the model has."""
    return fresh_name(wanted, traverse.names_in(model))


def make_node(op: str, inputs: Iterable[str], output: str, **attributes: "int | Sequence[int]") -> NodeProto:
    """A node with one output, after which it is named; its attributes are integers, or lists of them."""
    node = NodeProto(op_type=op, name=output, input=inputs, output=[output])
    for name, value in attributes.items():
        if isinstance(value, int):
            node.attribute.add(name=name, type=AttributeProto.INT, i=value)
        else:
            node.attribute.add(name=name, type=AttributeProto.INTS, ints=value)
    return node


def set_size(dim: Any, size: int | str) -> None:
    """Declare the size of an axis: a number, or the name of an open one."""
    dim.Clear()
    if isinstance(size, int):
        dim.dim_value = size
    else:
        dim.dim_param = size


def declare(name: str, element: int, sizes: Iterable[int | str | None]) -> ValueInfoProto:
    """The declaration of a tensor by its element type and sizes; None leaves a size open."""
    value = ValueInfoProto(name=name)
    value.type.tensor_type.elem_type = element
    value.type.tensor_type.shape.SetInParent()
    for size in sizes:
        dim = value.type.tensor_type.shape.dim.add()
        if size is not None:
            set_size(dim, size)
    return value


@dataclass(eq=False, repr=False)
class GraphWriter:
    """Adds nodes and constants to a model, each once, under names that begin with a prefix and that nothing has yet.

    `known` are the names of the model, `nodes` the list that new nodes are appended to: those of the main graph.
    """

    model: ModelProto
    prefix: str = field(default="kvdoctor", kw_only=True)
    known: set[str] = field(init=False)
    nodes: Any = field(init=False)
    made: dict[object, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.known, self.nodes = traverse.names_in(self.model), self.model.graph.node

    def fresh(self, hint: str) -> str:
        """A name that nothing has yet."""
        return fresh_name(f"{self.prefix}.{hint}", self.known)

    def node(self, hint: str, op: str, inputs: Sequence[str], **attributes: int | tuple[int, ...]) -> str:
        """The output of a new node; the same one for the same operator, inputs and attributes."""
        key = (op, *inputs, *attributes.items())
        if key not in self.made:
            self.made[key] = self.fresh(hint)
            self.nodes.append(make_node(op, inputs, self.made[key], **attributes))
        return self.made[key]

    def numbers(self, values: Sequence[int], dims: Sequence[int] | None = None, hint: str = "") -> str:
        """A constant of integers, int64[dims]; without `dims` it has one axis."""
        dims = [len(values)] if dims is None else list(dims)
        hint = hint or f"numbers{dims}{list(values)}".replace(" ", "")
        return self.tensor(hint, TensorProto(data_type=TensorProto.INT64, dims=dims, int64_data=values))

    def size_of(self, name: str, axis: int, dims: Sequence[int] | None = None) -> str:
        """The size of an axis of a value, int64[1]; int64[] where `dims` are ()."""
        return self.node("size", "Gather", [self.node("shape", "Shape", [name]), self.numbers([axis], dims)])

    def tensor(self, hint: str, tensor: TensorProto) -> str:
        """An initializer of the main graph; the same one for the same content."""
        key = tensor.SerializeToString()
        if key not in self.made:
            tensor.name = self.made[key] = self.fresh(hint)
            self.model.graph.initializer.append(tensor)
        return self.made[key]


def rename_reads(graph: GraphProto, names: Mapping[str, str], where: Callable[[NodeProto], bool] | None = None) -> None:
    """Let nodes read other values, all at once: `{a: b, b: a}` swaps two. Outputs of this graph stay."""
    if not names:
        return
    for node in graph.node:
        if (where is None or where(node)) and not names.keys().isdisjoint(node.input):
            node.input[:] = [names.get(name, name) for name in node.input]
        for body in traverse.subgraphs(node):
            own = traverse.own_names(body)
            inner = {old: new for old, new in names.items() if old not in own}
            rename_reads(body, inner, where)
            for value in body.output:
                # The output of a body is named like the value that it returns.
                value.name = inner.get(value.name, value.name)


def rename_values(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Rename values of this graph, for their makers and all readers; its own inputs and outputs stay."""
    rename_reads(graph, names)
    for node in graph.node:
        if not names.keys().isdisjoint(node.output):
            node.output[:] = [names.get(name, name) for name in node.output]
    for value in graph.value_info:
        value.name = names.get(value.name, value.name)


def rename_all(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Rename values of a graph wherever it or a subgraph names them, its inputs and outputs included.

    The new names must be fresh at every depth: nothing else is checked.
    """
    if not names:
        return
    rename_values(graph, names)
    for value in (*graph.input, *graph.output, *graph.initializer, *(s.values for s in graph.sparse_initializer)):
        value.name = names.get(value.name, value.name)
    for annotation in graph.quantization_annotation:
        annotation.tensor_name = names.get(annotation.tensor_name, annotation.tensor_name)
        for entry in annotation.quant_parameter_tensor_names:
            entry.value = names.get(entry.value, entry.value)


def rename_banned(graph: GraphProto, banned: set[str], known: set[str]) -> None:
    """Rename the values of a graph and its subgraphs that have a banned name; the new names become known."""
    rename_all(graph, {name: fresh_name(name, known) for name in sorted(traverse.own_names(graph) & banned)})
    for node in graph.node:
        for body in traverse.subgraphs(node):
            rename_banned(body, banned, known)


def return_values(model: ModelProto, graph: GraphProto, values: Mapping[str, str]) -> None:
    """Return other values of the graph as outputs, all at once, and drop what only the old ones needed.

    Raises:
        ValueError: an output is not made by a node of this graph.
    """
    made, known = traverse.producers(graph), traverse.names_in(model)
    if missing := values.keys() - made.keys():
        raise ValueError(f"{min(missing)!r} is not made by a node of this graph")
    old = {output: fresh_name(f"{output}.unrepaired", known) for output in values}
    rename_values(graph, old)
    for output, value in values.items():
        name = fresh_name(f"{output}.repaired", known)
        graph.node.append(NodeProto(op_type="Identity", name=name, input=[old.get(value, value)], output=[output]))
    for name in old.values():
        drop_unused(graph, name)


def drop_unused(graph: GraphProto, name: str) -> None:
    """Drop the node that makes a value, and those that only it needs, where nothing reads them any more."""
    waiting = [name]
    while waiting:
        value = waiting.pop()
        node = traverse.producer(graph, value)
        used = {value.name for value in graph.output}.union(*map(traverse.values_read, graph.node))
        if node is None or not used.isdisjoint(filter(None, node.output)):
            continue
        waiting += [read for read in node.input if read]
        graph.node.remove(node)


def prune(model: ModelProto) -> list[str]:
    """Drop nodes, weights, inputs and functions that no output depends on, and outputs of an `If` that nothing reads.

    Returns:
        The names of the inputs that were dropped.
    """
    graph = model.graph
    needed = _prune_graph(graph, [value.name for value in graph.output])
    dropped = [value.name for value in graph.input if value.name not in needed]
    keep_only(graph.input, lambda value: value.name in needed)
    keep_only(graph.quantization_annotation, lambda entry: entry.tensor_name in needed)
    _drop_uncalled_functions(model)
    return dropped


def _prune_graph(graph: GraphProto, wanted: list[str]) -> set[str]:
    """Keep what some values of a graph depend on; returns the names of those values."""
    needed = traverse.needed_for(graph, wanted)
    keep_only(graph.node, lambda node: not needed.isdisjoint(node.output))
    for node in graph.node:
        if has(node.op_type, "branch") and not needed.issuperset(node.output):
            kept = [index for index, name in enumerate(node.output) if name in needed]
            node.output[:] = [node.output[index] for index in kept]
            for body in traverse.subgraphs(node):
                replace_all(body.output, [body.output[index] for index in kept if index < len(body.output)])
                _prune_graph(body, [value.name for value in body.output])
    if traverse.needed_for(graph, wanted) != needed:  # branches may have lost what they captured
        return _prune_graph(graph, wanted)
    keep_only(graph.initializer, lambda tensor: tensor.name in needed)
    keep_only(graph.sparse_initializer, lambda sparse: sparse.values.name in needed)
    keep_only(graph.value_info, lambda value: value.name in needed)
    return needed


def _drop_uncalled_functions(model: ModelProto) -> None:
    """Drop the functions that no node calls, at any depth and through other functions."""
    functions = {function_key(function): function for function in model.functions}
    used, waiting = set[tuple[str, str, str]](), [traverse.nodes_in(model.graph.node)]
    while waiting:
        for node in waiting.pop():
            key = (node.domain, node.op_type, getattr(node, "overload", ""))
            if key in functions and key not in used:
                used.add(key)
                waiting.append(traverse.nodes_in(functions[key].node))
    keep_only(model.functions, lambda function: function_key(function) in used)


def function_key(function: FunctionProto) -> tuple[str, str, str]:
    """What the nodes that call a function name: its domain, its name and its overload."""
    return function.domain, function.name, getattr(function, "overload", "")


def drop_unread_constants(model: ModelProto, names: set[str]) -> None:
    """Drop the constants of these names that nothing reads: a runtime would warn of each."""
    graphs = list(traverse.graphs_in(model.graph))
    read = {name for node in traverse.all_nodes(model) for name in node.input}
    read |= {value.name for graph in graphs for value in (*graph.output, *graph.input)}
    unread = names - read - {name for function in model.functions for name in function.output}
    if not unread:
        return
    for graph in graphs:
        keep_only(graph.initializer, lambda tensor: tensor.name not in unread)
    for nodes in list(traverse.node_lists(model)):
        keep_only(nodes, lambda node: not has(node.op_type, "constant") or not unread.issuperset(node.output))


def node_order(nodes: Iterable[NodeProto]) -> list[int] | None:
    """The indices of nodes, each after those that it needs and otherwise as they are; None for a cycle."""
    listed = list(nodes)
    reads, makes = [traverse.values_read(node) for node in listed], [node.output for node in listed]
    order, cyclic = traverse.stable_order(reads, makes)
    return None if cyclic else order


def sort_nodes(graph: GraphProto) -> bool:
    """Sort the nodes of one graph topologically; False where they are sorted already or form a cycle."""
    order = node_order(graph.node)
    if order is None or order == list(range(len(graph.node))):
        return False
    nodes = list(graph.node)
    replace_all(graph.node, [nodes[index] for index in order])
    return True


def describe_graph(view: GraphView, graph: GraphProto) -> str:
    """A graph as reports call it: the main one, or a branch of a merged decoder."""
    for word in ("cached", "no-past"):
        for node, body in view.branches[1].bodies(word == "cached") if view.branches is not None else ():
            if body.graph is graph:
                return f"{traverse.describe_node(node)}, {word} branch"
    return "main graph"


def describe_maker(graph: GraphProto, name: str) -> str:
    """The node that makes a value as reports call it: operator, inputs and name."""
    node = traverse.producer(graph, name)
    if node is None:
        return name
    return f"{node.op_type}({', '.join(node.input)})" + (f' "{node.name}"' if node.name else "")
