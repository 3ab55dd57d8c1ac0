"""Small changes to a graph that repairs are made of: values renamed and returned, nodes sorted, what is unused dropped.

Everything here changes the graph it is given. Names inside the bodies of a node are those of the graph around it,
unless the body makes a value of that name itself.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

from kvdoctor.graph import GraphView, bodies_of
from kvdoctor.onnx_schema import GraphProto, ModelProto, NodeProto, ValueInfoProto
from kvdoctor.scoping import graphs


def made_in(graph: GraphProto) -> set[str]:
    """Names of the values that a graph makes or holds itself."""
    names = {name for node in graph.node for name in node.output if name}
    names |= {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    return names | {sparse.values.name for sparse in graph.sparse_initializer}


def fresh(model: ModelProto, hint: str) -> str:
    """A name for a value or a node that the model does not have yet."""
    known: set[str] = set()
    for graph in graphs(model.graph):
        known |= made_in(graph) | {node.name for node in graph.node} | {value.name for value in graph.output}
    name, number = hint, 0
    while name in known:
        number += 1
        name = f"{hint}_{number}"
    return name


def producer(graph: GraphProto, name: str) -> NodeProto | None:
    """The node of this graph that makes a value."""
    return next((node for node in graph.node if name in node.output), None)


def readers(graph: GraphProto, name: str) -> Iterator[tuple[NodeProto, int]]:
    """Every node that reads a value, at any depth, and at which of its inputs."""
    for node in graph.node:
        for index, read in enumerate(node.input):
            if read == name:
                yield node, index
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                if name not in made_in(body):
                    yield from readers(body, name)


def rename_reads(graph: GraphProto, names: Mapping[str, str], where: Callable[[NodeProto], bool] | None = None) -> None:
    """Let nodes read other values, all at once: `{a: b, b: a}` trades two. Outputs of this graph stay as they are."""
    for node in graph.node:
        if where is None or where(node):
            for index, read in enumerate(node.input):
                if read in names:
                    node.input[index] = names[read]
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                own = made_in(body)
                inner = {old: new for old, new in names.items() if old not in own}
                rename_reads(body, inner, where)
                for value in body.output:
                    # The output of a body is named like the value that it returns.
                    value.name = inner.get(value.name, value.name)


def rename_values(graph: GraphProto, names: Mapping[str, str]) -> None:
    """Give values of this graph other names, for their makers and all readers; its own inputs and outputs stay."""
    rename_reads(graph, names)
    for node in graph.node:
        for index, made in enumerate(node.output):
            node.output[index] = names.get(made, made)
    for value in graph.value_info:
        value.name = names.get(value.name, value.name)


def return_value(model: ModelProto, graph: GraphProto, output: str, value: str) -> None:
    """Return another value of the graph as an output, and drop what only the old one needed."""
    maker = producer(graph, output)
    if maker is None:
        raise ValueError(f"{output!r} is not made by a node of this graph")
    old = fresh(model, f"{output}.unrepaired")
    rename_values(graph, {output: old})
    value = old if value == output else value
    node = NodeProto(op_type="Identity", name=fresh(model, f"{output}.repaired"), input=[value], output=[output])
    graph.node.append(node)
    drop_unused(graph, old)


def drop_unused(graph: GraphProto, name: str) -> None:
    """Drop the node that makes a value, and those that only it needs, where nothing reads them any more."""
    waiting = [name]
    while waiting:
        value = waiting.pop()
        node = producer(graph, value)
        if node is None or any(_is_used(graph, made) for made in node.output if made):
            continue
        waiting += [read for read in node.input if read]
        graph.node.remove(node)


def _is_used(graph: GraphProto, name: str) -> bool:
    if any(value.name == name for value in graph.output) or next(readers(graph, name), None) is not None:
        return True
    return any(name == value.name for node in graph.node for body in _bodies(node) for value in _returned_outer(body))


def _returned_outer(body: GraphProto) -> Iterator[ValueInfoProto]:
    own = made_in(body)
    for value in body.output:
        if value.name not in own:
            yield value
    for node in body.node:
        for inner in _bodies(node):
            yield from _returned_outer(inner)


def _bodies(node: NodeProto) -> Iterator[GraphProto]:
    for attribute in node.attribute:
        yield from bodies_of(attribute)


def needs(graph: GraphProto, name: str) -> set[str]:
    """All values that a value hangs on, in this graph and around it; it included."""
    made = {output: node for node in graph.node for output in node.output if output}
    found, waiting = set[str](), [name]
    while waiting:
        value = waiting.pop()
        if value not in found:
            found.add(value)
            if value in made:
                waiting += taken(made[value])
    return found


def taken(node: NodeProto) -> Iterator[str]:
    """What a node takes: its inputs, and what its bodies take from around them."""
    yield from (name for name in node.input if name)
    for body in _bodies(node):
        own = made_in(body)
        for inner in body.node:
            yield from (name for name in taken(inner) if name not in own)
        yield from (value.name for value in body.output if value.name not in own)


def order_of(nodes: Sequence[NodeProto]) -> list[int] | None:
    """The indices of nodes, each behind those that it needs and otherwise as they stand; None for a circle."""
    made_at = {name: index for index, node in enumerate(nodes) for name in node.output if name}
    order, state = list[int](), [0] * len(nodes)
    for first in range(len(nodes)):
        stack = [(first, False)]
        while stack:
            index, done = stack.pop()
            if done:
                order.append(index)
                state[index] = 2
            elif state[index] == 0:
                state[index] = 1
                wanted = dict.fromkeys(made_at[name] for name in taken(nodes[index]) if name in made_at)
                if any(state[at] == 1 for at in wanted):
                    return None
                stack.append((index, True))
                stack += [(at, False) for at in reversed(wanted) if state[at] == 0]
            # A node that was put on the stack twice is done by its first turn.
    return order


def sort_nodes(graph: GraphProto) -> bool:
    """Put the nodes of one graph in order; False where they stand so already or run in a circle."""
    order = order_of(graph.node)
    if order is None or order == list(range(len(graph.node))):
        return False
    nodes = []
    for index in order:
        node = NodeProto()
        node.CopyFrom(graph.node[index])
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def returned_in(view: GraphView, output: str, cached: bool = True) -> tuple[GraphProto, str]:
    """The graph that makes an output of the model and the name of the value there.

    In a merged decoder that is the cached branch, or the other one.
    """
    if view.branches is None:
        return view.model.graph, output
    node, branches = view.branches[1].node, view.branches[1]
    made, name = list(node.output), view.main.through(output, {"Identity"})
    body = (branches.cached if cached else branches.no_past).graph
    if name not in made or made.index(name) >= len(body.output):
        return view.model.graph, output
    return body, str(body.output[made.index(name)].name)


def place_of(view: GraphView, graph: GraphProto) -> str:
    """A graph in words: the main one, or a branch of a merged decoder."""
    if view.branches is not None:
        for word, branch in (("cached", view.branches[1].cached), ("no-past", view.branches[1].no_past)):
            if branch.graph is graph:
                return f'If "{view.branches[1].node.name}", {word} branch'
    return "main graph"


def in_words(graph: GraphProto, name: str) -> str:
    """The node that makes a value, to be read: operator, inputs and name."""
    node = producer(graph, name)
    if node is None:
        return name
    return f"{node.op_type}({', '.join(node.input)})" + (f' "{node.name}"' if node.name else "")
