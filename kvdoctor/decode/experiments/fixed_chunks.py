"""Graphs that take the same number of several tokens in each call: the first call is the one without a cache.

No call takes fewer tokens, so there is no step of one token. But the cache of a call can be cut, and the tokens after
the cut fed again: those that the first call took together must have the same logits there, with a part of them in the
cache. Later calls are compared with the same tokens after a cut by one, so that each token is computed by two splits.
"""

import numpy as np

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.calls import Array, Call, Past, as_array
from kvdoctor.decode.experiments import Calls, first_reason
from kvdoctor.decode.experiments.cache_entries import as_probe
from kvdoctor.decode.experiments.multi_turn import cut, find_uncut
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.errors import CannotCheck

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
