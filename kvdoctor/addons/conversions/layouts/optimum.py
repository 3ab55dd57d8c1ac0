"""Optimum's names and files from any exporter; a pair merged, its later graph alone, or with shared weights.

Optimum requires a pair, or one graph for all steps, whose inputs and outputs the contract knows; a cache of keys and
values, layer by layer, that grows. It ensures encoder_model.onnx if there is an encoder, decoder_model_merged.onnx from
a pair or model.onnx from a decoder that is one graph, with Optimum's names, order and axes. As `optimum-pair` the
graphs of a pair stay in files of their own, decoder_model.onnx and decoder_with_past_model.onnx; the latter does not
return the cross-attention cache, which the caller keeps.

Merged requires a graph without past and one with it, of the same opset. It ensures one additional input,
`use_cache_branch`; a decode step returns the cross-attention cache that it was fed, so that a plain loop works; equal
weights are stored once.

Single requires a pair or a merged decoder, whose later graph takes any number of new tokens and a past of any length.
It ensures model.onnx, as Optimum exports decoders today. The second diagnosis shows whether an empty past works. With
an encoder, what computes the cross-attention cache moves from the first step into encoder_model.onnx, and model.onnx
takes that cache as inputs, held by the loop. Graphs of later steps often have no mask of later tokens: each
self-attention gets one where the proof finds none.

Shared requires two files of one stack with weights of equal content. The graphs are unchanged; tensors of equal type,
shape and content refer to the same bytes of the data file. What is smaller than 64 bytes stays inside the files, where
shape inference looks for it.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from kvdoctor.addons.conversions.layouts.encoders import RESULT, STATES, bring_encoder, return_from_encoder
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
    list_renamings,
    name_axes,
    optimum_names,
    put_in_order,
    rename_as,
    slot_name,
    unified_names,
)
from kvdoctor.addons.conversions.layouts.pair import ALL_EXTERNAL, TYPES, find_halves
from kvdoctor.addons.conversions.layouts.registry import (
    ConvertedModels,
    DoesNotFit,
    EqualTensors,
    FileSizeLimit,
    Layout,
    LayoutSource,
    point,
    restore_small,
    span_of,
)
from kvdoctor.analysis import stacks
from kvdoctor.analysis.lm_head import describe_op
from kvdoctor.analysis.proof.masks import hides_later
from kvdoctor.analysis.proof.prove import find_types
from kvdoctor.analysis.proof.types import Type
from kvdoctor.analysis.stacks import FileRole, StackFiles
from kvdoctor.contract import CacheContract, Slot
from kvdoctor.model.edit import GraphWriter, keep_only, prune, sort_nodes
from kvdoctor.model.external_data import ExternalReference, external_tensors
from kvdoctor.model.operators import has
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import explain_old_opset, find_attribute, output_of, readers
from kvdoctor.model.view import ELEMENT_TYPES
from kvdoctor.report.repair_record import Change

INSIDE = FileSizeLimit(inside=1 << 30)
"""By default consumers look for weights inside the model: up to 1 GiB they are put there."""
LEAST_OPSET = 11
"""The first that has Range."""
LOWEST = -3.4028234663852886e38
"""What hides a score."""


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


def _convert_pair(source: LayoutSource, together: bool) -> ConvertedModels:
    first, later = find_halves(source)
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
    first, later = find_halves(source)
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
    if stack.kind not in ("pair", "merged"):
        return "it is one graph already, which gets Optimum's names with --layout optimum"
    if contract.of_kind("cross-attention"):
        inside = contract.graph("prefill").port("encoder_states") is None
        if not inside and ("encoder" not in stack.files or "encode" not in contract.phases):
            return "the encoder, which would return its cross-attention cache, is not next to it"
    elif (count := contract.step_tokens) is not None:
        return f"its later graph takes {count} new token at a time: export it with several new tokens"
    if contract.frozen_past is not None:
        return f"the past of its later graph has the fixed length {contract.frozen_past}"
    return find_unnameable(contract)


def make_single(source: LayoutSource) -> ConvertedModels:
    """Convert the later graph alone; of an encoder-decoder, with an encoder that makes the cross-attention cache."""
    contract, role = source.contract, source.stack.main_role
    first, later = find_halves(source)
    gone = tuple(file.name for name, file in source.stack.files.items() if name not in stacks.INPUT_ROLES)
    made, names = ConvertedModels({}, gone, limit=INSIDE), optimum_names(contract, "decode")
    if crossed := contract.of_kind("cross-attention"):
        _move_cross_caches(source, first, made)
        caches = {slot.present for slot in crossed}
        names = replace(names, outputs={old: new for old, new in names.outputs.items() if old not in caches})
        if count := hide_later(later, contract, find_types(source.stack, contract)):
            which = f"{count} self-attention{'s' * (count > 1)}"
            made.changes.append(Change(gone[-1], which, "no proved mask of later tokens", "with one"))
    name_as_optimum(later, source, role, names, made)
    if made.encoder is not None and crossed and all(value.name != STATES for value in later.graph.input):
        keep_only(made.models[made.encoder].graph.output, lambda value: value.name != RESULT)
    made.models[source.new_name(SINGLE)] = later
    return made


def _move_cross_caches(source: LayoutSource, first: ModelProto, made: ConvertedModels) -> None:
    """Let the encoder return the cross-attention cache, which the graph of the first step computes."""
    contract, names = source.contract, optimum_names(source.contract, "prefill")
    cut = bring_encoder(source, first, made)
    if cut is not None:
        names = replace(names, inputs=cut.inputs, axes={**names.axes, **cut.axes})
    rename_as(first, names, contract.graph("prefill"))
    made.encoder = made.encoder or source.name("encoder")
    if made.encoder not in made.models:
        made.models[made.encoder] = source.model("encoder")
        made.replaces = (*made.replaces, made.encoder)
    encoder = made.models[made.encoder]
    caches = [f"present.{slot_name(slot, contract)}" for slot in contract.of_kind("cross-attention")]
    return_from_encoder(encoder, first, (RESULT, STATES), caches)
    name_axes(encoder.graph, {name: names.axes[name] for name in caches}, axis_names(contract))
    made.changes.append(Change(made.encoder, "outputs", "the encoder states", f"the cache {first_of(caches)}"))
    made.notes.append(f"Run {made.encoder} once for each input, and feed its outputs as the cross-attention cache.")


def hide_later(model: ModelProto, contract: CacheContract, types: Mapping[str, Type]) -> int:
    """Hide later tokens in each self-attention of a graph where no type shows a mask; gives the number of these.

    Raises:
        DoesNotFit: the operators that this takes are not in its opset, or one operator is the whole attention.
    """
    graph, writer, decode = model.graph, GraphWriter(model, prefix="causal"), contract.graph("decode")
    keys = [slot for slot in contract.of_kind("self-attention") if slot.part == "key"]
    tokens = decode.port("token_ids") or decode.port("embeddings")
    if (old := explain_old_opset(model, decode.file, LEAST_OPSET, "Range")) is not None or tokens is None:
        raise DoesNotFit(old or "it takes no token ids")
    found = [one for slot in keys for one in _find_softmaxes(graph, slot) if not _is_hidden(one[0].input[0], types)]
    for softmax, dtype in found:
        past = writer.size_of(keys[0].past, keys[0].axes.index("past"), ())
        new = writer.size_of(tokens.name, tokens.axes.index("new"), ())
        zero, one = (writer.numbers([number], []) for number in (0, 1))
        total = writer.node("total", "Add", [past, new])
        rows = writer.node("rows", "Range", [past, total, one])
        column = writer.node("column", "Reshape", [rows, writer.numbers([-1, 1])])
        later = writer.node("later", "Greater", [writer.node("columns", "Range", [zero, total, one]), column])
        lowest = writer.tensor("lowest", TensorProto(data_type=TensorProto.FLOAT, float_data=[LOWEST]))
        if dtype != "float":
            lowest = writer.node("lowest_cast", "Cast", [lowest], to=TYPES[dtype])
        softmax.input[0] = writer.node("scores", "Where", [later, lowest, softmax.input[0]])
    sort_nodes(graph)
    return len(found)


def _is_hidden(scores: str, types: Mapping[str, Type]) -> bool:
    """Whether types of a graph, where names of a branch follow its number, show that no score is of a later token."""
    found = [one for name, one in types.items() if name == scores or re.fullmatch(rf"\d+:{re.escape(scores)}", name)]
    return bool(found) and all(hides_later(one, -2, -1) for one in found)


def _find_softmaxes(graph: GraphProto, key: Slot) -> Iterator[tuple[NodeProto, str]]:
    """What makes weights of the scores over a key, with the type of the scores."""
    reading, waiting, seen = readers(graph), [(key.past, key.dtype)], set[str]()
    for name, dtype in waiting:
        for node, _ in reading.get(name, ()):
            made = output_of(node)
            if made in seen or has(node.op_type, "measure"):
                continue
            seen.add(made)
            if has(node.op_type, "attend"):
                raise DoesNotFit(f"no mask of later tokens can be put into the node {describe_op(node)}, an attention")
            if has(node.op_type, "softmax"):
                yield node, dtype
            else:
                to = find_attribute(node, "to") if has(node.op_type, "cast") else None
                waiting.append((made, dtype if to is None else ELEMENT_TYPES[to.i]))


def make_shared(source: LayoutSource) -> ConvertedModels:
    """Let both graphs refer to the same bytes."""
    names = (source.name("decoder"), source.name("decoder-with-past"))
    made = ConvertedModels(dict(zip(names, find_halves(source), strict=True)), names, limit=ALL_EXTERNAL)
    for model in made.models.values():
        restore_small(model, source.root)
    external = {name: [*external_tensors(model)] for name, model in made.models.items()}
    sameness = EqualTensors(source.root)
    places: dict[tuple[object, ...], ExternalReference] = {}
    for name, tensors in external.items():
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
        first, later = ({span_of(tensor) for tensor in tensors} for tensors in external.values())
        already = "its files share their weights already"
        raise DoesNotFit(already if first & later else "no weight of one file has the content of one in the other")
    made.notes.append(f"Keep {names[0]}_data next to both files: neither opens without it.")
    return made


LAYOUTS = (
    Layout(
        "optimum",
        "the names and files that Optimum and transformers.js look for",
        refuse,
        make,
    ),
    Layout(
        "optimum-pair",
        "the names of Optimum, and both graphs of a pair in files of their own",
        refuse_pair,
        partial(_convert_pair, together=False),
    ),
    Layout("merged", "one file with an If on use_cache_branch", refuse_merged, make_merged),
    Layout(
        "single",
        "the graph of later steps as model.onnx, and the encoder with the cross-attention cache if there is one",
        refuse_single,
        make_single,
    ),
    Layout(
        "shared",
        "a pair whose weights are stored once, in a data file of both graphs",
        lambda stack, _: None if stack.kind == "pair" else "it is one file, which has nothing to share with another",
        make_shared,
    ),
)
