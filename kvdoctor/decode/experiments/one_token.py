"""Graphs that take one token a call: no call without a cache exists, so other comparisons show what is carried on.

A state that is not read, a token that does not enter a state, tokens that are lost, and numbers that depend on what a
session ran before all repeat themselves: the same tokens a second time give the same logits. Another history must give
others, bit for bit, and another session the same.

Tokens without influence on later logits are a loss, unless the attention has a sliding window that leaves them out. A
window shows in three ways together: at every step the same number of latest tokens counts, the cache still has the
entries of the others, and the graph compares a length with the width of the window. Attention with a window of W tokens
in L layers reaches L * (W - 1) tokens back: each layer sees what the layer below has gathered.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from kvdoctor.contract import CacheContract, PositionRole, Role, Slot, SlotKind
from kvdoctor.decode.calls import Answer, Array, Asking, Call, Past, as_array
from kvdoctor.decode.experiments import Calls, Decision, Experiment, as_probe, ask, one_step, undecided, walk
from kvdoctor.decode.experiments.cache_entries import (
    OTHER_TOKENS,
    by_position,
    change_token,
    find_changed,
    keep_entries,
    list_entries,
    read_returned,
    same_entries,
    same_logits,
    swap_entries,
)
from kvdoctor.decode.experiments.long_states import disturb, find_twins, is_same_state, list_states
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import HISTORY, OWN_SESSION, Cause
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record

KEPT = "one-token.npy"
LOOP, FOLLOWED = 24, 3
"""Tokens of the loop; steps within which noise in a state must reach the logits, by way of a later layer's state."""
STATES: tuple[SlotKind, ...] = ("self-attention", "hidden-memory", "conv-state", "recurrent-state")
"""Slots that each token must enter."""
POSITIONS: tuple[Role, ...] = (*get_args(PositionRole), "token_and_position", "past_length", "last_index")
"""Inputs that tell a step its position."""


def each_row_alone(builder: FeedBuilder, stop: int) -> Asking[Array]:
    """The logits of the first `stop` tokens, float[batch, stop, vocabulary]: each row by itself, token by token."""
    rows: list[Array] = []
    for row in range(builder.scenario.batch):
        alone, past, logits = builder.row(row), None, []
        for position in range(stop):
            answer = yield one_step(alone, position, past)
            logits.append(answer.logits)
            past = alone.carry(past, answer, "held")
        rows.append(np.concatenate(logits, axis=1))
    return np.concatenate(rows, axis=0)


def right_logits(builder: FeedBuilder) -> Asking[Array]:
    """The logits of a reference run; where a call takes one token, of each row by itself."""
    alone = builder.contract.new_tokens is not None
    return (yield from (each_row_alone(builder, builder.scenario.total) if alone else builder.whole()))


def longer(builder: FeedBuilder) -> FeedBuilder:
    """A builder of as many tokens as the loop is run with: what a state adds up to shows after some."""
    return builder.resized(1, max(min(LOOP, builder.contract.usable_length or LOOP), builder.scenario.steps))


def keep_logits(builder: FeedBuilder, logits: Sequence[Array]) -> None:
    """Leave the logits of the first pass for the session that is opened for comparison."""
    if builder.scratch is not None and builder.contract.new_tokens == 1:
        np.save(builder.scratch / KEPT, np.concatenate(logits, axis=1))


def takes_one(contract: CacheContract) -> str | None:
    """Where a call takes several tokens, one without a cache shows more."""
    return None if contract.new_tokens == 1 else "a call without a cache shows more"


def takes_history(contract: CacheContract) -> str | None:
    """Names tell where a loop puts rows that a graph returns alone: after a guess, lost tokens may be its fault."""
    if not contract.has_known_names and any(slot.growth == "delta" for slot in contract.slots):
        return "no names tell where the loop puts the new rows"
    return takes_one(contract)


