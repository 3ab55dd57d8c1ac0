"""Layouts that are made from a pair: both halves in one file, the later graph alone, or both with shared weights.

Merged requires a graph without past and one with it, of the same opset. It ensures one additional input,
`use_cache_branch`; a decode step returns the cross-attention cache that it was fed, so that a plain loop works; equal
weights are stored once.

Single requires a pair without an encoder, whose later graph takes any number of new tokens and a past of any length. It
ensures model.onnx, as Optimum exports decoders today. The second diagnosis shows whether an empty past works.

Shared requires two files of one stack with weights of equal content. The graphs are unchanged; tensors of equal type,
shape and content refer to the same bytes of the data file. What is smaller than 64 bytes stays inside the files, where
shape inference looks for it.
"""

from kvdoctor.addons.conversions.layouts.merging import find_kept, merge_halves
from kvdoctor.addons.conversions.layouts.naming import (
    MERGED,
    SINGLE,
    axis_names,
    find_unnameable,
    name_axes,
    name_half,
    optimum_names,
    unified_names,
)
from kvdoctor.addons.conversions.layouts.optimum import INSIDE, name_half_as_optimum
from kvdoctor.addons.conversions.layouts.pair import BESIDE
from kvdoctor.addons.conversions.layouts.registry import ConvertedModels, DoesNotFit, Layout, LayoutSource
from kvdoctor.addons.conversions.layouts.weights import LINE, EqualTensors, TensorBytes, point, restore, span_of
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.model.external_data import external_tensors
from kvdoctor.report.repair_record import Change


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
    for half, chosen, is_later in ((first, names[0], False), (later, names[1], True)):
        name_half(half, source, is_later, chosen)
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
    name_half_as_optimum(later, source, True, optimum_names(source.contract, "decode"), made)
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
        for tensor in [*external_tensors(model)]:
            if span_of(tensor).length < LINE:
                restore(tensor, source.root)
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
    Layout(
        "merged",
        "one file with an If on use_cache_branch",
        (MERGED,),
        refuse_merged,
        make_merged,
        title="Merged: both halves of a pair in one file, as Optimum's decoder_model_merged.onnx; "
        "names stay those of the pair.",
    ),
    Layout(
        "single",
        "the later graph of a pair alone, as model.onnx",
        (SINGLE,),
        refuse_single,
        make_single,
        title="Single: the graph that takes the past serves the first step as well, with an empty past; "
        "Optimum's names, model.onnx.",
    ),
    Layout(
        "shared",
        "a pair whose weights are stored once, in a data file of both graphs",
        (),
        refuse_shared,
        make_shared,
        title="Shared: a pair whose graphs read the same weights from one data file, in which each stands once.",
    ),
)
