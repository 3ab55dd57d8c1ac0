"""Names in a graph and in the subgraphs within it: what they take from around them, and how values get other names.

A subgraph sees the values of the graphs around it; a value that it makes itself under the same name stands in front of
them (ONNX forbids that, and files have it). Source: "Names Within a Graph" in ONNX's IR.md.
"""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from kvdoctor.graph import bodies_of
from kvdoctor.onnx_schema import GraphProto, NodeProto


def bodies(node: NodeProto) -> Iterator[GraphProto]:
    """The subgraphs of a node."""
    for attribute in node.attribute:
        yield from bodies_of(attribute)


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """A graph and all subgraphs in it, outer ones first."""
    yield graph
    for node in graph.node:
        for body in bodies(node):
            yield from graphs(body)


def replace_all(items: Any, kept: Iterable[Any]) -> None:
    """Make a repeated field hold some messages, which may be its own."""
    copies = []
    for item in kept:
        copy = type(item)()
        copy.CopyFrom(item)
        copies.append(copy)
    del items[:]
    items.extend(copies)


def producers(graph: GraphProto) -> dict[str, NodeProto]:
    """The node of this graph that makes each value."""
    return {name: node for node in graph.node for name in node.output if name}


def own_names(graph: GraphProto) -> set[str]:
    """Names of the values that a graph has itself: inputs, initializers and what its nodes make."""
    names = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    return names | {sparse.values.name for sparse in graph.sparse_initializer} | set(producers(graph))


def all_names(graph: GraphProto) -> set[str]:
    """Names of the values of a graph and of all subgraphs in it."""
    return {name for inner in graphs(graph) for name in own_names(inner)}


def taken(node: NodeProto) -> set[str]:
    """All that a node takes: its inputs, and what its subgraphs take from around it."""
    names = {name for name in node.input if name}
    for body in bodies(node):
        names |= free(body)
    return names


def free(graph: GraphProto) -> set[str]:
    """Names that a subgraph takes from the graph around it."""
    needed = {name for node in graph.node for name in taken(node)} | {value.name for value in graph.output}
    return needed - own_names(graph)


def needed_for(graph: GraphProto, names: Iterable[str], without: Collection[str] = ()) -> set[str]:
    """The values of a graph, and of those around it, that some values hang on; they themselves included.

    What only values `without` hang on is left out: they are looked at as if they were given.
    """
    made, found, waiting = producers(graph), set(), list(names)
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        if name in made and name not in without:
            waiting += taken(made[name])
    return found


def fresh(wanted: str, known: set[str]) -> str:
    """A name like the one wanted that is not known yet; it is known afterwards."""
    name, number = wanted, 0
    while name in known:
        number += 1
        name = f"{wanted}_{number}"
    known.add(name)
    return name


def rename(graph: GraphProto, names: dict[str, str]) -> None:
    """Give values of a graph other names, wherever it or a subgraph speaks of them. Changes the graph.

    The new names must be fresh at every depth: nothing else is looked at.
    """
    if not names:
        return
    for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
        value.name = names.get(value.name, value.name)
    for sparse in graph.sparse_initializer:
        sparse.values.name = names.get(sparse.values.name, sparse.values.name)
    for annotation in graph.quantization_annotation:
        annotation.tensor_name = names.get(annotation.tensor_name, annotation.tensor_name)
        for entry in annotation.quant_parameter_tensor_names:
            entry.value = names.get(entry.value, entry.value)
    for node in graph.node:
        if not names.keys().isdisjoint(node.input):
            node.input[:] = [names.get(name, name) for name in node.input]
        if not names.keys().isdisjoint(node.output):
            node.output[:] = [names.get(name, name) for name in node.output]
        for body in bodies(node):
            inner = own_names(body)
            rename(body, {old: new for old, new in names.items() if old not in inner})


def step_aside(graph: GraphProto, banned: set[str], known: set[str]) -> None:
    """Rename what a graph and its subgraphs make under a banned name. Changes the graph; new names become known."""
    rename(graph, {name: fresh(name, known) for name in sorted(own_names(graph) & banned)})
    for node in graph.node:
        for body in bodies(node):
            step_aside(body, banned, known)
