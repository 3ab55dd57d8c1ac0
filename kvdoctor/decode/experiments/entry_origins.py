"""Where a wrong entry of a cache comes from: another place, another slot, another graph, or nowhere. numpy only."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from kvdoctor.contract import Axis, Slot
from kvdoctor.decode.calls import Answer, Array, Call, Past, as_array
from kvdoctor.decode.experiments import Decision, cache_entries
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause
from kvdoctor.decode.tolerances import Tolerance
from kvdoctor.records import record


@record
class Piece:
    """The keys or the values of one layer: a slot, or a part of one that holds several.

    `at` are the indexes into the axes of layers and of parts, where the slot has them.
    """

    slot: Slot
    layer: int | None
    at: tuple[tuple[Axis, int], ...] = ()

    @property
    def present(self) -> str:
        """The output, with the layer and the part where it holds several."""
        return (self.slot.present or "") + self._within

    @property
    def filled_by(self) -> str:
        """The output that first fills it."""
        return (self.slot.filled_by or "") + self._within

    @property
    def _within(self) -> str:
        words = {"layers": "layer", "parts": "part"}
        return f" ({', '.join(f'{words[axis]} {index}' for axis, index in self.at)})" if self.at else ""

    def of(self, entries: Array) -> Array:
        """This piece of the entries of its slot."""
        for axis, index in self.at:
            entries = np.take(entries, [index], axis=self.slot.axes.index(axis))
        return entries

    def new_entry(self, step: Answer, start: int) -> Array:
        """The entry that a step added."""
        return self.of(cache_entries.take_returned(self.slot, step, False, start, start + 1))

    def right_entry(self, whole: Answer, start: int, stop: int | None = None) -> Array:
        """The entry of the same token in a prefill of the whole sequence, or the entries up to another."""
        return self.of(cache_entries.take_returned(self.slot, whole, True, start, stop or start + 1))


def pieces_of(slots: Iterable[Slot], answer: Answer, first: bool = True) -> tuple[Piece, ...]:
    """The keys and values of each layer, by the shapes that came back, in the order of the layers."""
    found = []
    for slot in slots:
        shape = cache_entries.read_returned(slot, answer, first).shape
        axes: list[Axis] = [axis for axis in ("layers", "parts") if axis in slot.axes]
        for indexes in np.ndindex(*(shape[slot.axes.index(axis)] for axis in axes)):
            at = tuple(zip(axes, indexes, strict=True))
            found.append(Piece(slot, dict(at).get("layers", slot.layer), at))
    return tuple(found)


def where_from(builder: FeedBuilder, start: int, piece: Piece, step: Answer, whole: Answer) -> Decision:
    """The first layer's new entry is wrong, which depends on the token and its position alone."""
    if cause := (yield from _no_token(builder, start, piece, step)):
        return cause  # an entry without its token has no position
    if cause := (yield from other_position(builder, start, piece, step)):
        return cause
    if cause := of_another(builder, start, piece, step, whole):
        return cause
    if cause := (yield from _other_first_entry(builder, start, piece)):
        return cause
    return Cause("new-entries-wrong", f"the new entry of {piece.present} is wrong in the first layer already")


def of_another(builder: FeedBuilder, start: int, piece: Piece, step: Answer, whole: Answer) -> Cause | None:
    """A new entry that is the right one of another layer, or of the other part of the same one."""
    new = piece.new_entry(step, start)
    for other in pieces_of(cache_entries.by_position(builder.contract), whole):
        if other != piece and cache_entries.same_entries(new, other.right_entry(whole, start), builder.tolerance):
            name = _swapped(piece, other)
            return Cause(name, f"the new entry of {piece.present} is what a prefill returns as {other.filled_by}")
    return None


def _swapped(one: Piece, other: Piece) -> str:
    """The name of two pieces in each other's place: those of one part are of two layers, whatever their numbers."""
    parts = (one.slot.part, one.at) != (other.slot.part, other.at)
    return "key-value-swapped" if one.layer == other.layer and parts else "layers-swapped"


def other_position(builder: FeedBuilder, start: int, piece: Piece, step: Answer) -> Decision:
    """A new entry that is the one of its token at another position.

    One token at all positions shows what its entry would be at each.
    """
    new = piece.new_entry(step, start)
    everywhere = np.repeat(builder.tokens[:, start : start + 1], builder.scenario.total, axis=1)
    answer = yield cache_entries.as_probe(replace(builder, tokens=everywhere).prefill(builder.scenario.total))
    if answer.failed or cache_entries.same_entries(new, piece.right_entry(answer, start), builder.tolerance):
        return None
    for place in range(builder.scenario.total):
        if cache_entries.same_entries(new, piece.right_entry(answer, place), builder.tolerance):
            return Cause(
                "positions-not-offset",
                f"the new entry of {piece.present} at position {start} is that of the same token at position {place}",
            )
    return None


def _no_token(builder: FeedBuilder, start: int, piece: Piece, step: Answer) -> Decision:
    """An entry that is the same whatever the token holds nothing of it."""
    first = yield cache_entries.as_probe(builder.prefill(start))
    if first.failed or not piece.slot.present:
        return None
    past, right = builder.carry(None, first, "held"), piece.new_entry(step, start)
    for token in (None, builder.tokens.min(), builder.tokens.max()):
        other = cache_entries.change_token(builder, start)
        if token is not None:
            other.tokens[:, start] = token
        answer = yield cache_entries.as_probe(other.decode(start, start + 1, past))
        if answer.failed or not np.array_equal(piece.new_entry(answer, start), right):
            return None
    is_scale = (piece.slot.part or "").endswith("scale")  # then the entries themselves are there, with a wrong one
    name = "new-entries-wrong" if is_scale else "present-does-not-grow"
    return Cause(name, f"the entry of {piece.present} at the new position is the same whatever the token is")