@Experiment(
    OWN_SESSION,
    "the loop in a process of its own, in turn with a second sequence",
    applies=takes_one,
    one_token=True,
    fresh=True,
    order=97,
)
def own_session(builder: FeedBuilder) -> Calls:
    """The loop in a process of its own, in turn with a second sequence: the same logits as the loop had alone."""
    if builder.scratch is None or not (file := Path(builder.scratch, KEPT)).exists():
        raise CannotCheck("the logits of the loop were not saved")
    expected = np.load(file)
    file.unlink()  # what another run of this process would find is not of its model
    builder = longer(builder)
    if expected.shape[1] < builder.scenario.total:
        raise CannotCheck("the loop did not come to its end")
    other: FeedBuilder | None = replace(builder, tokens=builder.tokens[:, ::-1])
    past = others = None
    for position in range(builder.scenario.total):
        if other is not None:
            between = yield as_probe(one_step(other, position, others))
            other, others = (None, None) if between.failed else (other, other.carry(others, between, "plain"))
        answer = yield one_step(builder, position, past, expected[:, position : position + 1])
        past = builder.carry(past, answer, "plain")


@Experiment(
    HISTORY,
    "whether every state is read and updated by each token, and earlier tokens and their order alone affect the logits",
    applies=takes_history,
    one_token=True,
    order=5,
)
def history(builder: FeedBuilder) -> Decision:
    """Whether each state is read, each token enters it, each earlier token counts, and their order does."""
    pasts, answers = yield from walk(builder, 0, builder.scenario.total)
    if len(answers) < builder.scenario.total:
        raise CannotCheck("the loop does not come to its end")
    return (
        (yield from _twin_slot(builder, pasts, answers))
        or (yield from _unread_slot(builder, pasts, answers))
        or (yield from _slot_without_token(builder, pasts, answers))
        or (yield from _lost_entries(builder, pasts, answers))
        or (yield from _empty_places(builder, pasts, answers))
        or (yield from lost_tokens(builder, pasts, answers))
        or (yield from _order(builder, pasts))
    )


def _twin_slot(builder: FeedBuilder, pasts: Sequence[Past | None], answers: Sequence[Answer]) -> Decision:
    """A slot that is returned like another one, whatever its own past is."""
    before = pasts[-2]
    for slot, twin in find_twins(list_states(builder.contract), answers[-1]):
        changed = disturb(before, slot) if before is not None else None
        if changed is None:
            continue
        answer = yield as_probe(one_step(builder, builder.scenario.total - 1, changed))
        if not answer.failed and any(one == slot for one, _ in find_twins([twin, slot], answer)):
            return Cause("layers-swapped", f"{slot.present} is what the same step returns as {twin.present}", slot.past)
    return None


def _unread_slot(builder: FeedBuilder, pasts: Sequence[Past | None], answers: Sequence[Answer]) -> Decision:
    """A slot in which noise changes no logit of some steps."""
    start = max(builder.scenario.total - FOLLOWED, 1)
    before = pasts[start]
    assert before is not None  # noqa: S101 - a scenario has two steps or more
    for slot in _list_read(builder.contract):
        past = disturb(before, slot)
        if past is not None and not (yield from _differs(builder, start, past, answers)):
            steps = builder.scenario.total - start
            text = f"perturbing all of {slot.past} does not change the logits of the next {steps} steps"
            return Cause("past-ignored", text)
    return None


def _list_read(contract: CacheContract) -> list[Slot]:
    """The slots that a step must read.

    Of memories of hidden states no layer reads the last one, the output of the decoder. Source: NeMo,
    `TransformerDecoder` returns one memory for each layer's input and one for the last layer's output.
    """
    memories = contract.of_kind("hidden-memory")
    unread = {memories[-1].past} if len(memories) > 1 else set()
    kept = [slot for slot in contract.slots if slot.kind not in ("counter", "encoder-states") and not slot.is_given]
    return [slot for slot in kept if slot.past not in unread]


