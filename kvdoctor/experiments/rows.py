"""Entries of a cache, token by token: to compare them, and to change one of them."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from kvdoctor.calls import Answer, Array, Call, Past, as_array
from kvdoctor.contract import CacheContract, Slot
from kvdoctor.feeds import Deal
from kvdoctor.parity import compare, judge
from kvdoctor.tolerances import tolerance


def growing(contract: CacheContract) -> tuple[Slot, ...]:
    """Self-attention slots that grow and come back whole, in the order of their layers."""
    found = (s for s in contract.of_kind("self-attention") if s.growth in ("grow", "shared") and s.carry == "feed-back")
    return tuple(slot for slot in found if "past" in slot.axes and slot.present is not None)


def probe(call: Call) -> Call:
    """The call as one that may fail."""
    return replace(call, kind="probe", expected=None)


def rows(slot: Slot, tensor: Array, start: int, stop: int) -> Array:
    """Entries start to stop of a slot."""
    return np.take(tensor, range(start, min(stop, tensor.shape[_at(slot)])), axis=_at(slot))


def alike(one: Array, other: Array, exactness: str) -> bool:
    """Whether entries are the same but for rounding, as a fraction of their spread."""
    if one.shape != other.shape:
        return False
    got, want = one.astype(np.float64), other.astype(np.float64)
    if np.array_equal(got, want, equal_nan=True):
        return True  # what is not finite has no distance, but may well be the same
    return bool(np.abs(got - want).max(initial=0.0) <= tolerance(exactness).passes * max(float(want.std()), 1e-12))


def same_logits(one: Array, other: Array, exactness: str) -> bool:
    """Whether logits are the same but for rounding."""
    return one.shape == other.shape and judge(compare(one, other, exactness), exactness) == "pass"


def disturbed(deal: Deal, past: Past, places: Iterable[int], slots: Iterable[Slot] | None = None) -> Past:
    """The past with noise in some of its entries, in every slot that grows or in those given."""
    changed: dict[str, Any] = dict(past)
    rng = np.random.default_rng(11)
    places = list(places)
    for slot in growing(deal.contract) if slots is None else slots:
        tensor = as_array(past[slot.past]).copy()
        for place in places:
            index: list[Any] = [slice(None)] * tensor.ndim
            index[_at(slot)] = place
            noise = rng.standard_normal(tensor[tuple(index)].shape) * max(float(tensor.std()), 1e-3)
            tensor[tuple(index)] = noise.astype(tensor.dtype)
        changed[slot.past] = tensor
    return Past(changed, past.length)


def swapped(deal: Deal, past: Past, one: int, other: int) -> Past:
    """The past with two of its entries in each other's place."""
    changed: dict[str, Any] = dict(past)
    for slot in growing(deal.contract):
        tensor = as_array(past[slot.past])
        order = list(range(tensor.shape[_at(slot)]))
        order[one], order[other] = order[other], order[one]
        changed[slot.past] = np.take(tensor, order, axis=_at(slot))
    return Past(changed, past.length)


def other_token(deal: Deal, place: int, row: int | slice = slice(None)) -> Deal:
    """The deal with another token at a place of the sequence, in one row or in all."""
    tokens = deal.tokens.copy()
    last = (deal.contract.vocabulary or 2**31) - 1
    tokens[row, place] += np.where(tokens[row, place] < last, 1, -1)
    return replace(deal, tokens=tokens)


def returned(slot: Slot, answer: Answer, first: bool) -> Array:
    """What came back for a slot: after the first step by `filled_by`, later by `present`."""
    return answer.outputs[(slot.filled_by if first else slot.present) or ""].array()


def _at(slot: Slot) -> int:
    return slot.axes.index("past")
