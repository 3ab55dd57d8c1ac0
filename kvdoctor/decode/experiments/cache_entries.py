"""Entries of a cache, token by token: to compare them, and to change one of them."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.calls import Answer, Array, Call, Past, as_array
from kvdoctor.decode.experiments import grows, several_tokens
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.parity import compare, judge
from kvdoctor.decode.tolerances import Tolerance

MOST_NUMBERS = 1 << 24
"""Numbers in all caches up to which they are copied."""
OTHER_TOKENS = (1, 2)
"""Distances to the ids that replace one: rows of an embedding table may be equal, but hardly three in a row."""


def growing(contract: CacheContract) -> tuple[Slot, ...]:
    """Self-attention slots that grow at their end and come back whole, in the order of their layers."""
    found = (s for s in contract.of_kind("self-attention") if s.growth in ("grow", "shared") and s.carry == "feed-back")
    return tuple(slot for slot in found if "past" in slot.axes and slot.present is not None and not slot.prepended)


def by_position(contract: CacheContract) -> tuple[Slot, ...]:
    """Self-attention slots in which each token has an entry at its position, in the order of their layers.

    Besides those that come back longer: caches to which the loop appends what comes back, and buffers of fixed size.
    A ring is one until it is full.
    """
    whole = {slot.past for slot in growing(contract)}
    found = (s for s in contract.of_kind("self-attention") if s.present is not None)
    return tuple(slot for slot in found if slot.past in whole or _keeps_places(slot))


def _keeps_places(slot: Slot) -> bool:
    if slot.growth == "delta":
        return slot.carry == "append" and "past" in slot.axes
    return slot.growth in ("static", "ring") and slot.carry == "feed-back" and "capacity" in slot.axes


def keeps_all(slot: Slot, prefill: Answer) -> bool:
    """Whether a slot has an entry for each token of a prefill, each at its position: a window drops the oldest."""
    if slot.growth == "ring" and (slot.size("capacity") or 0) < prefill.new:
        return False
    may_drop = slot.trimmed or slot.window is not None
    return not may_drop or read_returned(slot, prefill, True).shape[_at(slot)] == prefill.new


def has_length(contract: CacheContract) -> str | None:
    """Loops that go wrong by the length of the past need one: a buffer of fixed size shows nothing of it."""
    ids = contract.graph("decode").port("token_ids")
    if ids is not None and ids.shape and isinstance(ids.shape[-1], int):
        return f"a decode step takes {ids.shape[-1]} new token{'s' * (ids.shape[-1] > 1)} only"
    return several_tokens(contract) or grows(contract)


def can_be_copied(contract: CacheContract, past: Past) -> bool:
    """Whether the caches are small enough to be copied for each of many calls: buffers have the length of a context."""
    shapes = (past[slot.past].shape for slot in by_position(contract))
    return sum(math.prod(shape) for shape in shapes) <= MOST_NUMBERS


def as_probe(call: Call) -> Call:
    """The call as one that may fail; of a reference call the logits and the slots that grow alone are answered."""
    return replace(call, kind="trial" if call.kind == "reference" else "probe", expected=None)


def take_entries(slot: Slot, tensor: Array, span: tuple[int, int], tokens: int) -> Array:
    """Entries of the positions from the first of a span to before the second, of a slot that holds so many tokens."""
    first, size = _first_place(slot, tensor, tokens), tensor.shape[_at(slot)]
    return np.take(tensor, range(first + span[0], min(first + span[1], size)), axis=_at(slot))


def _first_place(slot: Slot, tensor: Array, tokens: int) -> int:
    """Where the entry of the first token is: a window that new entries are shifted into has zeros before it."""
    empty = tensor.shape[_at(slot)] - tokens
    shifted = slot.growth == "ring" and empty > 0 and not np.take(tensor, range(empty), axis=_at(slot)).any()
    return empty if shifted else 0


def same_entries(one: Array, other: Array, limit: Tolerance) -> bool:
    """Whether entries are the same but for rounding, as a fraction of their standard deviation."""
    if one.shape != other.shape:
        return False
    got, want = one.astype(np.float64), other.astype(np.float64)
    if np.array_equal(got, want, equal_nan=True):
        return True  # what is not finite has no distance, but may well be the same
    return bool(np.abs(got - want).max(initial=0.0) <= limit.passes * max(float(want.std()), 1e-12))


def same_logits(one: Array, other: Array, limit: Tolerance) -> bool:
    """Whether logits are the same but for rounding."""
    return one.shape == other.shape and judge(compare(one, other, limit), limit) == "pass"


def add_noise(builder: FeedBuilder, past: Past, places: Iterable[int], slots: Iterable[Slot] | None = None) -> Past:
    """The past with noise in some of its entries, in every slot that grows or in those given."""
    changed: dict[str, Any] = dict(past)
    rng = np.random.default_rng(11)
    places = list(places)
    for slot in by_position(builder.contract) if slots is None else slots:
        tensor = as_array(past[slot.past]).copy()
        first = _first_place(slot, tensor, builder.past_length(past))
        for place in (first + place for place in places if first + place < tensor.shape[_at(slot)]):
            index: list[Any] = [slice(None)] * tensor.ndim
            index[_at(slot)] = place
            noise = rng.standard_normal(tensor[tuple(index)].shape) * max(float(tensor.std()), 1e-3)
            tensor[tuple(index)] = noise.astype(tensor.dtype)
        changed[slot.past] = tensor
    return Past(changed, past.length)


def swap_entries(past: Past, slots: Iterable[Slot], one: int, other: int) -> Past:
    """The past with two entries of some slots in each other's place; a past that is too short stays as it is."""
    changed = Past(past, past.length)
    for slot in slots:
        tensor, at = as_array(past[slot.past]), slot.length_axis
        if at is not None and tensor.shape[at] > max(one, other):
            order = np.arange(tensor.shape[at])
            order[[one, other]] = other, one
            changed[slot.past] = np.take(tensor, order, axis=at)
    return changed


def change_token(builder: FeedBuilder, place: int) -> FeedBuilder:
    """A builder with another token at a position of the sequence, in all rows."""
    tokens = builder.tokens.copy()
    last = (builder.contract.vocabulary or 2**31) - 1
    tokens[:, place] += np.where(tokens[:, place] < last, 1, -1)
    return replace(builder, tokens=tokens)


def one_step(builder: FeedBuilder, position: int, past: Past | None, expected: Array | None = None) -> Call:
    """The call for one token; the first one where there is no past."""
    if past is None:
        return builder.prefill(1, expected)
    return builder.decode(position, position + 1, past, expected)


def read_returned(slot: Slot, answer: Answer, first: bool) -> Array:
    """What came back for a slot: after the first step by `filled_by`, later by `present`."""
    return answer.outputs[(slot.filled_by if first else slot.present) or ""].array()


def take_returned(slot: Slot, answer: Answer, first: bool, start: int, stop: int) -> Array:
    """Entries of the positions start to stop of what came back for a slot, without those that did not.

    It may be the new ones alone, or the last ones.
    """
    returned = read_returned(slot, answer, first)
    before = max(answer.past + answer.new - returned.shape[_at(slot)], 0)
    return take_entries(slot, returned, (max(start - before, 0), max(stop - before, 0)), answer.past + answer.new)


def _at(slot: Slot) -> int:
    at = slot.length_axis
    assert at is not None, f"{slot.past} has entries"  # noqa: S101 - only slots whose entries are counted come here
    return at
