"""Optimum's names and files from any exporter; a pair merged, its later graph alone, or with shared weights.

Optimum requires a pair, or one graph for all steps, whose inputs and outputs the contract knows; a cache of keys and
values, layer by layer, that grows. It ensures encoder_model.onnx if there is an encoder, decoder_model_merged.onnx from
a pair or model.onnx from a decoder that is one graph, with Optimum's names, order and axes. As `optimum-pair` the
graphs of a pair stay in files of their own, decoder_model.onnx and decoder_with_past_model.onnx; the latter does not
return the cross-attention cache, which the caller keeps.

Merged requires a graph without past and one with it, of the same opset. It ensures one additional input,
`use_cache_branch`; a decode step returns the cross-attention cache that it was fed, so that a plain loop works; equal
weights are stored once.

Single requires a pair without an encoder, whose later graph takes any number of new tokens and a past of any length. It
ensures model.onnx, as Optimum exports decoders today. The second diagnosis shows whether an empty past works.

Shared requires two files of one stack with weights of equal content. The graphs are unchanged; tensors of equal type,
shape and content refer to the same bytes of the data file. What is smaller than 64 bytes stays inside the files, where
shape inference looks for it.
"""

from dataclasses import replace

from kvdoctor.addons.conversions.layouts.encoders import bring_encoder
from kvdoctor.addons.conversions.layouts.merging import find_kept, merge_halves
from kvdoctor.addons.conversions.layouts.naming import (
    FIRST,
    LATER,
    MERGED,
    SINGLE,
    PortNames,
    axis_names,
    find_unnameable,
    list_renamings,
    name_axes,
    optimum_names,
    put_in_order,
    rename_as,
    unified_names,
)
from kvdoctor.addons.conversions.layouts.pair import BESIDE
from kvdoctor.addons.conversions.layouts.registry import (
    LINE,
    ConvertedModels,
    DoesNotFit,
    EqualTensors,
    FileSizeLimit,
    Layout,
    LayoutSource,
    TensorBytes,
    point,
    restore,
    span_of,
)
from kvdoctor.analysis.stacks import FileRole, StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.model.edit import keep_only, prune
from kvdoctor.model.external_data import external_tensors
from kvdoctor.model.proto import ModelProto
from kvdoctor.report.repair_record import Change

INSIDE = FileSizeLimit(inside=1 << 30)
"""By default consumers look for weights inside the model: up to 1 GiB they are put there."""


