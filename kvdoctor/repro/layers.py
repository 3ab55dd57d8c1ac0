"""Layers of a decoder as its spine shows them: where each begins, and models without some of them."""

from dataclasses import replace

from kvdoctor.contract import CacheContract
from kvdoctor.onnx_schema import GraphProto, ModelProto
from kvdoctor.repro.spine import last_on, reached, spine
from kvdoctor.repro.surgery import copied, keep_outputs, lead_past, scopes


def lead_past_layers(models: dict[str, ModelProto], contract: CacheContract, node: tuple[str, str]) -> bool:
    """Lead past what stands between the first layer and that of a node, (file, name), in every graph and branch.

    Changes the models. False where there is nothing to lead past.
    """
    changed = False
    for file, model in models.items():
        for graph in list(scopes(model)):
            way = _spine_of(model, graph, contract, file)
            begins = [_begin(model, graph, way, slot.present, slot.filled_by) for slot in contract.growing]
            first = min((begin for begin in begins if begin is not None), default=None)
            wanted = _ends(model, graph, contract, node[1] if file == node[0] else "")
            ends = [last_on(graph, way, end) for end in wanted]
            last = max((end for end in ends if end is not None), default=None)
            if first is not None and last is not None and first < last:
                lead_past(graph, way[first], way[last])
                changed = True
    return changed


def _ends(model: ModelProto, graph: GraphProto, contract: CacheContract, node: str) -> list[str]:
    """What a graph is needed for: what the node returns, or the cross-attention cache that it makes."""
    made = [o for one in graph.node if node and one.name == node for o in one.output if o]
    crossed = (inside(model, graph, slot.filled_by) for slot in contract.of_kind("cross-attention"))
    return made or [value for value in crossed if value is not None]


def without_layers(
    models: dict[str, ModelProto], contract: CacheContract, gone: list[int], left: list[int]
) -> tuple[dict[str, ModelProto], CacheContract] | None:
    """The models and their contract without some of the layers that are left: what follows takes what they took."""
    models = {file: copied(model) for file, model in models.items()}
    slots = {s.past for s in contract.slots if s.layer in gone}
    outputs = {name for s in contract.slots if s.layer in gone for name in (s.present, s.filled_by) if name}
    for file, model in models.items():
        for graph in list(scopes(model)):
            way = _spine_of(model, graph, contract, file)
            starts = {
                layer: begin
                for layer in left
                if (begin := _layer_begin(model, graph, way, contract, layer)) is not None
            }
            if len(starts) < len(left):
                return None
            for layer in sorted(gone, key=lambda one: starts[one], reverse=True):
                later = [starts[other] for other in left if starts[other] > starts[layer]]
                end = min(later, default=_last_residual(graph, way))
                if end <= starts[layer]:
                    return None
                lead_past(graph, way[starts[layer]], way[end])
        keep_outputs(model, {value.name for value in model.graph.output} - outputs)
    inputs = {name for model in models.values() for name in (value.name for value in model.graph.input)}
    if slots & inputs:
        return None
    slots_left = tuple(slot for slot in contract.slots if slot.past not in slots)
    return models, replace(contract, slots=slots_left)


def _last_residual(graph: GraphProto, way: list[str]) -> int:
    """The value in front of the projection to the vocabulary: the last but what the last product makes."""
    made = {name: node.op_type for node in graph.node for name in node.output}
    products = [i for i, name in enumerate(way) if made.get(name) in ("MatMul", "Gemm", "Einsum", "FusedMatMul")]
    return products[-1] - 1 if products else -1


def _layer_begin(
    model: ModelProto, graph: GraphProto, way: list[str], contract: CacheContract, layer: int
) -> int | None:
    mine = [s for s in contract.growing if s.layer == layer]
    found = [_begin(model, graph, way, s.present, s.filled_by) for s in mine]
    return min((index for index in found if index is not None), default=None)


def _begin(model: ModelProto, graph: GraphProto, way: list[str], *outputs: str | None) -> int | None:
    """Where on the spine the layer begins that returns one of some outputs."""
    for output in outputs:
        value = inside(model, graph, output)
        found = last_on(graph, way, value) if value is not None else None
        if found is not None:
            return found
    return None


def _spine_of(model: ModelProto, graph: GraphProto, contract: CacheContract, file: str) -> list[str]:
    ports = [g for g in contract.graphs.values() if g.file == file]
    roles = ("token_ids", "token_and_position", "embeddings")
    sources = {port.name for g in ports for port in g.inputs if port.role in roles}
    if graph is not model.graph:
        sources = reached(model.graph, sources)
    ends = [value for g in ports for p in g.outputs if p.role == "logits" and (value := inside(model, graph, p.name))]
    return spine(graph, sources, ends[0]) if ends else []


def inside(model: ModelProto, graph: GraphProto, output: str | None) -> str | None:
    """The value of a graph or branch that stands behind an output of the model."""
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
