"""Where a wrong entry of a cache comes from: another place, another slot, another graph, or nowhere. numpy only."""

from collections.abc import Generator, Iterable
from dataclasses import replace

import numpy as np

from kvdoctor.contract import Slot
from kvdoctor.decode.calls import Answer, Array, Call, Past, as_array
from kvdoctor.decode.experiments import Decision
from kvdoctor.decode.experiments.cache_entries import (
    as_probe,
    change_token,
    growing,
    read_returned,
    same_entries,
    take_entries,
)
from kvdoctor.decode.experiments.workarounds import has_length
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause
from kvdoctor.decode.tolerances import Tolerance


def new_entry(slot: Slot, step: Answer, start: int) -> Array:
    """The entry that a step added."""
    return _first_layer(slot, take_entries(slot, read_returned(slot, step, False), start, start + 1))


def right_entry(slot: Slot, whole: Answer, start: int) -> Array:
    """The entry of the same token in a prefill of the whole sequence."""
    return _first_layer(slot, take_entries(slot, read_returned(slot, whole, True), start, start + 1))


def _first_layer(slot: Slot, entries: Array) -> Array:
    """Of a slot that stacks all layers the first, which depends on nothing but the token and its position."""
    return np.take(entries, [0], axis=slot.axes.index("layers")) if "layers" in slot.axes else entries


def where_from(builder: FeedBuilder, start: int, slot: Slot, step: Answer, whole: Answer) -> Decision:
    """The first layer's new entry is wrong, which depends on the token and its position alone."""
    limit, new = builder.tolerance, new_entry(slot, step, start)
    place = yield from _place(builder, start, slot, new)
    if place is not None:
        return Cause(
            "positions-not-offset",
            f"the new entry of {slot.present} at position {start} is that of the same token at position {place}",
        )
    for other in growing(builder.contract):
        if other is not slot and same_entries(new, right_entry(other, whole, start), limit):
            name = "key-value-swapped" if other.layer == slot.layer else "layers-swapped"
            return Cause(name, f"the new entry of {slot.present} is what a prefill returns as {other.filled_by}")
    if cause := (yield from _no_token(builder, start, slot, step)):
        return cause
    if cause := (yield from _other_first_entry(builder, start, slot)):
        return cause
    return Cause("new-entries-wrong", f"the new entry of {slot.present} is wrong already, in the first layer")


def _place(builder: FeedBuilder, start: int, slot: Slot, new: Array) -> "Generator[Call, Answer, int | None]":
    """The position whose entry this is: one token at all positions shows what it would be at each."""
    everywhere = np.repeat(builder.tokens[:, start : start + 1], builder.scenario.total, axis=1)
    answer = yield as_probe(replace(builder, tokens=everywhere).prefill(builder.scenario.total))
    if answer.failed:
        return None
    entries = _first_layer(slot, read_returned(slot, answer, True))
    if same_entries(new, take_entries(slot, entries, start, start + 1), builder.tolerance):
        return None
    places = range(builder.scenario.total)
    return next(
        (p for p in places if same_entries(new, take_entries(slot, entries, p, p + 1), builder.tolerance)),
        None,
    )


def _no_token(builder: FeedBuilder, start: int, slot: Slot, step: Answer) -> Decision:
    """An entry that is the same whatever the token holds nothing of it."""
    first = yield as_probe(builder.prefill(start))
    other = change_token(builder, start)
    if first.failed or not slot.present:
        return None
    answer = yield as_probe(other.decode(start, start + 1, builder.carry(None, first, "held")))
    if answer.failed or not np.array_equal(new_entry(slot, answer, start), new_entry(slot, step, start)):
        return None
    return Cause("present-does-not-grow", f"the new entry of {slot.present} is the same whatever the token is")


def crossed(slot: Slot, slots: Iterable[Slot], step: Answer, past: Past, limit: Tolerance) -> Cause | None:
    """A present that begins with the past of another slot."""
    for other in slots:
        fed = as_array(past[other.past])
        begin = take_entries(slot, read_returned(slot, step, False), 0, fed.shape[other.axes.index("past")])
        if other is not slot and fed.any() and same_entries(begin, fed, limit):
            name = "key-value-swapped" if other.layer == slot.layer else "layers-swapped"
            return Cause(name, f"{slot.present} begins with the entries that were fed as {other.past}")
    return None


def same_for_two(slots: tuple[Slot, ...], whole: Answer, limit: Tolerance) -> Cause | None:
    """Two slots that a prefill fills with the same entries: one of them holds what belongs to the other."""
    for index, slot in enumerate(slots):
        for other in slots[:index]:
            if same_entries(read_returned(slot, whole, True), read_returned(other, whole, True), limit):
                name = "key-value-swapped" if other.layer == slot.layer else "layers-swapped"
                return Cause(name, f"a prefill returns the same entries as {other.filled_by} and as {slot.filled_by}")
    return None


def _from_empty(builder: FeedBuilder, past: Past, stop: int) -> Call:
    """The first tokens in the graph or branch that takes a past, whose past is empty."""
    emptied = {s.past: builder.placeholder(s, 0) for s in builder.contract.slots if s.growth != "constant"}
    return as_probe(builder.decode(0, stop, Past({**past, **emptied})))


def _other_first_entry(builder: FeedBuilder, start: int, slot: Slot) -> Decision:
    """From an empty past nothing can be wrong with positions: another entry of the first token is other mathematics."""
    if builder.contract.first_step == "empty-past":
        return None
    first = yield as_probe(builder.prefill(start))
    if first.failed:
        return None
    answer = yield _from_empty(builder, builder.carry(None, first, "held"), 1)
    if answer.failed:
        return None
    ours, theirs = new_entry(slot, answer, 0), right_entry(slot, first, 0)
    if ours.shape != theirs.shape or same_entries(ours, theirs, builder.tolerance):
        return None
    return Cause(
        "branches-disagree",
        f"from an empty past {slot.present} gets another entry for the first token than without a past",
    )


def other_attention(builder: FeedBuilder, start: int, past: Past, slot: Slot) -> Decision:
    """A deeper layer adds a wrong entry: do the branches compute different things where no offset is at play?

    Two tokens on an empty past: the second one's entry in a deeper layer rests on the attention of the layers before.
    What it sees is shown by a change of the first token, so that a mask cannot be at fault.
    """
    if builder.contract.first_step == "empty-past":
        return None
    if cause := (yield from _other_first_entry(builder, start, slot)):
        return cause
    if has_length(builder.contract) is not None:
        return None  # it takes one token at a time
    right = yield as_probe(builder.prefill(2))
    both = yield _from_empty(builder, past, 2)
    changed = yield _from_empty(change_token(builder, 0), past, 2)
    if right.failed or both.failed or changed.failed:
        return None
    limit, ours = builder.tolerance, new_entry(slot, both, 1)
    if same_entries(ours, right_entry(slot, right, 1), limit) or same_entries(ours, new_entry(slot, changed, 1), limit):
        return None
    return Cause(
        "branches-disagree",
        f"of two tokens on an empty past the second one sees the first, and gets another entry in {slot.present} than "
        "without a past",
    )
