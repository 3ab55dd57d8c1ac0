"""Removes parts of a graph: outputs with all that only they need, what follows a node, and layers.

These functions change the model that they are given. The spine of a graph are the values that every path from the
tokens to an output passes through (its dominators). Due to residual connections each layer begins and ends at one such
value, whatever operators it has. If the reads of a later value of the spine are redirected to an earlier one, the
layers between are removed, and the rest still fits.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

from kvdoctor.contract import CacheContract
from kvdoctor.model.edit import declare, keep_only, make_node, node_order, prune, rename_reads
from kvdoctor.model.operators import has
from kvdoctor.model.proto import GraphProto, ModelProto, TensorProto
from kvdoctor.model.traverse import all_nodes, graphs_in, needed_for, producers, subgraphs, values_read

PROBE = "kvdoctor_probe"
"""The output that keeps a failing node in the graph: the shape of the node's first output."""


def keep_outputs(model: ModelProto, keep: set[str]) -> None:
    """Remove all other outputs of the model, and then the nodes, constants and inputs that nothing needs any more."""
    keep_only(model.graph.output, lambda value: value.name in keep)
    prune(model)
    for graph in graphs_in(model.graph):
        graph.ClearField("value_info")  # sizes will change


def end_at_node(model: ModelProto, name: str) -> bool:
    """Add an output that depends on a node: the shape of its first output.

    A node in a branch of an `If` of the main graph needs a new output of that `If`, which is 0 in the other branch.
    False if the node is in any other subgraph.
    """
    if any(node.name == name for node in model.graph.node):
        _add_probe(model.graph, name, PROBE)
    else:
        branches = (node for node in model.graph.node if has(node.op_type, "branch"))
        owner = next((n for n in branches if any(one.name == name for body in subgraphs(n) for one in body.node)), None)
        if owner is None:
            return False
        for body in subgraphs(owner):
            # A name of its own: a value of the branch must not have the name of an outer value.
            has_node = any(inner.name == name for inner in body.node)
            if has_node:
                result = _add_probe(body, name, f"{PROBE}_shape")
            else:
                zero, result = f"{PROBE}_nought", f"{PROBE}_passed"
                body.initializer.append(TensorProto(name=zero, dims=[1], data_type=TensorProto.INT64, int64_data=[0]))
                body.node.append(make_node("Identity", [zero], result))
            body.output.append(declare(result, TensorProto.INT64, (None,)))
        owner.output.append(PROBE)
    model.graph.output.append(declare(PROBE, TensorProto.INT64, (None,)))
    return True


def layer_graphs(model: ModelProto) -> Iterator[GraphProto]:
    """The graphs with the layers: the branches of an `If` that returns the model's outputs, or the main graph."""
    outputs = {value.name for value in model.graph.output}
    switches = [n for n in model.graph.node if has(n.op_type, "branch") and not outputs.isdisjoint(n.output)]
    for switch in switches:
        yield from subgraphs(switch)
    if not switches:
        yield model.graph


def name_nodes(model: ModelProto) -> None:
    """Name the nodes that have no name, so that the runtime can name the one that fails."""
    known = {node.name for node in all_nodes(model)}
    for number, node in enumerate(node for graph in graphs_in(model.graph) for node in graph.node):
        if not node.name and f"{node.op_type}_{number}" not in known:
            node.name = f"{node.op_type}_{number}"


def find_operator(model: ModelProto, name: str) -> str | None:
    """The operator of a node by name; None if there is no such node or it has subgraphs."""
    found = (node for graph in graphs_in(model.graph) for node in graph.node if node.name == name)
    node = next(found, None) if name else None
    return None if node is None or any(subgraphs(node)) else str(node.op_type)


def _add_probe(graph: GraphProto, name: str, output: str) -> str:
    node = next(node for node in graph.node if node.name == name)
    result = next(value for value in node.output if value)
    graph.node.append(make_node("Shape", [result], output))
    return output


def bypass_layers(models: dict[str, ModelProto], contract: CacheContract, node: tuple[str, str]) -> bool:
    """Remove the layers before that of a node, (file, name), except the first, in every graph and branch.

    Changes the models. False if there is nothing to remove.
    """
    changed = False
    for file, model in models.items():
        for graph in list(layer_graphs(model)):
            chain = _spine_of(model, graph, contract, file)
            begins = [_begin(model, graph, chain, slot.present, slot.filled_by) for slot in contract.growing]
            first = min((begin for begin in begins if begin is not None), default=None)
            # The values that the graph must compute: the outputs of the node, or the cross-attention cache.
            targets: list[str | None] = [
                o for one in graph.node if file == node[0] and node[1] and one.name == node[1] for o in one.output if o
            ]
            targets = targets or [inner_value(model, graph, s.filled_by) for s in contract.of_kind("cross-attention")]
            ends = [last_dependency(graph, chain, end) for end in targets if end is not None]
            last = max((end for end in ends if end is not None), default=None)
            if first is not None and last is not None and first < last:
                rename_reads(graph, {chain[last]: chain[first]})
                changed = True
    return changed


