"""From a merged decoder to its two halves: the graph without a past, and the graph that takes one.

A branch is written out in the place of its `If`; what hangs on no output of a half is left out of it, inputs as well.
The half with a past does not return what never changes: constants without elements, which Optimum's merged decoders put
in the place of the cross-attention cache, and pasts that are passed through. So does Optimum's decoder_with_past_model.
"""

from kvdoctor.contract import CacheContract
from kvdoctor.errors import UsageError
from kvdoctor.graph import Branches, GraphView
from kvdoctor.layouts.graphs import keep_needed
from kvdoctor.onnx_schema import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from kvdoctor.scoping import all_names, bodies, free, fresh, needed_for, own_names, rename, replace_all, step_aside


def halves(merged: ModelProto, contract: CacheContract) -> tuple[ModelProto, ModelProto]:
    """The graph of the first step and that of all later ones; their weights are not loaded. Changes no argument.

    Raises:
        UsageError: no `If` of the graph is decided by an input.
    """
    view = GraphView(merged)
    if view.branches is None:
        raise UsageError("this is no merged decoder: no If of its graph is decided by an input of type bool")
    switch, branches = view.branches
    dropped = {slot.present for slot in contract.slots if slot.present and _never_changes(view, branches, slot.present)}
    first = _half(merged, switch, branches, cached=False, dropped=set())
    return first, _half(merged, switch, branches, cached=True, dropped=dropped)


def _never_changes(view: GraphView, branches: Branches, output: str) -> bool:
    """Whether a decode step returns nothing under that name, or what it was given."""
    if view.emptied(output) is not None:
        return True
    scope, name = view.behind(output)
    source = scope.through(name, {"Identity"})
    return scope.graph is branches.cached.graph and source in view.inputs


def _half(merged: ModelProto, switch: str, branches: Branches, cached: bool, dropped: set[str]) -> ModelProto:
    model = ModelProto()
    model.CopyFrom(merged)
    at = next(index for index, node in enumerate(merged.graph.node) if node is branches.node)
    chosen = branches.cached if cached else branches.no_past
    _write_out(model.graph, at, chosen.graph)
    replace_all(model.graph.output, [value for value in model.graph.output if value.name not in dropped])
    _fix_switch(model.graph, switch, cached)
    keep_needed(model)
    model.graph.name = chosen.graph.name or model.graph.name
    return model


def _write_out(graph: GraphProto, at: int, branch: GraphProto) -> None:
    """Put the nodes of a branch in the place of the `If` at an index; what it returns gets the names of its outputs."""
    body, targets = GraphProto(), list(graph.node[at].output)
    body.CopyFrom(branch)
    before, after = list(graph.node[:at]), list(graph.node[at + 1 :])
    outside = own_names(graph) | {n for node in (*before, *after) for inner in bodies(node) for n in all_names(inner)}
    known = outside | all_names(body) | free(body)
    returned = {value.name: target for value, target in reversed([*zip(body.output, targets, strict=False)]) if target}
    inside = own_names(body)
    # A value keeps a name that is meant for it, and any other that stands in the way of the outer graph gets out of it.
    meant = {name: target for name, target in returned.items() if name in inside}
    aside = {name: fresh(name, known) for name in sorted(inside & outside) if name not in meant}
    for node in body.node:
        for nested in bodies(node):
            step_aside(nested, outside, known)
    declared = {target: value for value, target in zip(body.output, targets, strict=False)}
    types = {target: _merged_type(graph, target, value) for target, value in declared.items() if target}
    ends = [value.name for value in body.output]
    rename(body, {**aside, **meant})
    nodes = [*before, *body.node, *_led_out(ends, targets, meant, aside), *after]
    replace_all(graph.node, nodes)
    graph.initializer.extend(body.initializer)
    graph.sparse_initializer.extend(body.sparse_initializer)
    graph.quantization_annotation.extend(body.quantization_annotation)
    graph.value_info.extend(value for value in body.value_info if value.name not in targets)
    for value in graph.output:
        if value.name in types:
            value.type.CopyFrom(types[value.name].type)


def _led_out(ends: list[str], targets: list[str], meant: dict[str, str], aside: dict[str, str]) -> list[NodeProto]:
    """For outputs of the branch that did not give their value its name: it is an outer value, or returned twice."""
    nodes = []
    for end, target in zip(ends, targets, strict=False):
        if target and meant.get(end) != target:
            source = meant.get(end) or aside.get(end, end)
            nodes.append(NodeProto(op_type="Identity", name=f"{target}.named", input=[source], output=[target]))
    return nodes


def _merged_type(graph: GraphProto, target: str, value: ValueInfoProto) -> ValueInfoProto:
    """What is declared of an output: sizes that the branch knows, under the names of the outer graph."""
    outer = next((other for other in graph.output if other.name == target), None)
    merged = ValueInfoProto()
    merged.CopyFrom(outer if outer is not None else value)
    if outer is None or not value.type.tensor_type.HasField("shape"):
        return merged
    known, dims = value.type.tensor_type.shape.dim, merged.type.tensor_type.shape.dim
    if len(known) == len(dims):
        for dim, own in zip(dims, known, strict=True):
            if own.HasField("dim_value"):
                dim.CopyFrom(own)
    return merged


def _fix_switch(graph: GraphProto, switch: str, cached: bool) -> None:
    """Where something besides the `If` takes the switch, it is a constant of the half."""
    if switch not in needed_for(graph, (value.name for value in graph.output)):
        return
    declared = next(value for value in graph.input if value.name == switch)
    dims = [1] * len(declared.type.tensor_type.shape.dim)
    replace_all(graph.input, [value for value in graph.input if value.name != switch])
    graph.initializer.append(
        TensorProto(name=switch, dims=dims, data_type=TensorProto.BOOL, raw_data=b"\x01" if cached else b"\x00")
    )
