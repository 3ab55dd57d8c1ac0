"""Optimum: the names and files that Optimum's ORTModel classes and transformers.js look for, from any exporter.

Requires: a pair, or one graph for all steps, whose inputs and outputs the contract knows; a cache of keys and values,
layer by layer, that grows.
Ensures: encoder_model.onnx if there is an encoder, decoder_model_merged.onnx from a pair or model.onnx from a decoder
that is one graph, with Optimum's names, order and axes. As `optimum-pair` the graphs of a pair stay in files of their
own, decoder_model.onnx and decoder_with_past_model.onnx; the latter does not return the cross-attention cache, which
the caller keeps.
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
    first_of,
    name_axes,
    name_half,
    optimum_names,
    put_in_order,
    rename_as,
    unnamed_inputs,
)
from kvdoctor.addons.conversions.layouts.registry import ConvertedModels, DoesNotFit, Layout, LayoutSource
from kvdoctor.addons.conversions.layouts.weights import FileSizeLimit
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.model.edit import prune, replace_all
from kvdoctor.model.proto import ModelProto
from kvdoctor.report.repair_record import Change

INSIDE = FileSizeLimit(inside=1 << 30)
"""By default consumers look for weights inside the model: up to 1 GiB they are put there."""


def refuse(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why a stack cannot have Optimum's names."""
    if stack.kind == "operator":
        return f"the decode loop runs inside the operator {stack.operator}"
    if stack.kind != "pair" and _is_named_already(stack, contract):
        return "it already has Optimum's names"
    return find_unnameable(contract)


def _is_named_already(stack: StackFiles, contract: CacheContract) -> bool:
    names = optimum_names(contract, "decode")
    same = all(old == new for old, new in (*names.inputs.items(), *names.outputs.items()))
    return same and stack.main.path.stem.startswith((MERGED, SINGLE))


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
    for half, chosen, is_later in ((first, names[0], False), (later, names[1], True)):
        name_half_as_optimum(half, source, is_later, chosen, made)
    kept = find_kept(source.contract, *names)
    if together:
        made.models[source.new_name(MERGED)] = merge_halves(source, first, later, kept, made)
    else:
        _drop_kept_outputs(later, kept)
        made.models |= {source.new_name(FIRST): first, source.new_name(LATER): later}
    return made


def name_half_as_optimum(
    half: ModelProto, source: LayoutSource, is_later: bool, names: PortNames, made: ConvertedModels
) -> None:
    """Give one half of a pair Optimum's names, order and axes; the renamings are added to the changes.

    Raises:
        DoesNotFit: it needs an input that has no such name.
    """
    old = source.name("decoder-with-past" if is_later else "decoder")
    before = [*(value.name for value in half.graph.input), *(value.name for value in half.graph.output)]
    name_half(half, source, is_later, names)
    name_axes(half.graph, names.axes, axis_names(source.contract))
    put_in_order(half.graph, source.contract)
    both = {**names.inputs, **names.outputs}
    for name in before:
        if name not in both:
            made.changes.append(Change(old, "inputs and outputs", name, "left out"))
        elif both[name] != name:
            made.changes.append(Change(old, "inputs and outputs", name, both[name]))


def _drop_kept_outputs(later: ModelProto, kept: dict[str, str]) -> None:
    """Drop the outputs of later steps that the caller keeps."""
    replace_all(later.graph.output, [value for value in later.graph.output if value.name not in kept])
    prune(later)


def _convert_single(source: LayoutSource) -> ConvertedModels:
    model, made = source.model(source.stack.main_role), ConvertedModels({}, (source.stack.main.name,), limit=INSIDE)
    names = optimum_names(source.contract, "decode")
    bring_encoder(source, None, made)
    rename_as(model, names)
    if strange := unnamed_inputs(model, source.contract.graph("decode"), names):
        raise DoesNotFit(
            "it takes inputs that have no name in the new layout: "
            f"{first_of(f'{port.name} ({port.role})' for port in strange)}"
        )
    renamed = {old: new for old, new in (*names.inputs.items(), *names.outputs.items()) if old != new}
    for old, new in renamed.items():
        made.changes.append(Change(source.stack.main.name, "inputs and outputs", old, new))
    name_axes(model.graph, names.axes, axis_names(source.contract))
    put_in_order(model.graph, source.contract)
    made.models[source.new_name(MERGED if source.stack.kind == "merged" else SINGLE)] = model
    return made


def refuse_pair(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why a stack cannot become a pair with Optimum's names."""
    if stack.kind != "pair":
        return (
            "it is not a pair; for a merged decoder use --layout pair, for a decoder that is one graph --layout optimum"
        )
    return refuse(stack, contract)


LAYOUTS = (
    Layout("optimum", "the names and files that Optimum and transformers.js look for", (SINGLE, MERGED), refuse, make),
    Layout(
        "optimum-pair",
        "the same with decoder and decoder_with_past",
        (FIRST, LATER),
        refuse_pair,
        make_pair,
        title="Optimum pair: Optimum's names, with both graphs of a pair in files of their own.",
    ),
)
