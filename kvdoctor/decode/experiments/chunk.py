"""Several new tokens on top of a cache: chunked prefill, a second turn, speculation."""

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Array, Past, Scenario
from kvdoctor.decode.experiments import (
    Calls,
    Decision,
    Experiment,
    Use,
    as_probe,
    ask,
    prefill,
    several_tokens,
    undecided,
    unjudged,
)
from kvdoctor.decode.experiments.cache_entries import (
    add_loud_noise,
    add_noise,
    by_position,
    can_be_copied,
    change_token,
    keeps_all,
    other_position,
    pieces_of,
    same_entries,
    same_logits,
)
from kvdoctor.decode.experiments.long_states import wrong_states
from kvdoctor.decode.experiments.why_logits_differ import has_content
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause

CHUNK = 3
BEFORE = 5
"""Tokens in the cache before: more than the state of a convolution holds, which a shorter prompt may leave short."""
SHARED = Scenario(prompt=BEFORE, steps=Scenario().total - BEFORE + 1)
"""The sequence of the loops, so that the reference run is shared with them."""

LAST_ONLY = "a call with several new tokens gives the logits of the last one alone"


def takes_chunks(contract: CacheContract) -> str | None:
    """The decode graph must take several new tokens."""
    ids = contract.graph("decode").port("token_ids")
    if ids is not None and (fixed := ids.size("new")) is not None:
        return f"a decode step takes {fixed} new token{'s' * (fixed > 1)} only"
    if any(slot.carry in ("drop-oldest", "extend") for slot in contract.of_kind("self-attention")):
        return "its loop moves the cache by one token a step"
    return several_tokens(contract)


@Experiment(
    "chunk",
    f"{CHUNK} new tokens at once on top of a cache",
    SHARED,
    takes_chunks,
    use=Use("several new tokens on top of a cache", required="chunked-prefill"),
    order=5,
)
def chunk(builder: FeedBuilder) -> Calls:
    """A prompt of 5 tokens, 3 more, and what is left of the sequence."""
    expected = yield from builder.whole()
    start, total = builder.scenario.prompt, builder.scenario.total
    before = yield from builder.run_through(expected, size=CHUNK)
    yield from builder.controls(total - 1 - (total - start - 1) % CHUNK, total, before, expected)


@unjudged(
    "why-chunk", "what the first of several new tokens attends to", SHARED, has_content, explains=("chunk",), order=41
)
def why_chunk(builder: FeedBuilder) -> Decision:
    """What the first of 3 new tokens attends to: all of the past, and no later token."""
    start = builder.scenario.prompt
    state = yield from wrong_states(builder, start, start + CHUNK)
    if state is not None or not by_position(builder.contract):
        return state
    _, past = yield from prefill(builder, start)
    if builder.past_length(past) != start or not can_be_copied(builder.contract, past):
        return None  # what the lengths say has checks of its own
    (base,) = yield from ask(builder.decode(start, start + CHUNK, past))
    expected = yield from builder.whole()
    if not builder.returns_ids and (cause := _moved_logits(base.logits, expected[:, start : start + CHUNK], builder)):
        return cause  # two tokens may have the same likeliest one
    if cause := (yield from _wrong_entries(builder, base)):
        return cause
    if builder.contract.last_logits_only:  # those of the first one are not returned
        return None
    return (yield from _seen_by_first(builder, past, base)) or (yield from _blind_to_new(builder, past, base))


def _seen_by_first(builder: FeedBuilder, past: Past, base: Answer) -> Decision:
    """The first new token must see all of the past, and no later token."""
    start, limit = builder.scenario.prompt, builder.tolerance
    other = yield as_probe(builder.with_other_tokens(start + 1).decode(start, start + CHUNK, past))
    if not other.failed and not same_logits(other.logits[:, :1], base.logits[:, :1], limit):
        return _misses(start, "the first one's logits change with the tokens after it")
    for place in range(start):
        loud = add_loud_noise(builder, past, [place], by_position(builder.contract))
        for noisy in (add_noise(builder, past, [place]), loud):
            answer = yield as_probe(builder.decode(start, start + CHUNK, noisy))
            if answer.failed or not same_logits(answer.logits[:, :1], base.logits[:, :1], limit):
                break
        else:
            return _misses(start, f"the first one does not see entry {place} of the past")
    return None


def _misses(start: int, what: str) -> Cause:
    return Cause("mask-not-offset", f"of {CHUNK} new tokens on a past of {start}, {what}")


def _moved_logits(made: Array, right: Array, builder: FeedBuilder) -> Cause | None:
    """Whether logits are correct but at the wrong position: they do not show what each token attends to."""
    for one, other in ((i, j) for i in range(CHUNK) for j in range(CHUNK) if i != j):
        if same_logits(made[:, one : one + 1], right[:, other : other + 1], builder.tolerance):
            return Cause("cache-misread", f"new token {one} of {CHUNK} gets the logits of new token {other}")
    return None


@undecided
def _wrong_entries(builder: FeedBuilder, base: Answer) -> Decision:
    """Entries of the first layer rest on the token and its position alone: no mask makes them wrong."""
    start, total = builder.scenario.prompt, builder.scenario.total
    (whole,) = yield from ask(builder.prefill(total))
    pieces = pieces_of((slot for slot in by_position(builder.contract) if keeps_all(slot, whole)), whole)
    for piece in (piece for piece in pieces if piece.layer == pieces[0].layer):
        for place in range(start, start + CHUNK):
            if not same_entries(piece.new_entry(base, place), piece.right_entry(whole, place), builder.tolerance):
                text = f"{CHUNK} new tokens on a past of {start} get a different entry at {place} of {piece.present}"
                return (yield from other_position(builder, place, piece, base)) or Cause("new-entries-wrong", text)
    return None


def _blind_to_new(builder: FeedBuilder, past: Past, base: Answer) -> Decision:
    """Each new token must see the new ones before it."""
    start = builder.scenario.prompt
    for place in range(CHUNK - 1):
        answer = yield as_probe(change_token(builder, start + place).decode(start, start + CHUNK, past))
        after = slice(place + 1, place + 2)
        if not answer.failed and same_logits(answer.logits[:, after], base.logits[:, after], builder.tolerance):
            return _misses(start, f"number {place + 1} does not see the one before it")
    return None
