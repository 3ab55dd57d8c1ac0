"""Lengths: a past that cannot grow, 5 and 50 tokens with their times, the whole context, all positions."""

import time
from dataclasses import replace

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Array, Asking, Call, Past, Scenario, as_array
from kvdoctor.decode.experiments import Calls, Decision, Experiment, Use, as_probe, several_tokens
from kvdoctor.decode.experiments.cache_entries import by_position, keeps_all, same_entries, take_entries
from kvdoctor.decode.experiments.each_length import FAR_LENGTH, MOST_LOGITS, visited
from kvdoctor.decode.experiments.multi_turn import LAST_ONLY, takes_chunks
from kvdoctor.decode.experiments.why_logits_differ import can_be_looked_into
from kvdoctor.decode.feeds import FeedBuilder, fill_front
from kvdoctor.decode.runs import Cause
from kvdoctor.errors import CannotCheck

STEP_LENGTHS = (5, 50)
"""Tokens so far, the new one included."""


def can_be_filled(contract: CacheContract) -> str | None:
    """The first step must take no past, and as many tokens as the past of the next one has places."""
    fits = contract.frozen_past
    if fits is None:
        return "the past length is not a fixed number"
    if contract.first_step == "empty-past" or contract.new_tokens not in (None, fits):
        return f"the past length is fixed at {fits}, and no first step leaves a past of that length"
    return None


def has_limit(contract: CacheContract) -> str | None:
    """There must be a promise, and one that can be tried."""
    limit = contract.usable_length
    if limit is None:
        return "neither a config nor a buffer limits the length of a sequence"
    if limit <= BEFORE_LIMIT:
        return f"{limit} tokens are declared"
    if limit <= LONGEST:
        return several_tokens(contract)
    sizes = [slot.bytes_per_position() for slot in contract.slots]
    if 3 * limit * sum(size or 0 for size in sizes) > MOST_BYTES:
        return f"{limit} tokens are declared, whose cache takes too much memory; lengths up to {LONGEST} are tried"
    return LAST_ONLY if contract.last_logits_only else takes_chunks(contract)


def is_all_attention(contract: CacheContract) -> str | None:
    """The first layer's keys must rest on the token and its position alone: no state of another kind before them."""
    reason = can_be_looked_into(contract)
    if reason and not (contract.new_tokens == 1 and by_position(contract)):
        return reason
    kinds = {slot.kind for slot in contract.slots}
    first = by_position(contract)[0]
    moves = contract.new_tokens == 1 and first.growth == "ring"
    if kinds - {"self-attention", "cross-attention"} or first.layer != 0 or first.used_as == "value" or moves:
        return "the operations before the first attention are not known"
    return None


@Experiment(
    "long-past",
    "one step after few tokens, and one after many",
    Scenario(prompt=1, steps=50),
    use=Use("up to 50 tokens", "error", after=("each-length",)),
    order=30,
)
def long_past(builder: FeedBuilder) -> Calls:
    """Judge and time the last token of each length both ways; the noise of dynamic quantization leaves no judgment."""
    for length in STEP_LENGTHS:
        if length > builder.scenario.total:
            return
        expected = yield from builder.whole(length)
        exact = builder.contract.exactness != "dynamic-quantization"
        past = yield from builder.begin(expected if exact else None, length - 1)
        step = builder.decode(length - 1, length, past, expected[:, -1:] if exact else None)
        yield step
        yield replace(step, kind="timing", label=f"cached:{length}")
        yield replace(builder.prefill(length), kind="timing", label=f"uncached:{length}")


FROZEN_PAST = "frozen-past"


@Experiment(FROZEN_PAST, "the loop until the past is longer than declared", Scenario(steps=3), can_be_filled, order=1)
def beyond(builder: FeedBuilder) -> Calls:
    """A prefill of as many tokens as the past is long, one step that takes them, and the step after it."""
    fits = builder.contract.frozen_past or 0
    past = yield from builder.begin(stop=fits)
    yield from builder.go_on(past, fits, fits + 2)


LONGEST = 4096
"""Tokens; a reference run of more takes minutes and gigabytes on models that people really use."""
SCORES = 1 << 21
"""New tokens of a chunk times tokens in all: the scores of one head of a layer."""
MOST_BYTES, MOST_SECONDS = 1 << 30, 30.0
"""Of a cache that is filled, a third of what is in memory; of time, after which a context is not filled further."""
BEFORE_LIMIT = 3


@Experiment(
    "full-context",
    "the held loop until the context is full",
    applies=has_limit,
    changes_feeds=True,
    thorough=True,
    use=Use("as many tokens as are declared", required="full-context", after=("long-past",)),
    order=36,
)
def at_limit(builder: FeedBuilder) -> Calls:
    """A prefill of nearly the whole context, and single tokens until it is full."""
    limit = builder.contract.usable_length or 0
    if limit > LONGEST:
        yield from _in_chunks(builder, limit)
        return
    full = builder.resized(limit - BEFORE_LIMIT, limit)
    yield from full.run_through((yield from full.whole()))


