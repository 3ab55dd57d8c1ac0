"""Several new tokens on top of a cache: chunked prefill, later turns, speculation, and tokens taken back.

Speculative decoding feeds drafts in groups, and cuts the cache to those that were accepted. Each group is the last
token that is certain and two drafts. Of its rows of logits those up to the first wrong draft count; what was fed after
it must leave no trace. Here one draft of the first group is accepted, none of the second, and both of the last.

A graph that takes the same number of several tokens in each call has no step of one token, and its first call is the
one without a cache. But its cache can be cut as well, and the tokens after the cut fed again.
"""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.calls import Answer, Array, Call, Past, Scenario, as_array
from kvdoctor.decode.experiments import (
    Calls,
    Decision,
    Experiment,
    Obstacle,
    Use,
    as_probe,
    ask,
    first_reason,
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
from kvdoctor.errors import CannotCheck

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


PAIR = 2
"""New tokens of the second turn."""
KEEP_A_COPY = (
    "keep a copy of the cache from before each group of drafts, go back to it, and feed the accepted tokens again"
)
INTO_PROMPT = 1
"""Tokens of the prompt that are taken back as well: they came with others in one call."""


def find_obstacles(contract: CacheContract) -> Iterator[Obstacle]:
    """What stands in the way: missing rows of logits, and slots from which no token can be taken back."""
    if contract.last_logits_only:
        logits = contract.graph("decode").port("logits")
        yield Obstacle(
            (logits.name if logits else "logits",),
            "a call with several new tokens returns the logits of the last one alone, so no draft can be checked",
            "export again with the logits of every new token",
        )
    yield from find_uncut(contract)


@Experiment(
    "second-turn",
    f"a single token, then {PAIR} at once, on a past of {BEFORE} with batch 2",
    replace(SHARED, batch=2),
    takes_chunks,
    use=Use(
        "several new tokens after a single one in a batch of 2",
        required="chunked-prefill",
        after=("chunk", "batch", "batch-rows"),
    ),
    order=7,
)
def second_turn(builder: FeedBuilder) -> Calls:
    """A pair of tokens on a cache that was decoded into before.

    GroupQueryAttention of onnxruntime takes several tokens on a past in batch 1 alone: then the first row goes on.
    """
    expected, start = (yield from builder.whole()), builder.scenario.prompt + 1
    past = yield from builder.begin(expected)
    _, past = yield from builder.go_on(past, start - 1, start, expected)
    together = yield as_probe(builder.decode(start, start + PAIR, past))
    if together.failed and builder.scenario.batch > 1:
        past, expected = builder.reorder_past(past, (0,)), expected[builder.logits_rows((0,))]
        builder = builder.row(0)
    yield builder.decode(start, start + PAIR, past, expected[:, start : start + PAIR])
    yield from builder.controls(start, start + PAIR, past, expected)


@Experiment(
    "rewind",
    "two tokens decoded, removed from the cache with the end of the prompt, and replaced by others",
    applies=lambda contract: first_reason(find_uncut(contract)) or several_tokens(contract),
    use=Use("steps taken back by cutting the cache", required="speculation", after=("unread-content",)),
    order=7,
)
def rewind(builder: FeedBuilder) -> Calls:
    """Two other tokens are decoded and taken back with the end of the prompt; then the sequence goes on."""
    expected = yield from builder.whole()
    start = builder.scenario.prompt
    stop, past = start + 2, (yield from builder.begin(expected))
    _, past = yield from builder.with_other_tokens(start).go_on(past, start, stop)
    if not any(slot.prepended for slot in builder.contract.slots):  # whose prompt may stand in either order
        start = max(start - INTO_PROMPT, 1)
    before, _ = yield from builder.go_on(cut(builder, past, start), start, stop, expected)
    yield from builder.controls(stop - 1, stop, before, expected)


def cut(builder: FeedBuilder, past: Past, length: int) -> Past:
    """The first `length` tokens of a past; a buffer of fixed size keeps its size, and the rest is not read.

    A counter of tokens is set back by those that are taken back. What a graph puts in front of the past is cut there.

    Raises:
        CannotCheck: entries come before the past, and those of one call are to be divided.
    """
    shorter, positions = dict(past), past.newest_first()
    ends = {sum(past.calls[:at]) for at in range(len(past.calls) + 1)}
    for slot in builder.contract.slots:
        tensor = as_array(past[slot.past])
        if slot.growth in ("grow", "shared", "delta") and "past" in slot.axes:
            at = slot.axes.index("past")
            order = positions if slot.prepended else np.arange(tensor.shape[at])
            if order.size != tensor.shape[at] or (slot.prepended and length not in ends):
                raise CannotCheck(f"which entries of {slot.past!r} belong to which token is not known")
            shorter[slot.past] = np.take(tensor, np.flatnonzero(order < length), axis=at)
        elif slot.kind == "counter":
            taken_back = builder.past_length(past) - length
            shorter[slot.past] = np.asarray(tensor - taken_back, tensor.dtype)
    starts = (sum(past.calls[:at]) for at in range(len(past.calls)))
    calls = (min(count, length - start) for start, count in zip(starts, past.calls, strict=True) if start < length)
    return Past(shorter, length, tuple(calls))


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
    counts = slot.kind == "counter" and len(slot.shape) < 2
    if counts or slot.kind in ("cross-attention", "encoder-states") or slot.growth == "constant":
        return None
    if slot.kind in ("recurrent-state", "conv-state", "counter"):
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


DRAFTS, ACCEPTED = 2, (1, 0, 2)
"""Drafts of a group, and how many of them are accepted, group by group."""
FAILING_ALIKE = ("chunk", "second-turn", "rewind", "unread-content", "chunks-near-thresholds")


@Experiment(
    "speculation",
    f"{DRAFTS} drafts with each token, of which {', '.join(map(str, ACCEPTED))} are accepted",
    SHARED,
    lambda contract: first_reason(find_obstacles(contract)) or takes_chunks(contract),
    thorough=True,
    use=Use(
        "drafts in groups, of which some are taken back",
        required="speculation",
        after=FAILING_ALIKE,
        needed=True,
        obstacles=find_obstacles,
    ),
    order=24,
)
def speculate(builder: FeedBuilder) -> Calls:
    """Groups of drafts on a prompt: each row must give what one call over the same tokens without a cache gives."""
    expected = yield from builder.whole()
    start, total = builder.scenario.prompt, builder.scenario.total
    past = yield from builder.begin(expected)
    for accepted in ACCEPTED:
        before, group, stop = past, builder, min(start + 1 + DRAFTS, total)
        kept = min(start + 1 + accepted, stop)
        if kept < stop:
            group = builder.with_other_tokens(kept)
        wanted = expected if group is builder else (yield from group.whole())
        _, past = yield from group.go_on(past, start, stop, wanted, size=1 + DRAFTS)
        past, start = cut(builder, past, kept), kept
        if start >= total:
            break
    yield from group.controls(stop - 1 - DRAFTS, stop, before, wanted)


MOST_CUTS = 16
"""Lengths to which the cache of the first call is cut: all of a short call, spread ones of a long one."""
LATER, LEAST = 3, 16
"""Calls after the first one, and the fewest tokens of them all."""


def drives(contract: CacheContract) -> str | None:
    """Why a graph of a fixed number of tokens above 1 cannot be compared with its own first call; None where it can."""
    first, later = contract.new_tokens, contract.step_tokens
    if first is None or first == 1:
        return "a call takes any number of tokens, or one"
    if contract.frozen_past is not None:
        return f"the past length is fixed at {contract.frozen_past}"
    if later is not None and later > first:
        return f"the first step takes {first} new tokens, and a later one {later}"
    limit = contract.usable_length
    if limit is not None and first + (later or 1) > limit:
        return f"its calls of {first} tokens leave no room for another one in {limit} tokens"
    # From windows of fixed size tokens can be cut before they are full.
    windows = {
        slot.past for slot in contract.slots if (slot.growth, slot.carry, slot.first) == ("ring", "feed-back", "zeros")
    }
    return first_reason(one for one in find_uncut(contract) if not windows.issuperset(one.names))


def count_tokens(contract: CacheContract) -> int:
    """The tokens of a sequence of calls."""
    later = contract.step_tokens or 1
    return (contract.new_tokens or 1) + max(LATER, -(-LEAST // later)) * later


def overlapping(builder: FeedBuilder) -> Calls:
    """The first call again in parts: its first tokens from the cache, the others fed; then later calls, split twice.

    Those that the first call took together must have the same logits with a part of them in the cache. Later calls are
    compared with the same tokens after a cut by one, so that each token is computed by two splits.

    Raises:
        CannotCheck: the calls do not return the logits of each token, or a cache cannot be cut.
    """
    size, later = builder.contract.new_tokens or 1, builder.contract.step_tokens or 1
    answer = yield builder.prefill(size)
    if answer.logits.shape[1] != size:
        raise CannotCheck(f"a call of {size} tokens returns {answer.logits.shape[1]} rows of logits")
    logits, past, start = answer.logits, builder.carry(None, answer, "plain"), size
    step: Call | None = None
    while start + later <= builder.scenario.total:
        answer = yield as_probe(builder.decode(start, start + later, past))
        if answer.failed:
            yield builder.decode(start, start + later, past)  # shown as a step, which fails
            return
        logits = np.concatenate([logits, answer.logits], axis=1)
        # From long to short; the call after a cut ends within what is known: the first two calls.
        spread = np.unique(np.linspace(1, size - 1, min(size - 1, MOST_CUTS)).round().astype(int))[::-1]
        for length in spread.tolist() if start == size else (start - 1,):
            shorter = cut_windows(builder, past, length)
            stop = length + later
            step = builder.decode(length, stop, shorter, logits[:, length:stop])
            yield step
            last = (length, stop, shorter)
        past, start = builder.carry(past, answer, "plain"), start + later
    if step is None:
        raise CannotCheck("a sequence has no room for a second call")
    yield from builder.controls(*last, logits)


def cut_windows(builder: FeedBuilder, past: Past, length: int) -> Past:
    """The first `length` tokens of a past; of a window that is not full, too, whose empty rows are zeros.

    Raises:
        CannotCheck: the rows of a window are neither at its start nor at its end.
    """
    shorter, held = cut(builder, past, length), builder.past_length(past)
    for slot in builder.contract.slots:
        if slot.growth == "ring" and slot.length_axis is not None:
            shorter[slot.past] = _cut_window(slot, as_array(past[slot.past]), held, length)
    return shorter


def _cut_window(slot: Slot, rows: Array, held: int, length: int) -> Array:
    """A window with its first `length` tokens of `held`, which stand at its start or at its end."""
    at = slot.length_axis or 0
    size, others = rows.shape[at], tuple(axis for axis in range(rows.ndim) if axis != at)
    (filled,) = np.nonzero(rows.any(axis=others))
    kept = np.zeros_like(rows)
    if np.array_equal(filled, np.arange(size - held, size)):
        source, target = range(size - held, size - held + length), range(size - length, size)
    elif np.array_equal(filled, np.arange(held)):
        source, target = range(length), range(length)
    else:
        raise CannotCheck(f"where {slot.past!r} has the rows of its {held} tokens is not known")
    np.moveaxis(kept, at, 0)[list(target)] = np.moveaxis(rows, at, 0)[list(source)]
    return kept
