"""What a conversation does to a cache: several tokens after single ones, and steps taken back."""

import numpy as np

from kvdoctor.calls import Past, as_array
from kvdoctor.contract import CacheContract
from kvdoctor.experiments import Calls, Experiment, several_tokens
from kvdoctor.experiments.chunk import BEFORE, SHARED, takes_chunks
from kvdoctor.feeds import Deal

TURNS = (1, 2, 2)
"""New tokens of the calls after the prefill."""


def second_turn(deal: Deal) -> Calls:
    """Single tokens and pairs of them in turn, on a cache that was decoded into before."""
    expected = yield from deal.whole()
    start = deal.scenario.prompt
    answer = yield deal.prefill(start, expected[:, :start])
    past = deal.carry(None, answer, "held")
    for new in TURNS:
        before, stop = past, start + new
        answer = yield deal.decode(start, stop, past, expected[:, start:stop])
        past, start = deal.carry(past, answer, "held"), stop
    yield from deal.controls(stop - new, stop, before, expected)


def rewind(deal: Deal) -> Calls:
    """Two other tokens are decoded and taken back, by cutting the cache; then the sequence goes on."""
    expected = yield from deal.whole()
    start = deal.scenario.prompt
    answer = yield deal.prefill(start, expected[:, :start])
    past = deal.carry(None, answer, "held")
    astray = deal.elsewhere(start)
    for position in (start, start + 1):
        answer = yield astray.decode(position, position + 1, past)
        past = deal.carry(past, answer, "held")
    past = cut(deal, past, start)
    for position in (start, start + 1):
        before = past
        answer = yield deal.decode(position, position + 1, past, expected[:, position : position + 1])
        past = deal.carry(past, answer, "held")
    yield from deal.controls(position, position + 1, before, expected)


def cut(deal: Deal, past: Past, length: int) -> Past:
    """The first `length` tokens of a past; a buffer of fixed size keeps its size, and what lies behind is not read."""
    shorter = dict(past)
    for slot in deal.contract.slots:
        if slot.growth in ("grow", "shared", "delta") and "past" in slot.axes:
            at = slot.axes.index("past")
            tensor = as_array(past[slot.past])
            shorter[slot.past] = np.take(tensor, range(min(length, tensor.shape[at])), axis=at)
    return Past(shorter, length)


def can_be_cut(contract: CacheContract) -> str | None:
    """Every slot must keep its entries apart, and all of them."""
    for slot in contract.slots:
        if slot.kind == "cross-attention" or slot.growth == "constant":
            continue
        if slot.growth not in ("grow", "shared", "delta", "static") or slot.trimmed or slot.window is not None:
            return f"{slot.past} cannot be cut back: it does not keep every token"
        if slot.carry not in ("feed-back", "append", "write"):
            return f"{slot.past} cannot be cut back: its loop moves the entries"
    return several_tokens(contract)


EXPERIMENTS = (
    Experiment(
        "second-turn",
        f"single tokens and pairs in turn on a past of {BEFORE} and more",
        second_turn,
        SHARED,
        takes_chunks,
        order=7,
    ),
    Experiment(
        "rewind",
        "two tokens decoded, taken back, and others put in their place",
        rewind,
        applies=can_be_cut,
        order=7,
    ),
)
