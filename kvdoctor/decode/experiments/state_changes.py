"""What is wrong with states that each call returns anew: recurrent and convolution states, and counters of tokens.

A state has no entry for each token. But a call over all tokens returns the state that the same tokens in two calls must
return, and the new tokens and the state before them must both change it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.calls import Answer, Past, as_array
from kvdoctor.decode.experiments import Decision
from kvdoctor.decode.experiments.cache_entries import as_probe, read_returned, same_entries
from kvdoctor.decode.experiments.long_states import list_states
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause


def find_no_states(contract: CacheContract) -> str | None:
    """There must be a state, a counter, or hidden states of earlier tokens."""
    if list_states(contract) or contract.of_kind("counter") or contract.of_kind("hidden-memory"):
        return None
    return "no slot keeps a state, a counter or hidden states"


def wrong_states(builder: FeedBuilder, start: int, stop: int) -> Decision:
    """Which state is wrong after tokens `start` to `stop` on the state of a prefill, and in what way."""
    counters, states = _list_counters(builder.contract), list_states(builder.contract)
    if find_no_states(builder.contract):
        return None
    first, whole = (yield as_probe(builder.prefill(start))), (yield as_probe(builder.prefill(stop)))
    if first.failed or whole.failed:
        return None
    for slot in counters:
        before, after = (int(read_returned(slot, answer, True).max()) for answer in (first, whole))
        if after - before != stop - start:
            text = f"{slot.filled_by} is {before} after a call of {start} tokens, and {after} after one of {stop}"
            return Cause("present-does-not-grow", text, slot.past)
    past = builder.carry(None, first, "held")
    step = yield as_probe(builder.decode(start, stop, past))
    least = replace(builder, tokens=np.full_like(builder.tokens, builder.tokens.min()))
    one = yield as_probe(builder.with_other_tokens(start).decode(start, stop, past))
    others = one, (yield as_probe(least.decode(start, stop, past)))
    if step.failed or any(other.failed for other in others):
        return None
    for slot in states:
        if all(_same(slot, step, other) for other in others):
            text = f"{slot.present} is the same after other tokens on the same past"
            return Cause("present-does-not-grow", text, slot.past)
    for slot, twin in find_twins(states, step):
        return Cause("layers-swapped", f"{slot.present} is what the same step returns as {twin.present}", slot.past)
    return (yield from _departed(builder, (start, stop), past, (step, whole)))


def _departed(builder: FeedBuilder, span: tuple[int, int], past: Past, answers: tuple[Answer, Answer]) -> Decision:
    """The first state that is another after two calls than after one over the same tokens."""
    step, whole = answers
    contract, lossy = builder.contract, list[Slot]()
    slots = (*contract.of_kind("counter"), *list_states(contract), *contract.of_kind("hidden-memory"))
    for slot in sorted(slots, key=lambda slot: slot.layer or 0):
        made, right = read_returned(slot, step, False), read_returned(slot, whole, True)
        if made.shape != right.shape:
            continue  # a window that the other call filled further
        answer = yield as_probe(builder.decode(*span, disturb(past, slot) or past))
        ignores = not answer.failed and _same(slot, step, answer)
        if same_entries(made, right, builder.tolerance):
            lossy += [slot] if ignores else []  # of a shift by one token the state is the new token
            continue
        before = (one for one in lossy if (one.layer or 0) < (slot.layer or 0))
        if ignores and not any((slot.kind, slot.shape) == (one.kind, one.shape) for one in before):
            if all(np.array_equal(value.array(), step.outputs[name].array()) for name, value in answer.outputs.items()):
                return Cause("cache-misread", f"no output of a step depends on {slot.past}", slot.past)
            text = f"{slot.present} does not depend on {slot.past}, and one call over all tokens returns another"
            return Cause("present-drops-past", text, slot.past)
        calls = f"a call of {span[1] - span[0]} tokens on those of {span[0]}"
        text = f"{slot.present} after {calls} is not that of one call; the states of the layers before it are right"
        return Cause("new-entries-wrong", text, slot.past)
    return None


def _list_counters(contract: CacheContract) -> list[Slot]:
    """The slots that hold a number of tokens; a mask of the entries of a window depends on it alone as well."""
    return [slot for slot in contract.of_kind("counter") if len(slot.shape) < 2]


def _same(slot: Slot, one: Answer, other: Answer) -> bool:
    """Whether two calls return the same state, bit for bit."""
    states = read_returned(slot, one, False), read_returned(slot, other, False)
    return np.array_equal(*states, equal_nan=states[0].dtype.kind == "f")


def find_twins(states: Sequence[Slot], step: Answer) -> Iterator[tuple[Slot, Slot]]:
    """States of two layers that are the same numbers; what is constant is left out."""
    for at, slot in enumerate(states):
        mine = read_returned(slot, step, False)
        for twin in states[:at]:
            if mine.dtype.kind == "f" and np.ptp(mine) and np.array_equal(mine, read_returned(twin, step, False)):
                yield slot, twin


def disturb(past: Past, slot: Slot) -> Past | None:
    """The past with noise in all of a slot, as wide as its values, or with other integers; None where it is empty."""
    held = as_array(past[slot.past])
    if not held.size:
        return None
    noise = np.random.default_rng(17).standard_normal(held.shape) * max(float(np.std(held, dtype=np.float64)), 1e-3)
    changed = held + noise if held.dtype.kind == "f" else np.flip(held) + held.dtype.type(1)
    return Past({**past, slot.past: np.asarray(changed, held.dtype)}, past.length)
