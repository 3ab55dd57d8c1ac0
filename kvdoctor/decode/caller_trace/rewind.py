"""A loop that takes tokens back by cutting the cache: speculative decoding, other continuations of one prompt.

A shorter past is also what many mistakes feed. It is taken for a cut only where something else in the step agrees with
it: masks, positions and counters of the shorter length, or values that are the first ones of what was returned. A past
as long as that of the step before is never taken for one: a cache that is not renewed looks the same.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from kvdoctor.contract import Slot
from kvdoctor.decode.caller_trace.recorded import TraceTensor
from kvdoctor.decode.caller_trace.rules.coupled import compare_with_length
from kvdoctor.decode.caller_trace.step import (
    ExpectedPast,
    SequenceState,
    StepContext,
    expect_past,
    first_length,
    holds_values_of,
    size_of,
)
from kvdoctor.decode.calls import Array


def cut_back(moment: StepContext) -> SequenceState | None:
    """The state of a sequence whose cache was cut before the step; None where no cut is recognized."""
    before, length = moment.before, first_length(moment)
    if before is None or moment.buffered or not 0 < length < before.tokens or length == before.tokens - before.new:
        return None
    cut = [(slot, fed) for slot, fed in moment.slots if slot.carry != "hold"]
    if not cut or not all(_can_be_cut(slot, fed, length) for slot, fed in cut):
        return None
    agree = [*_compare_values(moment, cut, length), *compare_with_length(moment, length)]
    return _shorten(before, moment, length) if agree and all(agree) else None


def _can_be_cut(slot: Slot, fed: TraceTensor, length: int) -> bool:
    """Whether a slot keeps an entry for each token, and was fed the first `length` of them."""
    grows = (slot.growth, slot.carry) in (("grow", "feed-back"), ("delta", "append"))
    return grows and slot.window is None and size_of(slot.axes, fed.shape, "past") == length


def _compare_values(moment: StepContext, cut: list[tuple[Slot, TraceTensor]], length: int) -> Iterator[bool]:
    """Whether each past with known values holds the first entries of what is due."""
    for slot, fed in cut:
        due = expect_past(slot, moment).value
        if due is not None and due.has_values and fed.has_values:
            first = _first_entries(due, slot, length)
            yield holds_values_of(slot, fed, ExpectedPast(first.shape, first, ""), moment)


def _shorten(before: SequenceState, moment: StepContext, length: int) -> SequenceState:
    """What the steps so far leave, without the tokens behind `length`."""
    contract = moment.contract
    slots = {s.filled_by if before.phase == "prefill" else s.present: s for s in contract.slots if s.carry != "hold"}
    coupled = {port.name for port in contract.graph(before.phase).inputs if port.role != "past"}
    fed = {name: tensor for name, tensor in before.last.fed.items() if name not in coupled}
    got = dict(before.last.got)
    for name, slot in slots.items():
        if name not in got:
            continue
        had = 0
        if slot.carry == "append" and slot.past in fed:
            # The next past is the past before with what the present adds to it.
            fed[slot.past] = _first_entries(fed[slot.past], slot, length)
            had = size_of(slot.axes, fed[slot.past].shape, "past") or 0
        got[name] = _first_entries(got[name], slot, length - had)
    ids = before.ids[..., :length] if before.ids is not None else None
    return replace(before, last=replace(before.last, fed=fed, got=got), tokens=length, ids=ids)


def _first_entries(value: TraceTensor, slot: Slot, length: int) -> TraceTensor:
    """A past or present, cut to its first `length` tokens."""
    at = slot.length_axis
    if at is None or at >= len(value.shape) or value.shape[at] <= length:
        return value
    shape = tuple(length if axis == at else size for axis, size in enumerate(value.shape))
    return TraceTensor(value.dtype, shape, partial(_take, value, at, length) if value.has_values else None)


def _take(value: TraceTensor, axis: int, length: int) -> Array:
    cut: Array = np.take(value.array(), range(length), axis=axis)
    return cut
