"""Where a wrong entry of a cache comes from: another place, another slot, another graph, or nowhere. numpy only."""

from collections.abc import Generator, Iterable
from dataclasses import replace

import numpy as np

from kvdoctor.calls import Answer, Array, Call, Past, as_array
from kvdoctor.contract import Slot
from kvdoctor.experiments import Decision
from kvdoctor.experiments.rows import alike, growing, other_token, probe, returned, rows
from kvdoctor.experiments.workarounds import has_length
from kvdoctor.feeds import Deal
from kvdoctor.trace import Cause


def new_entry(slot: Slot, step: Answer, start: int) -> Array:
    """The entry that a step added."""
    return _first_layer(slot, rows(slot, returned(slot, step, False), start, start + 1))


def right_entry(slot: Slot, whole: Answer, start: int) -> Array:
    """The entry of the same token in a prefill of the whole sequence."""
    return _first_layer(slot, rows(slot, returned(slot, whole, True), start, start + 1))


def _first_layer(slot: Slot, entries: Array) -> Array:
    """Of a slot that stacks all layers the first, which depends on nothing but the token and its position."""
    return np.take(entries, [0], axis=slot.axes.index("layers")) if "layers" in slot.axes else entries


def where_from(deal: Deal, start: int, slot: Slot, step: Answer, whole: Answer) -> Decision:
    """The first layer's new entry is wrong, which depends on the token and its position alone."""
    exactness, new = deal.contract.exactness, new_entry(slot, step, start)
    place = yield from _place(deal, start, slot, new)
    if place is not None:
        return Cause(
            "positions-not-offset",
            f"the new entry of {slot.present} at position {start} is that of the same token at position {place}",
        )
    for other in growing(deal.contract):
        if other is not slot and alike(new, right_entry(other, whole, start), exactness):
            name = "key-value-swapped" if other.layer == slot.layer else "layers-swapped"
            return Cause(name, f"the new entry of {slot.present} is what a prefill returns as {other.filled_by}")
    if cause := (yield from _no_token(deal, start, slot, step)):
        return cause
    if cause := (yield from _other_first_entry(deal, start, slot)):
        return cause
    return Cause("cached-differs", f"the new entry of {slot.present} is wrong already, in the first layer")


def _place(deal: Deal, start: int, slot: Slot, new: Array) -> "Generator[Call, Answer, int | None]":
    """The position whose entry this is: one token at all positions shows what it would be at each."""
    everywhere = np.repeat(deal.tokens[:, start : start + 1], deal.scenario.total, axis=1)
    answer = yield probe(replace(deal, tokens=everywhere).prefill(deal.scenario.total))
    if answer.failed:
        return None
    entries = _first_layer(slot, returned(slot, answer, True))
    if alike(new, rows(slot, entries, start, start + 1), deal.contract.exactness):
        return None
    places = range(deal.scenario.total)
    return next((p for p in places if alike(new, rows(slot, entries, p, p + 1), deal.contract.exactness)), None)


def _no_token(deal: Deal, start: int, slot: Slot, step: Answer) -> Decision:
    """An entry that is the same whatever the token holds nothing of it."""
    first = yield probe(deal.prefill(start))
    other = other_token(deal, start)
    if first.failed or not slot.present:
        return None
    answer = yield probe(other.decode(start, start + 1, deal.carry(None, first, "held")))
    if answer.failed or not np.array_equal(new_entry(slot, answer, start), new_entry(slot, step, start)):
        return None
    return Cause("present-does-not-grow", f"the new entry of {slot.present} is the same whatever the token is")


def crossed(slot: Slot, slots: Iterable[Slot], step: Answer, past: Past, exactness: str) -> Cause | None:
    """A present that begins with the past of another slot."""
    for other in slots:
        fed = as_array(past[other.past])
        begin = rows(slot, returned(slot, step, False), 0, fed.shape[other.axes.index("past")])
        if other is not slot and fed.any() and alike(begin, fed, exactness):
            name = "key-value-swapped" if other.layer == slot.layer else "layers-swapped"
            return Cause(name, f"{slot.present} begins with the entries that were fed as {other.past}")
    return None


def same_for_two(slots: tuple[Slot, ...], whole: Answer, exactness: str) -> Cause | None:
    """Two slots that a prefill fills with the same entries: one of them holds what belongs to the other."""
    for index, slot in enumerate(slots):
        for other in slots[:index]:
            if alike(returned(slot, whole, True), returned(other, whole, True), exactness):
                name = "key-value-swapped" if other.layer == slot.layer else "layers-swapped"
                return Cause(name, f"a prefill returns the same entries as {other.filled_by} and as {slot.filled_by}")
    return None


def _from_empty(deal: Deal, past: Past, stop: int) -> Call:
    """The first tokens in the graph or branch that takes a past, whose past is empty."""
    emptied = {s.past: deal.placeholder(s, 0) for s in deal.contract.slots if s.growth != "constant"}
    return probe(deal.decode(0, stop, Past({**past, **emptied})))


def _other_first_entry(deal: Deal, start: int, slot: Slot) -> Decision:
    """From an empty past nothing can be wrong with positions: another entry of the first token is other mathematics."""
    if deal.contract.first_step == "empty-past":
        return None
    first = yield probe(deal.prefill(start))
    if first.failed:
        return None
    answer = yield _from_empty(deal, deal.carry(None, first, "held"), 1)
    if answer.failed:
        return None
    ours, theirs = new_entry(slot, answer, 0), right_entry(slot, first, 0)
    if ours.shape != theirs.shape or alike(ours, theirs, deal.contract.exactness):
        return None
    return Cause(
        "branches-disagree",
        f"from an empty past {slot.present} gets another entry for the first token than without a past",
    )


def other_attention(deal: Deal, start: int, past: Past, slot: Slot) -> Decision:
    """A deeper layer adds a wrong entry: do the branches compute different things where no offset is at play?

    Two tokens on an empty past: the second one's entry in a deeper layer rests on the attention of the layers before.
    What it sees is shown by a change of the first token, so that a mask cannot be at fault.
    """
    if deal.contract.first_step == "empty-past":
        return None
    if cause := (yield from _other_first_entry(deal, start, slot)):
        return cause
    if has_length(deal.contract) is not None:
        return None  # it takes one token at a time
    right = yield probe(deal.prefill(2))
    both = yield _from_empty(deal, past, 2)
    changed = yield _from_empty(other_token(deal, 0), past, 2)
    if right.failed or both.failed or changed.failed:
        return None
    exactness, ours = deal.contract.exactness, new_entry(slot, both, 1)
    if alike(ours, right_entry(slot, right, 1), exactness) or alike(ours, new_entry(slot, changed, 1), exactness):
        return None
    return Cause(
        "branches-disagree",
        f"of two tokens on an empty past the second one sees the first, and gets another entry in {slot.present} than "
        "without a past",
    )