def remove_layers(
    models: dict[str, ModelProto], contract: CacheContract, gone: list[int], left: list[int]
) -> tuple[dict[str, ModelProto], CacheContract] | None:
    """Copies of the models and the contract without the layers `gone`, of the layers `left`; None if that fails."""
    models = {file: deepcopy(model) for file, model in models.items()}
    slots = {s.past for s in contract.slots if s.layer in gone}
    outputs = {name for s in contract.slots if s.layer in gone for name in (s.present, s.filled_by) if name}
    for file, model in models.items():
        for graph in list(layer_graphs(model)):
            chain = _spine_of(model, graph, contract, file)
            starts = dict[int | None, int]()
            for slot in (slot for slot in contract.growing if slot.layer in left):
                begin = _begin(model, graph, chain, slot.present, slot.filled_by)
                if begin is not None:
                    starts[slot.layer] = min(begin, starts.get(slot.layer, begin))
            if len(starts) < len(left):
                return None
            # Before the projection to the vocabulary, which is the last matrix product.
            operators = {name: one.op_type for one in graph.node for name in one.output}
            products = [i for i, name in enumerate(chain) if has(operators.get(name, ""), "product")]
            last = products[-1] - 1 if products else -1
            for layer in sorted(gone, key=lambda one: starts[one], reverse=True):
                later = [starts[other] for other in left if starts[other] > starts[layer]]
                end = min(later, default=last)
                if end <= starts[layer]:
                    return None
                rename_reads(graph, {chain[end]: chain[starts[layer]]})
        keep_outputs(model, {value.name for value in model.graph.output} - outputs)
    inputs = {name for model in models.values() for name in (value.name for value in model.graph.input)}
    if slots & inputs:
        return None
    slots_left = tuple(slot for slot in contract.slots if slot.past not in slots)
    return models, replace(contract, slots=slots_left)


def _begin(model: ModelProto, graph: GraphProto, chain: list[str], *outputs: str | None) -> int | None:
    """The index on the spine at which the layer with one of these outputs begins."""
    for output in outputs:
        value = inner_value(model, graph, output)
        found = last_dependency(graph, chain, value) if value is not None else None
        if found is not None:
            return found
    return None


def _spine_of(model: ModelProto, graph: GraphProto, contract: CacheContract, file: str) -> list[str]:
    ports = [g for g in contract.graphs.values() if g.file == file]
    roles = ("token_ids", "token_and_position", "embeddings")
    sources = {port.name for g in ports for port in g.inputs if port.role in roles}
    if graph is not model.graph:
        sources = derived_values(model.graph, sources)
    ends = [
        value for g in ports for p in g.outputs if p.role == "logits" and (value := inner_value(model, graph, p.name))
    ]
    return find_spine(graph, sources, ends[0]) if ends else []


def inner_value(model: ModelProto, graph: GraphProto, output: str | None) -> str | None:
    """The value of a graph or branch that an output of the model returns."""
    if output is None:
        return None
    if graph is model.graph:
        return output if any(value.name == output for value in graph.output) else None
    for node in model.graph.node:
        if has(node.op_type, "branch") and output in node.output:
            index = list(node.output).index(output)
            return graph.output[index].name if index < len(graph.output) else None
    return None


def find_spine(graph: GraphProto, sources: set[str], end: str) -> list[str]:
    """The values on every path from the sources (token ids or embeddings) to `end`, in order."""
    producer = producers(graph)
    # The values that `end` depends on, each after those it needs; those from around the graph first.
    needed, nodes = needed_for(graph, [end]), list(graph.node)
    made = [name for index in node_order(nodes) or () for name in nodes[index].output if name in needed]
    dominator: dict[str, str | None] = {}
    depth: dict[str, int] = {}
    for name in (*sorted(needed.difference(made)), *made):
        if name in sources:
            dominator[name], depth[name] = None, 0
            continue
        node = producer.get(name)
        if node is None or has(node.op_type, "measure"):
            continue
        before = [value for value in values_read(node) if value in depth]
        if before:
            nearest = before[0]
            for value in before[1:]:
                nearest = _meet(nearest, value, dominator, depth)
                if nearest == "":
                    break
            dominator[name], depth[name] = nearest or None, (depth[nearest] + 1 if nearest else 0)
    chain, at = [], end if end in depth else None
    while at is not None:
        chain.append(at)
        at = dominator[at]
    return chain[::-1]


def derived_values(graph: GraphProto, sources: set[str]) -> set[str]:
    """The sources and all values of a graph computed from them; values that depend only on shapes do not count."""
    found = set(sources)
    for node in graph.node:
        if not has(node.op_type, "measure") and not found.isdisjoint(node.input):
            found.update(node.output)
    return found


def last_dependency(graph: GraphProto, chain: list[str], end: str) -> int | None:
    """The index of the last value of a spine that `end` depends on, without `end` itself; None if there is none."""
    needed = needed_for(graph, [end]) - {end}
    found = [index for index, name in enumerate(chain) if name in needed]
    return found[-1] if found else None


def _meet(one: str, other: str, dominator: dict[str, str | None], depth: dict[str, int]) -> str:
    """The nearest value that both depend on; empty if they come from different sources."""
    while one != other:
        if depth[one] < depth[other]:
            one, other = other, one
        step = dominator[one]
        if step is None:
            return ""
        one = step
    return one
