"""Pair: the first step and later ones in files of their own, as Optimum's decoder and decoder_with_past.

Requires: an `If` that is controlled by an input; or one graph whose first step takes an empty past (`splitting`).
Ensures: no switch, no placeholders, and no inputs that a half does not use. Each branch is inlined in place of its
`If`. The file with past does not return values that never change: constants without elements, which Optimum's merged
decoders return in place of the cross-attention cache, and pasts that are passed through. The caller keeps those of the
first step.
"""

from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.errors import UsageError
from kvdoctor.model.edit import fresh_name, prune, rename_all, rename_banned, replace_all
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from kvdoctor.model.traverse import all_names, captures, needed_for, own_names, subgraphs
from kvdoctor.model.view import Branches, GraphView
from kvdoctor.repair.layouts.naming import FIRST, LATER, axis_names, first_of, name_axes, port_axes
from kvdoctor.repair.layouts.registry import ConvertedModels, Layout, LayoutSource
from kvdoctor.repair.layouts.splitting import refuse_split, split_single
from kvdoctor.report.repair_record import Change


def refuse(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why a stack cannot be split."""
    if stack.kind == "pair":
        return "it is already a pair"
    if stack.kind != "merged":
        return refuse_split(contract) if contract.slots else "its cache contract could not be read"
    return None if contract.slots else "its cache contract could not be read"


def make(source: LayoutSource) -> ConvertedModels:
    """Split a merged decoder, or make a graph of the first step from the one for all steps."""
    if source.stack.kind != "merged":
        return split_single(source)
    merged = source.model("decoder-merged")
    first, later = split_halves(merged, source.contract)
    made = ConvertedModels(
        {source.new_name(FIRST): first, source.new_name(LATER): later}, (source.name("decoder-merged"),)
    )
    for file, half, branch in zip(made.models, (first, later), ("no-past branch", "cached branch"), strict=True):
        for part, mine, theirs in (
            ("inputs", half.graph.input, merged.graph.input),
            ("outputs", half.graph.output, merged.graph.output),
        ):
            kept = {value.name for value in mine}
            gone = [value.name for value in theirs if value.name not in kept]
            if gone:
                made.changes.append(Change(file, f"{branch}, {part}", first_of(gone), "left out"))
    if source.readable:
        axes = port_axes(source.contract, source.stack.main.name)
        for half in (first, later):
            name_axes(half.graph, axes, axis_names(source.contract))
    return made


def split_halves(merged: ModelProto, contract: CacheContract) -> tuple[ModelProto, ModelProto]:
    """The graph of the first step and that of all later ones, as copies without their weights.

    Raises:
        UsageError: no `If` of the graph is controlled by an input.
    """
    view = GraphView(merged)
    if view.branches is None:
        raise UsageError("this is not a merged decoder: no If of its graph is controlled by an input of type bool")
    switch, branches = view.branches
    dropped = {slot.present for slot in contract.slots if slot.present and _never_changes(view, branches, slot.present)}
    first = _make_half(merged, switch, branches, cached=False, dropped=set())
    return first, _make_half(merged, switch, branches, cached=True, dropped=dropped)


def _never_changes(view: GraphView, branches: Branches, output: str) -> bool:
    """Whether a decode step returns an empty tensor under that name, or the past that it was fed."""
    if view.emptied(output) is not None:
        return True
    scope, name = view.behind(output)
    source = scope.through(name, {"Identity"})
    return scope.graph is branches.cached.graph and source in view.inputs


def _make_half(merged: ModelProto, switch: str, branches: Branches, cached: bool, dropped: set[str]) -> ModelProto:
    model = ModelProto()
    model.CopyFrom(merged)
    at = next(index for index, node in enumerate(merged.graph.node) if node is branches.node)
    chosen = branches.cached if cached else branches.no_past
    _inline_branch(model.graph, at, chosen.graph)
    replace_all(model.graph.output, [value for value in model.graph.output if value.name not in dropped])
    _fix_switch(model.graph, switch, cached)
    prune(model)
    model.graph.name = chosen.graph.name or model.graph.name
    return model


def _inline_branch(graph: GraphProto, at: int, branch: GraphProto) -> None:
    """Replace the `If` at an index by the nodes of a branch; their results get the names of the outputs of the `If`."""
    body, targets = GraphProto(), list(graph.node[at].output)
    body.CopyFrom(branch)
    before, after = list(graph.node[:at]), list(graph.node[at + 1 :])
    outside = own_names(graph) | {
        n for node in (*before, *after) for inner in subgraphs(node) for n in all_names(inner)
    }
    known = outside | all_names(body) | {*captures(body)}
    returned = {value.name: target for value, target in reversed([*zip(body.output, targets, strict=False)]) if target}
    inside = own_names(body)
    # A value keeps a name that is meant for it; other names that collide with the enclosing graph are changed.
    meant = {name: target for name, target in returned.items() if name in inside}
    aside = {name: fresh_name(name, known) for name in sorted(inside & outside) if name not in meant}
    for node in body.node:
        for nested in subgraphs(node):
            rename_banned(nested, outside, known)
    declared = {target: value for value, target in zip(body.output, targets, strict=False)}
    types = {target: _merge_types(graph, target, value) for target, value in declared.items() if target}
    ends = [value.name for value in body.output]
    rename_all(body, {**aside, **meant})
    nodes = [*before, *body.node, *_name_outputs(ends, targets, meant, aside), *after]
    replace_all(graph.node, nodes)
    graph.initializer.extend(body.initializer)
    graph.sparse_initializer.extend(body.sparse_initializer)
    graph.quantization_annotation.extend(body.quantization_annotation)
    graph.value_info.extend(value for value in body.value_info if value.name not in targets)
    for value in graph.output:
        if value.name in types:
            value.type.CopyFrom(types[value.name].type)


def _name_outputs(ends: list[str], targets: list[str], meant: dict[str, str], aside: dict[str, str]) -> list[NodeProto]:
    """Identities for outputs of the branch that are values of the enclosing graph, or are returned twice."""
    nodes = []
    for end, target in zip(ends, targets, strict=False):
        if target and meant.get(end) != target:
            source = meant.get(end) or aside.get(end, end)
            nodes.append(NodeProto(op_type="Identity", name=f"{target}.named", input=[source], output=[target]))
    return nodes


def _merge_types(graph: GraphProto, target: str, value: ValueInfoProto) -> ValueInfoProto:
    """The declaration of an output: sizes from the branch, names from the enclosing graph."""
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
    """Make the switch a constant of the half if other nodes than the `If` take it."""
    if switch not in needed_for(graph, (value.name for value in graph.output)):
        return
    declared = next(value for value in graph.input if value.name == switch)
    dims = [1] * len(declared.type.tensor_type.shape.dim)
    replace_all(graph.input, [value for value in graph.input if value.name != switch])
    graph.initializer.append(
        TensorProto(name=switch, dims=dims, data_type=TensorProto.BOOL, raw_data=b"\x01" if cached else b"\x00")
    )


LAYOUT = Layout("pair", "decoder_model.onnx and decoder_with_past_model.onnx", (FIRST, LATER), refuse, make)