def _differs(builder: FeedBuilder, start: int, past: Past | None, answers: Sequence[Answer]) -> Asking[bool]:
    """Whether the loop goes on from a past with other logits, bit for bit, or fails."""
    for position in range(start, builder.scenario.total):
        answer = yield as_probe(one_step(builder, position, past))
        if answer.failed or not np.array_equal(answer.logits, answers[position].logits, equal_nan=True):
            return True
        past = builder.carry(past, answer, "plain")
    return False


@undecided
def _slot_without_token(builder: FeedBuilder, pasts: Sequence[Past | None], answers: Sequence[Answer]) -> Decision:
    """A slot that comes back the same after another token."""
    last = builder.scenario.total - 1
    slots = [s for s in builder.contract.slots if s.kind in STATES and s.present in answers[last].outputs]
    same = [slot for slot in slots if read_returned(slot, answers[last], False).size]
    other = builder
    for _ in OTHER_TOKENS:
        other = change_token(other, last)
        (answer,) = yield from ask(one_step(other, last, pasts[last]))
        same = [slot for slot in same if is_same_state(slot, answer, answers[last])]
    if not same:
        return None
    names = ", ".join(slot.present or "" for slot in same[:2]) + (f" and {len(same) - 2} more" if len(same) > 2 else "")
    return Cause("present-does-not-grow", f"a step with another token returns the same {names}")


@undecided
def _lost_entries(builder: FeedBuilder, pasts: Sequence[Past | None], answers: Sequence[Answer]) -> Decision:
    """A slot that returns fewer entries than it was fed: noise in one shows in what comes back of it, in any form."""
    slots = [slot for slot in by_position(builder.contract) if slot.growth != "delta" and not slot.trimmed]
    # The entries of a quantized cache may be scaled anew, all of them.
    for slot in slots if all("float" in slot.dtype for slot in slots) else ():
        steps = ((past, step) for past, step in zip(pasts, answers, strict=False) if past is not None)
        past, step = next((one for one in steps if not keep_entries(*list_entries(slot, *one))), (None, None))
        if past is None or step is None:
            continue
        (fed, returned), tensor = list_entries(slot, past, step), as_array(past[slot.past])
        noise = np.random.default_rng(17).standard_normal(tensor.shape)  # as a factor: empty places stay zeros
        noisy = Past({**past, slot.past: np.asarray(tensor * noise, tensor.dtype)}, past.length)
        (other,) = yield from ask(one_step(builder, step.past, noisy))
        changed = (list_entries(slot, past, other)[1] != returned).any(axis=1).sum()
        if changed < min(held := fed.any(axis=1).sum(), len(returned) - 1):
            text = f"noise in the {held} entries of {slot.past} changes {changed} of those of {slot.present}"
            return Cause("present-rewrites-past", text, slot.past)
    return None


@undecided
def _empty_places(builder: FeedBuilder, pasts: Sequence[Past | None], answers: Sequence[Answer]) -> Decision:
    """A step whose logits change with places of its buffers that hold no token, or with the one that it writes."""
    afters = [past for past in pasts if past is not None]
    for position, own in itertools.product(range(len(answers)), (False, True)):
        step = one_step(builder, position, pasts[position])
        feeds = dict(_list_noisy(builder.contract, step, afters[position], own))
        (answer,) = (yield from ask(replace(step, feeds={**step.feeds, **feeds}))) if feeds else (answers[position],)
        if same_logits(answer.logits, answers[position].logits, builder.tolerance):
            continue
        # A graph that adds its entry to the zeros of the place returns another sum.
        returned = builder.carry(pasts[position], answer, "plain")
        if not own or not _first_layer_differs(builder.contract, returned, afters[position]):
            what = "what its own place in the buffers held" if own else "places of the buffers that hold no token"
            return Cause("mask-not-offset", f"the logits at position {position} change with {what}")
    return None