def refuse(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why a stack cannot have Optimum's names."""
    if stack.kind == "operator":
        return f"the decode loop runs inside the operator {stack.operator}"
    names = optimum_names(contract, "decode")
    same = all(old == new for old, new in (*names.inputs.items(), *names.outputs.items()))
    if stack.kind != "pair" and same and stack.main.path.stem.startswith((MERGED, SINGLE)):
        return "it already has Optimum's names"
    return find_unnameable(contract)


def make(source: LayoutSource) -> ConvertedModels:
    """Give a stack Optimum's names, and merge the graphs of a pair."""
    if source.stack.kind == "pair":
        return _convert_pair(source, together=True)
    return _convert_single(source)


def make_pair(source: LayoutSource) -> ConvertedModels:
    """The same, with the graphs of a pair in files of their own."""
    return _convert_pair(source, together=False)


def _convert_pair(source: LayoutSource, together: bool) -> ConvertedModels:
    first, later = source.halves
    made = ConvertedModels({}, (source.name("decoder"), source.name("decoder-with-past")), limit=INSIDE)
    names = optimum_names(source.contract, "prefill"), optimum_names(source.contract, "decode")
    cut = bring_encoder(source, first, made)
    if cut is not None:
        names = replace(names[0], inputs=cut.inputs, axes={**names[0].axes, **cut.axes}), names[1]
    name_as_optimum(first, source, "decoder", names[0], made)
    name_as_optimum(later, source, "decoder-with-past", names[1], made)
    kept = find_kept(source.contract, *names)
    if together:
        made.models[source.new_name(MERGED)] = merge_halves(source, first, later, kept, made)
    else:
        keep_only(later.graph.output, lambda value: value.name not in kept)  # the caller keeps them
        prune(later)
        made.models |= {source.new_name(FIRST): first, source.new_name(LATER): later}
    return made


def name_as_optimum(
    model: ModelProto, source: LayoutSource, role: FileRole, names: PortNames, made: ConvertedModels
) -> None:
    """Give a graph Optimum's names, order and axes; the renamings are added to the changes.

    Raises:
        DoesNotFit: it needs an input that has no such name.
    """
    made.changes += list_renamings(source.name(role), model.graph, names)
    rename_as(model, names, source.ports(role))
    name_axes(model.graph, names.axes, axis_names(source.contract))
    put_in_order(model.graph, source.contract)


def _convert_single(source: LayoutSource) -> ConvertedModels:
    role, names = source.stack.main_role, optimum_names(source.contract, "decode")
    model, made = source.model(role), ConvertedModels({}, (source.stack.main.name,), limit=INSIDE)
    bring_encoder(source, None, made)
    name_as_optimum(model, source, role, names, made)
    made.models[source.new_name(MERGED if source.stack.kind == "merged" else SINGLE)] = model
    return made


def refuse_pair(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why a stack cannot become a pair with Optimum's names."""
    if stack.kind != "pair":
        return (
            "it is not a pair; for a merged decoder use --layout pair, for a decoder that is one graph --layout optimum"
        )
    return refuse(stack, contract)


def refuse_merged(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why a stack cannot be merged."""
    if stack.kind == "merged":
        return "it is already a merged decoder"
    if stack.kind != "pair":
        return "one graph serves the first and the later steps, so there is nothing to merge"
    first, later = unified_names(contract)
    for names in (first.inputs, later.inputs, first.outputs, later.outputs):
        if len(set(names.values())) < len(names):
            return "two of its inputs or outputs would get the same name: the contract does not distinguish them"
    return None


def make_merged(source: LayoutSource) -> ConvertedModels:
    """Merge the two graphs of a pair."""
    first, later = source.halves
    names = unified_names(source.contract)
    made = ConvertedModels({}, (source.name("decoder"), source.name("decoder-with-past")))
    roles: tuple[FileRole, ...] = ("decoder", "decoder-with-past")
    for half, chosen, role in zip((first, later), names, roles, strict=True):
        rename_as(half, chosen, source.ports(role))
        if source.readable:
            name_axes(half.graph, chosen.axes, axis_names(source.contract))
    made.models[source.new_name(MERGED)] = merge_halves(source, first, later, find_kept(source.contract, *names), made)
    return made


def refuse_single(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why the later graph of a stack cannot serve the first step."""
    if stack.kind != "pair":
        return "it is not a pair; a decoder that is one graph gets Optimum's names with --layout optimum"
    if contract.has_encoder_states or contract.of_kind("cross-attention"):
        return "its cross-attention cache is computed by the graph of the first step, which is therefore needed"
    count = next((size for port in contract.graph("decode").inputs if (size := port.size("new"))), None)
    if count is not None:
        return f"its later graph takes {count} new token at a time: export it with several new tokens"
    if contract.frozen_past is not None:
        return f"the past of its later graph has the fixed length {contract.frozen_past}"
    return find_unnameable(contract)


def make_single(source: LayoutSource) -> ConvertedModels:
    """Convert the later graph alone."""
    made = ConvertedModels({}, (source.name("decoder"), source.name("decoder-with-past")), limit=INSIDE)
    later = source.model("decoder-with-past")
    name_as_optimum(later, source, "decoder-with-past", optimum_names(source.contract, "decode"), made)
    made.models[source.new_name(SINGLE)] = later
    return made


def refuse_shared(stack: StackFiles, contract: CacheContract) -> str | None:  # noqa: ARG001 - the files alone decide
    """Why a stack has no weights to share."""
    return None if stack.kind == "pair" else "it is one file, which has nothing to share with another"


def make_shared(source: LayoutSource) -> ConvertedModels:
    """Let both graphs refer to the same bytes."""
    names = (source.name("decoder"), source.name("decoder-with-past"))
    made = ConvertedModels(dict(zip(names, source.halves, strict=True)), names, limit=BESIDE)
    for model in made.models.values():
        restore(external_tensors(model), source.root, lambda span: span.length < LINE)
    kept = {name: [*external_tensors(model)] for name, model in made.models.items()}
    sameness = EqualTensors(source.root, (tensor for tensors in kept.values() for tensor in tensors))
    places: dict[tuple[object, ...], TensorBytes] = {}
    for name, tensors in kept.items():
        shared = []
        for tensor in tensors:
            own = span_of(tensor)
            place = places.setdefault(sameness.key(tensor), own)
            if place != own:
                point(tensor, place)
                shared.append(own.length)
        if shared:
            counted = f"{len(shared)} weights, {sum(shared)} bytes"
            made.changes.append(Change(name, counted, "stored again", f"read from {names[0]}_data"))
    if not made.changes:
        first, later = ({span_of(tensor) for tensor in tensors} for tensors in kept.values())
        already = "its files share their weights already"
        raise DoesNotFit(already if first & later else "no weight of one file has the content of one in the other")
    made.notes.append(f"Keep {names[0]}_data next to both files: neither opens without it.")
    return made


LAYOUTS = (
    Layout("optimum", "the names and files that Optimum and transformers.js look for", (SINGLE, MERGED), refuse, make),
    Layout(
        "optimum-pair",
        "the names of Optimum, and both graphs of a pair in files of their own",
        (FIRST, LATER),
        refuse_pair,
        make_pair,
    ),
    Layout("merged", "one file with an If on use_cache_branch", (MERGED,), refuse_merged, make_merged),
    Layout("single", "the later graph of a pair alone, as model.onnx", (SINGLE,), refuse_single, make_single),
    Layout(
        "shared", "a pair whose weights are stored once, in a data file of both graphs", (), refuse_shared, make_shared
    ),
)
