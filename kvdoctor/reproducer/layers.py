"""Finds the layers of a decoder, and removes some of them.

The spine of a graph are the values that every path from the tokens to an output passes through (its dominators). Due to
residual connections each layer begins and ends at one such value, whatever operators it has. If the reads of a later
value of the spine are redirected to an earlier one, the layers between are removed, and the rest still fits.
"""

from dataclasses import replace

from kvdoctor.contract import CacheContract
from kvdoctor.model.edit import node_order, rename_reads
from kvdoctor.model.proto import GraphProto, ModelProto
from kvdoctor.model.traverse import needed_for, producers, values_read
from kvdoctor.reproducer.cuts import copy_model, keep_outputs, layer_graphs

SIZES_ONLY = {"Shape", "Size"}
"""Operators that read only the shape of a value."""


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
            targets = _targets(model, graph, contract, node[1] if file == node[0] else "")
            ends = [last_dependency(graph, chain, end) for end in targets]
            last = max((end for end in ends if end is not None), default=None)
            if first is not None and last is not None and first < last:
                rename_reads(graph, {chain[last]: chain[first]})
                changed = True
    return changed


def _targets(model: ModelProto, graph: GraphProto, contract: CacheContract, node: str) -> list[str]:
    """The values that a graph must compute: the outputs of the node, or the cross-attention cache."""
    outputs = [o for one in graph.node if node and one.name == node for o in one.output if o]
    cross = (inner_value(model, graph, slot.filled_by) for slot in contract.of_kind("cross-attention"))
    return outputs or [value for value in cross if value is not None]


def remove_layers(
    models: dict[str, ModelProto], contract: CacheContract, gone: list[int], left: list[int]
) -> tuple[dict[str, ModelProto], CacheContract] | None:
    """Copies of the models and the contract without the layers `gone`, of the layers `left`; None if that fails."""
    models = {file: copy_model(model) for file, model in models.items()}
    slots = {s.past for s in contract.slots if s.layer in gone}
    outputs = {name for s in contract.slots if s.layer in gone for name in (s.present, s.filled_by) if name}
    for file, model in models.items():
        for graph in list(layer_graphs(model)):
            chain = _spine_of(model, graph, contract, file)
            starts = {
                layer: begin
                for layer in left
                if (begin := _layer_begin(model, graph, chain, contract, layer)) is not None
            }
            if len(starts) < len(left):
                return None
            for layer in sorted(gone, key=lambda one: starts[one], reverse=True):
                later = [starts[other] for other in left if starts[other] > starts[layer]]
                end = min(later, default=_last_residual(graph, chain))
                if end <= starts[layer]:
                    return None
                rename_reads(graph, {chain[end]: chain[starts[layer]]})
        keep_outputs(model, {value.name for value in model.graph.output} - outputs)
    inputs = {name for model in models.values() for name in (value.name for value in model.graph.input)}
    if slots & inputs:
        return None
    slots_left = tuple(slot for slot in contract.slots if slot.past not in slots)
    return models, replace(contract, slots=slots_left)


def _last_residual(graph: GraphProto, chain: list[str]) -> int:
    """The index of the value before the projection to the vocabulary, which is the last matrix product."""
    operators = {name: node.op_type for node in graph.node for name in node.output}
    products = [i for i, name in enumerate(chain) if operators.get(name) in ("MatMul", "Gemm", "Einsum", "FusedMatMul")]
    return products[-1] - 1 if products else -1


def _layer_begin(
    model: ModelProto, graph: GraphProto, chain: list[str], contract: CacheContract, layer: int
) -> int | None:
    slots = [s for s in contract.growing if s.layer == layer]
    found = [_begin(model, graph, chain, s.present, s.filled_by) for s in slots]
    return min((index for index in found if index is not None), default=None)


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
    names = {value.name for value in graph.output}
    for node in model.graph.node:
        if node.op_type == "If" and output in node.output:
            index = list(node.output).index(output)
            value = graph.output[index].name if index < len(graph.output) else None
            return value if value in names else None
    return None


def find_spine(graph: GraphProto, sources: set[str], end: str) -> list[str]:
    """The values on every path from the sources (token ids or embeddings) to `end`, in order."""
    producer = producers(graph)
    order = _in_order(graph, end)
    dominator: dict[str, str | None] = {}
    depth: dict[str, int] = {}
    for name in order:
        if name in sources:
            dominator[name], depth[name] = None, 0
            continue
        node = producer.get(name)
        if node is None or node.op_type in SIZES_ONLY:
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
        if node.op_type not in SIZES_ONLY and not found.isdisjoint(node.input):
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


def _in_order(graph: GraphProto, end: str) -> list[str]:
    """The values that `end` depends on, each after those it needs; those from around the graph first."""
    needed, nodes = needed_for(graph, [end]), list(graph.node)
    made = [name for index in node_order(nodes) or () for name in nodes[index].output if name in needed]
    return [*sorted(needed.difference(made)), *made]