def _list_noisy(contract: CacheContract, step: Call, after: Past, own: bool) -> Iterator[tuple[str, Any]]:
    """Buffers with noise in places of zeros: those that the step writes, or the others."""
    rescaled = contract.exactness == "dynamic-quantization"  # by all places, whether a step attends to them or not
    slots = contract.of_kind("self-attention") if not rescaled else ()
    for slot in (slot for slot in slots if "capacity" in slot.axes and slot.past in step.feeds):
        noisy = as_array(step.feeds[slot.past]).copy()
        places, later = (np.moveaxis(one, slot.length_axis or 0, 0) for one in (noisy, as_array(after[slot.past])))
        empty, left = (~one.reshape(len(one), -1).any(axis=1) for one in (places, later))
        chosen, known = empty & (left != own), empty.sum() == len(places) - step.past
        if noisy.dtype.kind == "f" and known and chosen.any() and not left.all():
            drawn = np.random.default_rng(17).standard_normal(places[chosen].shape)
            places[chosen] = drawn * later[~left].std(dtype=np.float64)
            yield slot.past, noisy


def _order(builder: FeedBuilder, pasts: Sequence[Past | None]) -> Decision:
    """In a decoder of attention alone: the first keys tell positions apart, or the attention tells distances."""
    slot, total = _find_first_keys(builder.contract, builder.scenario.total), builder.scenario.total
    if slot is None:
        return None
    entries: list[Array] = []
    everywhere = replace(builder, tokens=np.repeat(builder.tokens[:, :1], total, axis=1))
    past: Past | None = None
    for place in range(total):
        both = (one_step(one, place, past) for one in (everywhere, change_token(everywhere, place)))
        answer, other = yield from ask(*both)
        returned = read_returned(slot, answer, past is None)
        at = find_changed(slot, returned, read_returned(slot, other, past is None))
        if at is None:
            return None
        entries.append(np.take(returned, at, axis=slot.length_axis))
        past = everywhere.carry(past, answer, "plain")
    same = [place for place in range(1, total) if same_entries(entries[place], entries[place - 1], builder.tolerance)]
    if same and len(same) < total - 1:
        which = f"positions {same[0] - 1} and {same[0]}"
        return Cause("positions-not-offset", f"one token has the same {slot.present} at {which}")
    return (yield from _exchanged(builder, slot, pasts)) if same else None


def _exchanged(builder: FeedBuilder, slot: Slot, pasts: Sequence[Past | None]) -> Decision:
    """Keys without a position: two entries in each other's place must change the logits."""
    last = builder.scenario.total - 1
    one = yield from _find_entry(builder, slot, 0, pasts)
    other = yield from _find_entry(builder, slot, last - 1, pasts)
    past = pasts[last]
    if one is None or other is None or past is None:
        return None
    swapped = swap_entries(past, builder.contract.of_kind("self-attention"), one, other)
    exchanged = builder.decode(last, last + 1, swapped)
    right, answer = yield from ask(builder.decode(last, last + 1, past), exchanged)
    if not same_logits(answer.logits, right.logits, builder.tolerance):
        return None
    if any(builder.contract.graph("decode").port(role) is not None for role in POSITIONS):
        text = "one token has the same keys at every position, and two entries of the past exchanged change no logit"
        return Cause("positions-not-offset", text)
    yield replace(exchanged, expected=right.logits, kind="control", label="an exchange of two entries of the past")
    return None


def _find_entry(builder: FeedBuilder, slot: Slot, place: int, pasts: Sequence[Past | None]) -> Asking[int | None]:
    """Where the past of the last step holds the entry of an earlier token."""
    last, right = builder.scenario.total - 1, pasts[-2]
    walked, answers = yield from walk(change_token(builder, place), place, last, pasts[place])
    past = walked[-1]
    if len(answers) < last - place or past is None or right is None:
        return None
    return find_changed(slot, as_array(past[slot.past]), as_array(right[slot.past]))


