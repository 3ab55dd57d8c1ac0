"""Several new tokens on top of a cache: chunked prefill, a second turn, speculation."""

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Array, Past, Scenario
from kvdoctor.decode.experiments import Calls, Decision, Experiment, Use, several_tokens
from kvdoctor.decode.experiments.cache_entries import (
    add_noise,
    as_probe,
    by_position,
    can_be_copied,
    change_token,
    keeps_all,
    same_entries,
    same_logits,
)
from kvdoctor.decode.experiments.causes import can_be_looked_into
from kvdoctor.decode.experiments.entry_origins import other_position, pieces_of
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause

CHUNK = 3
BEFORE = 5
"""Tokens in the cache before: more than the state of a convolution holds, which a shorter prompt may leave short."""
SHARED = Scenario(prompt=BEFORE, steps=Scenario().total - BEFORE + 1)
"""The sequence of the loops, so that the reference run is shared with them."""


def chunk(builder: FeedBuilder) -> Calls:
    """A prompt of 5 tokens, 3 more, and what is left of the sequence."""
    expected = yield from builder.whole()
    start = builder.scenario.prompt
    answer = yield builder.prefill(start, expected[:, :start])
    past = builder.carry(None, answer, "held")
    while start < builder.scenario.total:
        before, new = past, min(CHUNK, builder.scenario.total - start)
        answer = yield builder.decode(start, start + new, past, expected[:, start : start + new])
        past = builder.carry(past, answer, "held")
        start += new
    yield from builder.controls(start - new, start, before, expected)


def why_chunk(builder: FeedBuilder) -> Decision:
    """What the first of 3 new tokens attends to: all of the past, and nothing behind itself."""
    start, limit = builder.scenario.prompt, builder.tolerance
    answer = yield as_probe(builder.prefill(start))
    if answer.failed:
        return None
    past = builder.carry(None, answer, "held")
    if builder.past_length(past) != start or not can_be_copied(builder.contract, past):
        return None  # what the lengths say has checks of its own
    base = yield as_probe(builder.decode(start, start + CHUNK, past))
    if base.failed:
        return None
    expected = yield from builder.whole()
    if cause := _moved_logits(base.logits, expected[:, start : start + CHUNK], builder):
        return cause
    if cause := (yield from _wrong_entries(builder, base)):
        return cause
    other = yield as_probe(builder.with_other_tokens(start + 1).decode(start, start + CHUNK, past))
    if not other.failed and not same_logits(other.logits[:, :1], base.logits[:, :1], limit):
        return Cause(
            "mask-not-offset",
            f"of {CHUNK} new tokens on a past of {start}, the first one's logits change with the tokens after it",
        )
    for place in range(start):
        answer = yield as_probe(builder.decode(start, start + CHUNK, add_noise(builder, past, [place])))
        if not answer.failed and same_logits(answer.logits[:, :1], base.logits[:, :1], limit):
            return Cause(
                "mask-not-offset",
                f"of {CHUNK} new tokens on a past of {start}, the first one does not see entry {place} of the past",
            )
    return (yield from _blind_to_new(builder, past, base))


def _moved_logits(made: Array, right: Array, builder: FeedBuilder) -> Cause | None:
    """Logits of a new token that are the right ones of another: what each token attends to cannot be told from them."""
    for one, other in ((i, j) for i in range(CHUNK) for j in range(CHUNK) if i != j):
        if same_logits(made[:, one : one + 1], right[:, other : other + 1], builder.tolerance):
            return Cause("cache-misread", f"new token {one} of {CHUNK} gets the logits of new token {other}")
    return None


def _wrong_entries(builder: FeedBuilder, base: Answer) -> Decision:
    """Entries of the first layer rest on the token and its position alone: no mask makes them wrong."""
    start, total = builder.scenario.prompt, builder.scenario.total
    whole = yield as_probe(builder.prefill(total))
    if whole.failed:
        return None
    whole_slots = [slot for slot in by_position(builder.contract) if keeps_all(slot, whole)]
    pieces = pieces_of(whole_slots, whole)
    for piece in (piece for piece in pieces if piece.layer == pieces[0].layer):
        for place in range(start, start + CHUNK):
            if same_entries(piece.new_entry(base, place), piece.right_entry(whole, place), builder.tolerance):
                continue
            return (yield from other_position(builder, place, piece, base)) or Cause(
                "new-entries-wrong",
                f"{CHUNK} new tokens on a past of {start} get another entry at {place} of {piece.present}",
            )
    return None


def _blind_to_new(builder: FeedBuilder, past: Past, base: Answer) -> Decision:
    """Each new token must see the new ones before it."""
    start = builder.scenario.prompt
    for place in range(CHUNK - 1):
        answer = yield as_probe(change_token(builder, start + place).decode(start, start + CHUNK, past))
        after = slice(place + 1, place + 2)
        if not answer.failed and same_logits(answer.logits[:, after], base.logits[:, after], builder.tolerance):
            return Cause(
                "mask-not-offset",
                f"of {CHUNK} new tokens on a past of {start}, number {place + 1} does not see the one before it",
            )
    return None


def takes_chunks(contract: CacheContract) -> str | None:
    """The decode graph must take several new tokens, and return what each of them gives."""
    if contract.last_logits_only:
        return "a call with several new tokens gives the logits of the last one alone"
    ids = contract.graph("decode").port("token_ids")
    if ids is not None and ids.shape and isinstance(ids.shape[-1], int):
        return f"a decode step takes {ids.shape[-1]} new token{'s' * (ids.shape[-1] > 1)} only"
    kept = [slot for slot in contract.slots if slot.kind == "self-attention"]
    if not kept:
        return "no slot keeps tokens"
    if any(slot.carry in ("drop-oldest", "extend") for slot in kept):
        return "its loop moves the cache by one token a step"
    return several_tokens(contract)


EXPERIMENTS = (
    Experiment(
        "chunk",
        f"{CHUNK} new tokens at once on top of a cache",
        chunk,
        SHARED,
        takes_chunks,
        use=Use("several new tokens on top of a cache", required="chunked-prefill"),
        order=5,
    ),
    Experiment(
        "why-chunk",
        "what the first of several new tokens attends to",
        why_chunk,
        SHARED,
        can_be_looked_into,
        judged=False,
        shown=False,
        explains=("chunk",),
        order=41,
    ),
)