def other_prefill(builder: FeedBuilder, start: int, first: Answer, whole: Answer) -> Cause | None:
    """Entries that a prefill fills the cache with, and that one of more tokens returns otherwise.

    No later token changes the keys and values of an earlier one, in any layer: one of the two prefills is wrong.
    """
    for piece in pieces_of(cache_entries.by_position(builder.contract), whole):
        if not (cache_entries.keeps_all(piece.slot, first) and cache_entries.keeps_all(piece.slot, whole)):
            continue
        ours, theirs = piece.right_entry(first, 0, start), piece.right_entry(whole, 0, start)
        if ours.shape != theirs.shape or cache_entries.same_entries(ours, theirs, builder.tolerance):
            continue
        return Cause(
            "new-entries-wrong",
            f"a prefill of {start} tokens returns different entries in {piece.filled_by} than one of more tokens",
        )
    return None


def crossed(slot: Slot, slots: Iterable[Slot], step: Answer, past: Past, limit: Tolerance) -> Cause | None:
    """A present that begins with the past of another slot."""
    for other in slots:
        fed = cache_entries.take_entries(other, as_array(past[other.past]), (0, step.past), step.past)
        begin = cache_entries.take_returned(slot, step, False, 0, step.past)
        if other is not slot and fed.any() and cache_entries.same_entries(begin, fed, limit):
            name = _swapped(Piece(slot, slot.layer), Piece(other, other.layer))
            return Cause(name, f"{slot.present} begins with the entries that were fed as {other.past}")
    return None


def same_for_two(slots: tuple[Slot, ...], whole: Answer, limit: Tolerance) -> Cause | None:
    """Two slots that a prefill fills with the same entries: one of them holds what belongs to the other."""
    pieces = pieces_of(slots, whole)
    entries = [piece.of(cache_entries.read_returned(piece.slot, whole, True)) for piece in pieces]
    for index, piece in enumerate(pieces):
        for other in range(index):
            if cache_entries.same_entries(entries[index], entries[other], limit):
                mine, theirs = piece.filled_by, pieces[other].filled_by
                name = _swapped(piece, pieces[other])
                return Cause(name, f"a prefill returns the same entries as {theirs} and as {mine}")
    return None


def from_empty(builder: FeedBuilder, past: Past, stop: int) -> Call:
    """The first tokens in the graph or branch that takes a past, whose past is empty."""
    emptied = {s.past: builder.placeholder(s, 0) for s in builder.contract.slots if s.growth != "constant"}
    return cache_entries.as_probe(builder.decode(0, stop, Past({**past, **emptied})))


def _other_first_entry(builder: FeedBuilder, start: int, piece: Piece) -> Decision:
    """From an empty past nothing can be wrong with positions: another entry of the first token is other mathematics.

    Where the logits of two tokens are right, the attention has used the right entry, and another one leaves the graph.
    """
    if builder.contract.first_step == "empty-past":
        return None
    first = yield cache_entries.as_probe(builder.prefill(start))
    if first.failed:
        return None
    past = builder.carry(None, first, "held")
    answer = yield from_empty(builder, past, 1)
    if answer.failed:
        return None
    ours, theirs = piece.new_entry(answer, 0), piece.right_entry(first, 0)
    if ours.shape != theirs.shape or cache_entries.same_entries(ours, theirs, builder.tolerance):
        return None
    if cache_entries.has_length(builder.contract) is None and not builder.contract.last_logits_only:
        right, both = (yield cache_entries.as_probe(builder.prefill(2))), (yield from_empty(builder, past, 2))
        if (
            not right.failed
            and not both.failed
            and cache_entries.same_logits(both.logits, right.logits, builder.tolerance)
        ):
            return Cause(
                "new-entries-wrong",
                f"from an empty past two tokens get the logits that they get without a past, and the first one gets "
                f"a different entry in {piece.present}: the attention uses other entries than those returned",
            )
    return Cause(
        "branches-disagree",
        f"from an empty past {piece.present} gets a different entry for the first token than without a past",
    )


def other_attention(builder: FeedBuilder, start: int, past: Past, piece: Piece) -> Decision:
    """A deeper layer adds a wrong entry: do the branches compute different things where no offset is at play?

    Two tokens on an empty past: the second one's entry in a deeper layer rests on the attention of the layers before.
    What it sees is shown by a change of the first token, so that a mask cannot be at fault.
    """
    if builder.contract.first_step == "empty-past":
        return None
    if cause := (yield from _other_first_entry(builder, start, piece)):
        return cause
    if cache_entries.has_length(builder.contract) is not None:
        return None  # it takes one token at a time
    right = yield cache_entries.as_probe(builder.prefill(2))
    both = yield from_empty(builder, past, 2)
    changed = yield from_empty(cache_entries.change_token(builder, 0), past, 2)
    if right.failed or both.failed or changed.failed:
        return None
    limit, ours = builder.tolerance, piece.new_entry(both, 1)
    if cache_entries.same_entries(ours, piece.right_entry(right, 1), limit) or cache_entries.same_entries(
        ours, piece.new_entry(changed, 1), limit
    ):
        return None
    return Cause(
        "branches-disagree",
        f"of two tokens on an empty past the second one sees the first, and gets a different entry in {piece.present} "
        "than without a past",
    )
