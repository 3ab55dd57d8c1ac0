"""What a conversation does to a cache: several tokens after single ones, and steps taken back."""

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Past, as_array
from kvdoctor.decode.experiments import Calls, Experiment, Use, several_tokens
from kvdoctor.decode.experiments.chunk import BEFORE, SHARED, takes_chunks
from kvdoctor.decode.feeds import FeedBuilder

TURNS = (1, 2, 2)
"""New tokens of the calls after the prefill."""
INTO_PROMPT = 1
"""Tokens of the prompt that are taken back as well: they came with others in one call."""


def second_turn(builder: FeedBuilder) -> Calls:
    """Single tokens and pairs of them in turn, on a cache that was decoded into before."""
    expected = yield from builder.whole()
    start = builder.scenario.prompt
    answer = yield builder.prefill(start, expected[:, :start])
    past = builder.carry(None, answer, "held")
    for new in TURNS:
        before, stop = past, start + new
        answer = yield builder.decode(start, stop, past, expected[:, start:stop])
        past, start = builder.carry(past, answer, "held"), stop
    yield from builder.controls(stop - new, stop, before, expected)


def rewind(builder: FeedBuilder) -> Calls:
    """Two other tokens are decoded and taken back with the end of the prompt; then the sequence goes on."""
    expected = yield from builder.whole()
    start = builder.scenario.prompt
    answer = yield builder.prefill(start, expected[:, :start])
    past = builder.carry(None, answer, "held")
    astray = builder.with_other_tokens(start)
    for position in (start, start + 1):
        answer = yield astray.decode(position, position + 1, past)
        past = builder.carry(past, answer, "held")
    start = max(start - INTO_PROMPT, 1)
    past = cut(builder, past, start)
    for position in range(start, builder.scenario.prompt + 2):
        before = past
        answer = yield builder.decode(position, position + 1, past, expected[:, position : position + 1])
        past = builder.carry(past, answer, "held")
    yield from builder.controls(position, position + 1, before, expected)


def cut(builder: FeedBuilder, past: Past, length: int) -> Past:
    """The first `length` tokens of a past; a buffer of fixed size keeps its size, and what lies behind is not read."""
    shorter = dict(past)
    for slot in builder.contract.slots:
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
        use=Use("several new tokens after single ones", required="chunked-prefill", after=("chunk",)),
        order=7,
    ),
    Experiment(
        "rewind",
        "two tokens decoded, removed from the cache with the end of the prompt, and replaced by others",
        rewind,
        applies=can_be_cut,
        use=Use("steps taken back by cutting the cache"),
        order=7,
    ),
)
