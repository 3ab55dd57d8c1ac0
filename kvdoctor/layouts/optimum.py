"""Optimum: the names and files that Optimum's ORTModel classes and transformers.js look for, from whatever exporter.

Requires: a pair, or one graph for all steps, whose ports the contract knows; a cache of keys and values, layer by
layer, that grows. Ensures: encoder_model.onnx where there is an encoder, decoder_model_merged.onnx of a pair and
model.onnx of a decoder that is one graph, with Optimum's names, order and axes.
"""

from dataclasses import replace

from kvdoctor.contract import CacheContract
from kvdoctor.layouts import DoesNotFit, Layout, Made, Source
from kvdoctor.layouts.encoders import bring_encoder
from kvdoctor.layouts.graphs import keep_needed
from kvdoctor.layouts.joining import FIRST, LATER, MERGED, SINGLE, held, joined, name_half
from kvdoctor.layouts.naming import (
    Names,
    axis_names,
    first_of,
    name_axes,
    optimum_names,
    put_in_order,
    rename_as,
    unnameable,
    unnamed_inputs,
)
from kvdoctor.layouts.writing import Room
from kvdoctor.onnx_schema import ModelProto
from kvdoctor.report.document import Change
from kvdoctor.scoping import replace_all
from kvdoctor.stacks import StackFiles

INSIDE = Room(inside=1 << 30)
"""Consumers look for weights inside the model unless they are told otherwise: up to 1 GiB they are put there."""


def refuses(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why a stack cannot have Optimum's names."""
    if stack.kind == "operator":
        return f"the decode loop runs inside the operator {stack.operator}"
    if stack.kind != "pair" and _is_named_already(stack, contract):
        return "it has Optimum's names already"
    return unnameable(contract)


def _is_named_already(stack: StackFiles, contract: CacheContract) -> bool:
    names = optimum_names(contract, "decode")
    same = all(old == new for old, new in (*names.inputs.items(), *names.outputs.items()))
    return same and stack.main.path.stem.startswith((MERGED, SINGLE))


def make(source: Source) -> Made:
    """Give a stack Optimum's names, and merge the graphs of a pair."""
    if source.stack.kind == "pair":
        return _from_pair(source, together=True)
    return _from_one(source)


def make_pair(source: Source) -> Made:
    """The same, with the graphs of a pair in files of their own."""
    return _from_pair(source, together=False)


def _from_pair(source: Source, together: bool) -> Made:
    first, later = source.halves
    made = Made({}, (source.name("decoder"), source.name("decoder-with-past")), room=INSIDE)
    names = optimum_names(source.contract, "prefill"), optimum_names(source.contract, "decode")
    cut = bring_encoder(source, first, made)
    if cut is not None:
        names = replace(names[0], inputs=cut.inputs, axes={**names[0].axes, **cut.axes}), names[1]
    for half, chosen, is_later in ((first, names[0], False), (later, names[1], True)):
        name_half_as_optimum(half, source, is_later, chosen, made)
    passed = held(source.contract, *names)
    if together:
        made.models[source.new_name(MERGED)] = joined(source, first, later, passed, made)
    else:
        _drop_held(later, passed)
        made.models |= {source.new_name(FIRST): first, source.new_name(LATER): later}
    return made


def name_half_as_optimum(half: ModelProto, source: Source, is_later: bool, names: Names, made: Made) -> None:
    """Give one half of a pair Optimum's names, order and axes, and tell what was renamed.

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


def _drop_held(later: ModelProto, passed: dict[str, str]) -> None:
    """Later steps do not return what the caller holds."""
    replace_all(later.graph.output, [value for value in later.graph.output if value.name not in passed])
    keep_needed(later)


def _from_one(source: Source) -> Made:
    role = next(role for role, file in source.stack.files.items() if file.name == source.stack.main.name)
    model, made = source.model(role), Made({}, (source.stack.main.name,), room=INSIDE)
    names = optimum_names(source.contract, "decode")
    bring_encoder(source, None, made)
    rename_as(model, names)
    if strange := unnamed_inputs(model, source.contract.graph("decode"), names):
        raise DoesNotFit(f"it needs {first_of(f'{port.name} ({port.role})' for port in strange)}")
    renamed = {old: new for old, new in (*names.inputs.items(), *names.outputs.items()) if old != new}
    for old, new in renamed.items():
        made.changes.append(Change(source.stack.main.name, "inputs and outputs", old, new))
    name_axes(model.graph, names.axes, axis_names(source.contract))
    put_in_order(model.graph, source.contract)
    made.models[source.new_name(MERGED if source.stack.kind == "merged" else SINGLE)] = model
    return made


LAYOUT = Layout(
    "optimum", "the names and files that Optimum and transformers.js look for", (SINGLE, MERGED), refuses, make
)
