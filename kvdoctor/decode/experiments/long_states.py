"""States that each call returns anew: over many steps, and what is wrong with them.

A state has no entry for each token, but a call over all tokens returns the state that the same tokens in two calls must
return, and the new tokens and the state before them must both change it. An error in it is carried on, and one that
each step amplifies shows only after many. The walk goes token by token; at a few places its logits are those of a call
over all tokens so far, or, where a call takes one token, those of a session without graph optimization, which sums in
another order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.calls import Answer, Array, Asking, Past, Scenario, Value, as_array
from kvdoctor.decode.experiments import Decision, Experiment, Use, as_probe, ask, one_step, undecided
from kvdoctor.decode.experiments.cache_entries import fill_with, read_returned, same_entries
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.parity import measurable
from kvdoctor.decode.runs import Cause

TOKENS = 2000
PLACES, LAST = (16, 125, 250, 500, 1000, TOKENS), (500, 1000, 2000)
"""Tokens after which the walk is compared; lengths at which states are measured, each twice the one before."""
EARLY, MORE = (12, 24, 48), 600
"""The same of a short walk, and the tokens within which a state that grows eightfold by then leaves every type."""
AMPLIFIED = 8.0
"""How much larger a state is after twice as many tokens where each step amplifies it. One that adds up all tokens
doubles, one that adds up what was added up has four times the size."""
MOST_LOGITS = 1 << 26
"""Numbers in the logits of a long call that is made."""


def can_walk(contract: CacheContract) -> str | None:
    """There must be a state, and a graph that takes one token.

    So many tokens need positions: a limit that is declared ends the walk, one that is not may end it anywhere.
    """
    if contract.of_kind("self-attention") and contract.usable_length is None:
        return "the graph has positions as well, and no config says how many"
    if contract.exactness == "dynamic-quantization":
        return "dynamic quantization rounds each split of the tokens in another way"
    if not list_states(contract):
        return "no slot is a recurrent or convolution state"
    fixed = contract.new_tokens
    return None if fixed in (None, 1) else f"the first step takes {fixed} new tokens only"


@Experiment(
    "long-states",
    f"{TOKENS:,} tokens one by one, compared at {len(PLACES)} places",
    Scenario(prompt=1, steps=TOKENS),
    can_walk,
    thorough=True,
    changes_feeds=True,
    use=Use(f"up to {TOKENS:,} tokens in a state", after=("one-token-prompt", "each-length", "long-past")),
    order=37,
)
def long_walk(builder: FeedBuilder) -> Decision:
    """Token by token; logits at a few places as without a cache, and states that do not grow with each step."""
    total, past = builder.scenario.total, None
    second = (yield from _unoptimized(builder)) if builder.contract.new_tokens == 1 else {}
    sizes: dict[int, dict[str, float]] = {}
    for position in range(total):
        stop, call = position + 1, one_step(builder, position, past)
        if stop in PLACES or stop == total:
            if builder.contract.new_tokens is None:
                expected, slots = yield from _whole(builder, stop)
            else:
                expected, slots = second.get(stop), {}
            answer = yield replace(call, expected=expected, slots=slots)
        else:
            answer = yield as_probe(call)
            if answer.failed:
                yield call  # once more, on record
                return None
        past = builder.carry(past, answer, "held")
        if stop in LAST:
            sizes[stop] = _measure(builder.contract, past)
    return _find_amplified(sizes)


@Experiment(
    "growing-states",
    f"{EARLY[-1]} tokens one by one, and up to {MORE} where a state grows with each step",
    Scenario(prompt=1, steps=MORE),
    can_walk,
    shown=False,
    use=Use(f"up to {MORE} tokens in a state", "error"),
    order=37,
)
def short_walk(builder: FeedBuilder) -> Decision:
    """Token by token, until the logits are not finite; only a state that grows by a factor is followed for long."""
    past, sizes = None, dict[int, dict[str, float]]()
    for position in range(builder.scenario.total):
        if position == EARLY[-1] and _find_amplified(sizes) is None:
            return None
        (answer,) = yield from ask(one_step(builder, position, past))
        if not measurable(answer.logits):
            text, grown = f"the logits of a loop are not finite after {position + 1} tokens", _find_amplified(sizes)
            return Cause("non-finite", text) if grown is None else replace(grown, evidence=f"{grown.evidence}; {text}")
        past = builder.carry(past, answer, "held")
        if position + 1 in EARLY:
            sizes[position + 1] = _measure(builder.contract, past)
    return None


def _unoptimized(builder: FeedBuilder) -> Asking[dict[int, Array]]:
    """The logits at the places in a session without graph optimization, up to where that fails."""
    found: dict[int, Array] = {}
    past: Past | None = None
    for position in range(builder.scenario.total):
        answer = yield replace(as_probe(one_step(builder, position, past)), via="off")
        if answer.failed:
            return found
        if position + 1 in PLACES or position + 1 == builder.scenario.total:
            found[position + 1] = answer.logits
        past = builder.carry(past, answer, "held")
    return found


def _whole(builder: FeedBuilder, stop: int) -> Asking[tuple[Array | None, dict[str, Value]]]:
    """The last logits of one call over the first tokens, and its states by the presents that must equal them."""
    if (builder.contract.vocabulary or 1) * stop > MOST_LOGITS:
        return None, {}
    answer = yield as_probe(builder.prefill(stop))
    if answer.failed:
        return None, {}
    return answer.logits[:, -1:], fill_with(list_states(builder.contract), answer)


def list_states(contract: CacheContract) -> tuple[Slot, ...]:
    """The slots that keep a state of fixed size."""
    return (*contract.of_kind("recurrent-state"), *contract.of_kind("conv-state"))


def _measure(contract: CacheContract, past: Past) -> dict[str, float]:
    """The root mean square of each state, by the name of its past."""
    arrays = ((slot.past, as_array(past[slot.past]).astype(np.float64)) for slot in list_states(contract))
    with np.errstate(over="ignore", invalid="ignore"):
        return {name: float(np.sqrt(np.mean(array**2))) for name, array in arrays if array.size}


def _find_amplified(sizes: dict[int, dict[str, float]]) -> Cause | None:
    """A state that is not finite, or that grows by a factor with each step: it will not be finite later."""
    if len(sizes) < len(LAST):
        return None
    lengths = tuple(sizes)
    for name in sizes[lengths[-1]]:
        seen = [sizes[length][name] for length in lengths]
        if not np.isfinite(seen).all():
            first = lengths[int(np.argmin(np.isfinite(seen)))]
            return Cause("non-finite", f"{name} is not finite after {first} tokens")
        if seen[0] and all(later > AMPLIFIED * earlier for earlier, later in pairwise(seen)):
            largest = ", ".join(f"{size:.2g} after {length}" for size, length in zip(seen, lengths, strict=True))
            evidence = f"the largest value of {name} is {largest} tokens"
            return Cause("non-finite", evidence, slot=name)
    return None


def find_no_states(contract: CacheContract) -> str | None:
    """There must be a state, a counter, or hidden states of earlier tokens."""
    if list_states(contract) or contract.of_kind("counter") or contract.of_kind("hidden-memory"):
        return None
    return "no slot keeps a state, a counter or hidden states"


@undecided
def wrong_states(builder: FeedBuilder, start: int, stop: int) -> Decision:
    """Which state is wrong after tokens `start` to `stop` on the state of a prefill, and in what way."""
    # A mask of the entries of a window depends on the number of tokens alone as well.
    counters = [slot for slot in builder.contract.of_kind("counter") if len(slot.shape) < 2]
    states = list_states(builder.contract)
    if find_no_states(builder.contract):
        return None
    first, whole = yield from ask(builder.prefill(start), builder.prefill(stop))
    for slot in counters:
        before, after = (int(read_returned(slot, answer, True).max()) for answer in (first, whole))
        if after - before != stop - start:
            text = f"{slot.filled_by} is {before} after a call of {start} tokens, and {after} after one of {stop}"
            return Cause("present-does-not-grow", text, slot.past)
    past = builder.carry(None, first, "held")
    least = replace(builder, tokens=np.full_like(builder.tokens, builder.tokens.min()))
    fed = builder, builder.with_other_tokens(start), least
    step, *others = yield from ask(*(one.decode(start, stop, past) for one in fed))
    for slot in states:
        if all(is_same_state(slot, step, other) for other in others):
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
        ignores = not answer.failed and is_same_state(slot, step, answer)
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
        others = f"; the states of the layers before layer {slot.layer} are right" if slot.layer else ""
        text = f"{slot.present} after {calls} is not that of one call{others}"
        return Cause("new-entries-wrong", text, slot.past)
    return None


def is_same_state(slot: Slot, one: Answer, other: Answer) -> bool:
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
