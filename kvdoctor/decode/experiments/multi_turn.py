"""What a conversation does to a cache: several tokens after single ones, and steps taken back."""

from collections.abc import Iterator

import numpy as np

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.calls import Past, as_array
from kvdoctor.decode.experiments import Calls, Experiment, Obstacle, Use, first_reason, several_tokens
from kvdoctor.decode.experiments.chunk import BEFORE, SHARED, takes_chunks
from kvdoctor.decode.feeds import FeedBuilder

TURNS = (1, 2, 2)
"""New tokens of the calls after the prefill."""
KEEP_A_COPY = (
    "keep a copy of the cache from before each group of drafts, go back to it, and feed the accepted tokens again"
)
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
    """The first `length` tokens of a past; a buffer of fixed size keeps its size, and what lies behind is not read.

    A counter of tokens is set back by those that are taken back.
    """
    shorter = dict(past)
    for slot in builder.contract.slots:
        tensor = as_array(past[slot.past])
        if slot.growth in ("grow", "shared", "delta") and "past" in slot.axes:
            at = slot.axes.index("past")
            shorter[slot.past] = np.take(tensor, range(min(length, tensor.shape[at])), axis=at)
        elif slot.kind == "counter":
            taken_back = builder.past_length(past) - length
            shorter[slot.past] = np.asarray(tensor - taken_back, tensor.dtype)
    return Past(shorter, length)


def can_be_cut(contract: CacheContract) -> str | None:
    """Every slot must keep its entries apart, and all of them."""
    return first_reason(find_uncut(contract)) or several_tokens(contract)


def find_uncut(contract: CacheContract) -> Iterator[Obstacle]:
    """The slots from which tokens cannot be taken back, grouped by the reason."""
    found: dict[tuple[str, str], list[str]] = {}
    for slot in contract.slots:
        if (why := _why_uncut(slot)) is not None:
            found.setdefault(why, []).append(slot.past)
    for (reason, advice), names in found.items():
        yield Obstacle(tuple(names), reason, advice)


def _why_uncut(slot: Slot) -> tuple[str, str] | None:
    """Why no token can be taken back from a slot, and what a loop may do; None where it keeps an entry for each."""
    if slot.kind in ("cross-attention", "encoder-states", "counter") or slot.growth == "constant":
        return None
    if slot.kind in ("recurrent-state", "conv-state"):
        return "a state has no entry for each token, so none can be taken back", KEEP_A_COPY
    if slot.trimmed or slot.growth == "ring":
        return "it keeps the last tokens only, and those that left do not come back", KEEP_A_COPY
    if slot.growth == "paged":
        return "its blocks belong to the serving engine", "let the serving engine take the tokens back"
    if slot.growth not in ("grow", "shared", "delta", "static"):
        return "it does not keep every token", KEEP_A_COPY
    if slot.carry not in ("feed-back", "append", "write"):
        return "its loop moves the entries", KEEP_A_COPY
    return None


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
        use=Use("steps taken back by cutting the cache", required="speculation", after=("unread-content",)),
        order=7,
    ),
)