def _find_first_keys(contract: CacheContract, tokens: int) -> Slot | None:
    """The keys of the first layer, where they depend on the token and its position alone and none is dropped."""
    slots = [slot for slot in contract.of_kind("self-attention") if slot.length_axis is not None and slot.present]
    if not slots or {slot.kind for slot in contract.slots} - {"self-attention", "cross-attention"}:
        return None
    first = next((slot for slot in slots if "value" not in (slot.used_as, slot.part)), slots[0])
    short = first.trimmed or first.window is not None or (first.size("capacity") or tokens) < tokens
    return first if first.layer == 0 and not short else None


@record
class Influence:
    """The steps whose logits change with a token, and whether the cache of the last step does."""

    steps: frozenset[int]
    is_kept: bool


def lost_tokens(builder: FeedBuilder, pasts: Sequence[Past | None], answers: Sequence[Answer]) -> Decision:
    """Earlier tokens that have no influence on the last logits, as far back as the slots keep them.

    `pasts` and `answers` are those of a loop of one token a step, with its past before each step.
    """
    last, found = builder.scenario.total - 1, {}
    for place in range(max(last - _reach(builder.contract, last), 0), last):
        found[place] = yield from _follow(builder, place, pasts, answers)
    lost = [place for place, influence in found.items() if last not in influence.steps]
    if not lost or _is_window(builder, found):
        return None
    places = ", ".join(map(str, lost))
    text = f"another token at position {places} does not change the logits at position {last}"
    return Cause("present-drops-past", text)


def _follow(
    builder: FeedBuilder, place: int, pasts: Sequence[Past | None], answers: Sequence[Answer]
) -> Asking[Influence]:
    """Decode with other tokens at a position. A step that fails with one of them counts as one that changes."""
    last, steps, kept, other = builder.scenario.total - 1, set[int](), False, builder
    for _ in OTHER_TOKENS:
        other, past = change_token(other, place), pasts[place]
        for position in range(place, last + 1):
            kept = kept or (position == last and _first_layer_differs(builder.contract, past, pasts[last]))
            answer = yield as_probe(one_step(other, position, past))
            if answer.failed:
                return Influence(frozenset({*steps, *range(position, last + 1)}), kept)
            if not np.array_equal(answer.logits, answers[position].logits, equal_nan=True):
                steps.add(position)
            past = other.carry(past, answer, "plain")
        if last in steps:
            break
    return Influence(frozenset(steps), kept)


def _first_layer_differs(contract: CacheContract, one: Past | None, other: Past | None) -> bool:
    """Whether the entries of the first layer differ, of which each rests on its own token alone."""
    if one is None or other is None:
        return False
    slots = contract.of_kind("self-attention")
    first = min((slot.layer for slot in slots if slot.layer is not None), default=None)
    mine = (slot for slot in slots if slot.layer == first)  # or has all layers on one axis
    places = {slot.past: tuple(0 if axis == "layers" else slice(None) for axis in slot.axes) for slot in mine}
    return any(not np.array_equal(as_array(one[past])[at], as_array(other[past])[at]) for past, at in places.items())


def _reach(contract: CacheContract, most: int) -> int:
    """How many tokens back must count: a state forgets, an attention does not within its window and its buffer."""
    slots = [slot for slot in contract.of_kind("self-attention") if not slot.trimmed]
    limits = ((most, *(n - 1 for n in (slot.window, slot.size("capacity")) if n is not None)) for slot in slots)
    return max([1, *map(min, limits)])


def _is_window(builder: FeedBuilder, found: Mapping[int, Influence]) -> bool:
    """Whether the tokens that do not count are those that a sliding window of the graph leaves out."""
    last = builder.scenario.total - 1
    reach = max((last - place for place, one in found.items() if last in one.steps), default=0)
    slides = all(
        one.is_kept and one.steps - {place} == set(range(place + 1, min(place + reach, last) + 1))
        for place, one in found.items()
    )
    slots = builder.contract.of_kind("self-attention")
    layers = max((slot.size("layers") or 0 for slot in slots), default=0) or len({slot.layer for slot in slots})
    # A length is compared with the width as `distance < W`, or as `distance <= W - 1`.
    return slides and any(layers * (number - 1) == reach or layers * number == reach for number in builder.thresholds)