def _in_chunks(builder: FeedBuilder, limit: int) -> Calls:
    """The context filled by chunks; its last tokens, one by one, must give what they give in one call.

    Raises:
        CannotCheck: it takes too long.
    """
    start, size, began = limit - BEFORE_LIMIT, max(SCORES // limit, 1), time.monotonic()
    full = builder.resized(start, limit)
    first = min(size, start)
    past = full.carry(None, (yield from _shown_if_it_fails(full.prefill(first))), "held")
    for done in range(first, start, size):
        stop = min(done + size, start)
        past = full.carry(past, (yield from _shown_if_it_fails(full.decode(done, stop, past))), "held")
        if (elapsed := time.monotonic() - began) > MOST_SECONDS:
            raise CannotCheck(f"{stop} of {limit} declared tokens took {elapsed:.0f} s; the others were not tried")
    answer = yield from _shown_if_it_fails(full.decode(start, limit, past))
    yield from full.go_on(past, start, limit, fill_front(answer.logits, limit))


def _shown_if_it_fails(call: Call) -> Asking[Answer]:
    """The answer of one call of many: only one that fails is listed as a step."""
    answer = yield as_probe(call)
    return (yield call) if answer.failed else answer


PLACES, FEWEST = 50, 4
"""Positions that are compared, and those that must differ before some are equal."""
BEYOND, NEAR_LENGTH = 8, 300
"""Tokens after a threshold whose positions are compared; tokens up to which calls are made, however large."""


@Experiment(
    "numbering",
    "whether the model tells all positions apart",
    Scenario(prompt=PLACES - 1, steps=2),
    is_all_attention,
    shown=False,
    order=31,
)
def numbering(builder: FeedBuilder) -> Decision:
    """One token at every place: in the first layer its keys tell the places apart everywhere, or nowhere.

    The places after each threshold of the graph are looked at as well, the far ones where a call is small:
    positions may begin again there, or be rounded. Or entries have no key at all: they were left at zero.
    """
    contract = builder.contract
    few = builder.scenario.total if contract.new_tokens is None else min(PLACES, contract.usable_length or PLACES)
    ends = visited(builder.thresholds, contract.usable_length, FAR_LENGTH, len(builder.thresholds))
    most = NEAR_LENGTH if contract.new_tokens else max(MOST_LOGITS // (contract.vocabulary or MOST_LOGITS), NEAR_LENGTH)
    lengths = [length for length in sorted({few, *(end + BEYOND for end in ends)}) if length <= most]
    # One token a call is one walk to the end.
    for total in lengths if contract.new_tokens is None else lengths[-1:]:
        entries = yield from _entries_of_one_token(builder, total)
        if not entries:
            return None
        slot, zero = by_position(contract)[0], [at for at, entry in enumerate(entries) if not entry.any()]
        if zero and len(zero) < len(entries):
            where = f"{slot.filled_by} of {total} tokens has zeros in the entries {zero[0]} to {zero[-1]}"
            return Cause("wrong-at-lengths", where, slot.past, from_length=total)
        for found in (_find_repeated(entries[:length], builder) for length in lengths if length <= len(entries)):
            if found is not None:
                text = f"one token has the same {slot.filled_by} {found[0]}"
                return Cause("context-limit-fails", text, from_length=found[1])
    return None


def _entries_of_one_token(builder: FeedBuilder, total: int) -> Asking[list[Array]]:
    """The entry of the first layer at each place, where all tokens are the same; none where they are not all there."""
    slot = by_position(builder.contract)[0]
    everywhere = np.repeat(builder.tokens[:, :1], total, axis=1)
    sizes = replace(builder.scenario, steps=total - builder.scenario.prompt + 1)
    same, size = replace(builder, scenario=sizes, tokens=everywhere), builder.contract.new_tokens or total
    past: Past | None = None
    for start in range(0, total, size):
        answer = yield as_probe(same.prefill(size) if past is None else same.decode(start, start + size, past))
        if answer.failed and past is not None:
            total = start  # a table may end
            break
        if answer.failed or (size == total and not keeps_all(slot, answer)):
            return []
        past = same.carry(past, answer, "held")
    keys = as_array((past or Past())[slot.past])
    if keys.shape[slot.length_axis or 0] < total:
        return []
    return [take_entries(slot, keys, (place, place + 1), total) for place in range(total)]


def _find_repeated(entries: list[Array], builder: FeedBuilder) -> tuple[str, int] | None:
    """Where positions no longer differ, as text, and the first: all from a place on, or two of the last come again.

    Positions may well stop at the last row of a table: its rows are a threshold.
    """
    last, limit = len(entries) - 1, builder.tolerance
    same = [same_entries(entry, entries[last], limit) for entry in entries]
    end = same.index(True)
    if FEWEST <= end < last and all(same[end:]):
        return (f"at every position from {end} on", end) if end + 1 not in builder.thresholds else None
    if same_entries(entries[0], entries[1], limit):
        return None  # nowhere do they tell the places apart
    late = range(max(last - BEYOND, FEWEST), last + 1)
    pairs = [
        (one, place) for place in late for one in range(place) if same_entries(entries[one], entries[place], limit)
    ]
    return (f"at the positions {' and '.join(map(str, pairs[0]))}", pairs[0][1]) if len(pairs) > 1 else None
