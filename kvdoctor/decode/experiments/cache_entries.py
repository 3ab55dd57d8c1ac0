"""Entries of a cache, token by token: to compare and change them, and where a wrong one comes from. numpy only."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from kvdoctor.contract import Axis, CacheContract, Slot
from kvdoctor.decode.calls import Answer, Array, Call, Past, Value, as_array
from kvdoctor.decode.experiments import Decision, as_probe, ask, grows, prefill, several_tokens, undecided
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.parity import compare, judge
from kvdoctor.decode.runs import Cause
from kvdoctor.decode.tolerances import Tolerance
from kvdoctor.records import record

MOST_NUMBERS, OTHER_TOKENS = 1 << 24, (1, 2)
"""Numbers in all caches that are copied; distances to ids that replace one: hardly three rows in a row are equal."""
LOUD = 1e3
"""Standard deviations of noise in values by which a weight of 1e-9 shows; float16 holds it."""


def growing(contract: CacheContract) -> tuple[Slot, ...]:
    """Self-attention slots that grow at their end and come back whole, in the order of their layers."""
    found = (s for s in contract.of_kind("self-attention") if s.growth in ("grow", "shared") and s.carry == "feed-back")
    return tuple(slot for slot in found if "past" in slot.axes and slot.present is not None and not slot.prepended)


def by_position(contract: CacheContract) -> tuple[Slot, ...]:
    """Self-attention slots in which each token has an entry at its position, in the order of their layers.

    Besides those that come back longer: caches to which the loop appends what comes back, and buffers of fixed size.
    A ring is one until it is full.
    """
    whole = {slot.past for slot in growing(contract)}
    buffer = ("feed-back", "capacity")
    carried = {"delta": ("append", "past"), "static": buffer, "ring": buffer}
    found = ((s, carried.get(s.growth)) for s in contract.of_kind("self-attention") if s.present is not None)
    return tuple(s for s, way in found if s.past in whole or (way and s.carry == way[0] and way[1] in s.axes))


def keeps_all(slot: Slot, prefill: Answer) -> bool:
    """Whether a slot has an entry for each token of a prefill, each at its position: a window drops the oldest."""
    if slot.growth == "ring" and (slot.size("capacity") or 0) < prefill.new:
        return False
    may_drop = slot.trimmed or slot.window is not None
    return not may_drop or read_returned(slot, prefill, True).shape[_at(slot)] == prefill.new


def fill_with(slots: Iterable[Slot], whole: Answer) -> dict[str, Value]:
    """What the presents of a last step must be, by name: what one call over the same tokens fills the slots with."""
    pairs = ((slot.present or "", slot.filled_by or "") for slot in slots)
    return {present: whole.outputs[made] for present, made in pairs if made in whole.outputs}


def has_length(contract: CacheContract) -> str | None:
    """Loops that go wrong by the length of the past need one: a buffer of fixed size shows nothing of it."""
    ids = contract.graph("decode").port("token_ids")
    if ids is not None and ids.shape and isinstance(ids.shape[-1], int):
        return f"a decode step takes {ids.shape[-1]} new token{'s' * (ids.shape[-1] > 1)} only"
    return several_tokens(contract) or grows(contract)


def can_be_copied(contract: CacheContract, past: Past) -> bool:
    """Whether the caches are small enough to be copied for each of many calls: buffers have the length of a context."""
    shapes = (past[slot.past].shape for slot in by_position(contract))
    return sum(math.prod(shape) for shape in shapes) <= MOST_NUMBERS


def take_entries(slot: Slot, tensor: Array, span: tuple[int, int], tokens: int) -> Array:
    """Entries of the positions from the first of a span to before the second, of a slot that holds so many tokens."""
    first, size = _first_place(slot, tensor, tokens), tensor.shape[_at(slot)]
    return np.take(tensor, range(first + span[0], min(first + span[1], size)), axis=_at(slot))


def _first_place(slot: Slot, tensor: Array, tokens: int) -> int:
    """Where the entry of the first token is: a window that new entries are shifted into has zeros before it."""
    empty = tensor.shape[_at(slot)] - tokens
    shifted = slot.growth == "ring" and empty > 0 and not np.take(tensor, range(empty), axis=_at(slot)).any()
    return empty if shifted else 0


def same_entries(one: Array, other: Array, limit: Tolerance) -> bool:
    """Whether entries are the same but for rounding, as a fraction of their standard deviation."""
    if one.shape != other.shape:
        return False
    got, want = one.astype(np.float64), other.astype(np.float64)
    if np.array_equal(got, want, equal_nan=True):
        return True  # what is not finite has no distance, but may well be the same
    return bool(np.abs(got - want).max(initial=0.0) <= limit.passes * max(float(want.std()), 1e-12))


def same_logits(one: Array, other: Array, limit: Tolerance) -> bool:
    """Whether logits are the same but for rounding."""
    return one.shape == other.shape and judge(compare(one, other, limit), limit) == "pass"


def add_noise(
    builder: FeedBuilder, past: Past, places: Iterable[int], slots: Iterable[Slot] | None = None, factor: float = 1.0
) -> Past:
    """The past with noise in some of its entries, in every slot that grows or in those given."""
    changed: dict[str, Any] = dict(past)
    rng = np.random.default_rng(11)
    places = list(places)
    for slot in by_position(builder.contract) if slots is None else slots:
        tensor = as_array(past[slot.past]).copy()
        first = _first_place(slot, tensor, builder.past_length(past))
        for place in (first + place for place in places if first + place < tensor.shape[_at(slot)]):
            index: list[Any] = [slice(None)] * tensor.ndim
            index[_at(slot)] = place
            noise = rng.standard_normal(tensor[tuple(index)].shape) * max(float(tensor.std()), 1e-3) * factor
            tensor[tuple(index)] = noise.astype(tensor.dtype)
        changed[slot.past] = tensor
    return Past(changed, past.length)


def add_loud_noise(builder: FeedBuilder, past: Past, places: Iterable[int], slots: Iterable[Slot]) -> Past:
    """The past with large values in some entries, which a small weight shows, and a mask hides."""
    values = [slot for slot in slots if slot.used_as == "value" and "float" in slot.dtype]
    return add_noise(builder, past, places, values, LOUD)


def swap_entries(past: Past, slots: Iterable[Slot], one: int, other: int) -> Past:
    """The past with two entries of some slots in each other's place; a past that is too short stays as it is."""
    changed = Past(past, past.length)
    for slot in slots:
        tensor, at = as_array(past[slot.past]), slot.length_axis
        if at is not None and tensor.shape[at] > max(one, other):
            order = np.arange(tensor.shape[at])
            order[[one, other]] = other, one
            changed[slot.past] = np.take(tensor, order, axis=at)
    return changed


def change_token(builder: FeedBuilder, place: int) -> FeedBuilder:
    """A builder with another token at a position of the sequence, in all rows."""
    tokens = builder.tokens.copy()
    last = (builder.contract.vocabulary or 2**31) - 1
    tokens[:, place] += np.where(tokens[:, place] < last, 1, -1)
    return replace(builder, tokens=tokens)


def find_changed(slot: Slot, one: Array, other: Array) -> int | None:
    """The one entry in which two caches of a slot differ; None where it is not one."""
    at = slot.length_axis
    if at is None or one.shape != other.shape:
        return None
    axes = tuple(axis for axis in range(one.ndim) if axis != at)
    (found,) = np.nonzero((one != other).any(axis=axes))
    return int(found[0]) if len(found) == 1 else None


def list_entries(slot: Slot, past: Past, step: Answer) -> tuple[Array, Array]:
    """What a step was fed for a slot, and what it returned, float[size, numbers]: a row for each entry."""
    pair = as_array(past[slot.past]), read_returned(slot, step, False)
    fed, returned = (np.moveaxis(one, _at(slot), 0) for one in pair)
    return fed.reshape(len(fed), -1), returned.reshape(len(returned), -1)


def keep_entries(fed: Array, returned: Array) -> bool:
    """Whether all entries float[size, numbers] come back, moved or rotated at most, with a new one; integers may.

    Those that are not in their place are matched by sorted norms: a buffer may have many thousands.
    """
    both = min(len(fed), len(returned))
    in_place = np.flatnonzero((fed[:both] == returned[:both]).all(axis=1))
    moved = (np.delete(rows, in_place, axis=0).astype(np.float64) for rows in (fed, returned))
    before, after = (np.linalg.norm(rows, axis=1) for rows in moved)
    lost, makes_place = (before != 0) & ~_among(after, before), len(fed) == len(returned) and fed.any(axis=1).all()
    whole = lost.sum() <= makes_place and _among(before, after).sum() >= len(after) - 1
    return fed.dtype.kind != "f" or bool(whole)


def _among(norms: Array, sought: Array) -> Array:
    """Which of the norms sought, float[sought], are within a hundredth of one of some norms."""
    norms = np.sort(np.append(norms, np.nan))
    after = np.searchsorted(norms, sought)  # the one before the first is the last, which is close to none
    return np.asarray(np.isclose(norms[[after - 1, after]], sought, rtol=1e-2).any(axis=0))


def read_returned(slot: Slot, answer: Answer, first: bool) -> Array:
    """What came back for a slot: after the first step by `filled_by`, later by `present`."""
    return answer.outputs[(slot.filled_by if first else slot.present) or ""].array()


def take_returned(slot: Slot, answer: Answer, first: bool, start: int, stop: int) -> Array:
    """Entries of the positions start to stop of what came back for a slot, without those that did not.

    It may be the new ones alone, or the last ones.
    """
    returned = read_returned(slot, answer, first)
    before = max(answer.past + answer.new - returned.shape[_at(slot)], 0)
    return take_entries(slot, returned, (max(start - before, 0), max(stop - before, 0)), answer.past + answer.new)


def _at(slot: Slot) -> int:
    at = slot.length_axis
    assert at is not None, f"{slot.past} has entries"  # noqa: S101 - only slots whose entries are counted come here
    return at


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
    def fed_as(self) -> str:
        """The input, likewise."""
        return self.slot.past + self._within

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
        return self.of(take_returned(self.slot, step, False, start, start + 1))

    def right_entry(self, whole: Answer, start: int, stop: int | None = None) -> Array:
        """The entry of the same token in a prefill of the whole sequence, or the entries up to another."""
        return self.of(take_returned(self.slot, whole, True, start, stop or start + 1))


def pieces_of(slots: Iterable[Slot], answer: Answer, first: bool = True) -> tuple[Piece, ...]:
    """The keys and values of each layer, by the shapes that came back, in the order of the layers."""
    found = []
    for slot in slots:
        shape = read_returned(slot, answer, first).shape
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
    for other in pieces_of(by_position(builder.contract), whole):
        if other != piece and same_entries(new, other.right_entry(whole, start), builder.tolerance):
            name = _swapped(piece, other)
            return Cause(name, f"the new entry of {piece.present} is what a prefill returns as {other.filled_by}")
    return None


def _swapped(one: Piece, other: Piece) -> str:
    """The name of two pieces in each other's place: those of one part are of two layers, whatever their numbers."""
    parts = (one.slot.part, one.at) != (other.slot.part, other.at)
    return "key-value-swapped" if one.layer == other.layer and parts else "layers-swapped"


@undecided
def other_position(builder: FeedBuilder, start: int, piece: Piece, step: Answer) -> Decision:
    """A new entry that is the one of its token at another position.

    One token at all positions shows what its entry would be at each.
    """
    new = piece.new_entry(step, start)
    everywhere = np.repeat(builder.tokens[:, start : start + 1], builder.scenario.total, axis=1)
    (answer,) = yield from ask(replace(builder, tokens=everywhere).prefill(builder.scenario.total))
    if same_entries(new, piece.right_entry(answer, start), builder.tolerance):
        return None
    for place in range(builder.scenario.total):
        if same_entries(new, piece.right_entry(answer, place), builder.tolerance):
            text = f"the new entry of {piece.present} at position {start} is that of the same token at position {place}"
            return Cause("positions-not-offset", text)
    return None


@undecided
def _no_token(builder: FeedBuilder, start: int, piece: Piece, step: Answer) -> Decision:
    """An entry that is the same whatever the token holds nothing of it."""
    _, past = yield from prefill(builder, start)
    if not piece.slot.present:
        return None
    right = piece.new_entry(step, start)
    for token in (None, builder.tokens.min(), builder.tokens.max()):
        other = change_token(builder, start)
        if token is not None:
            other.tokens[:, start] = token
        (answer,) = yield from ask(other.decode(start, start + 1, past))
        if not np.array_equal(piece.new_entry(answer, start), right):
            return None
    is_scale = (piece.slot.part or "").endswith("scale")  # then the entries themselves are there, with a wrong one
    name = "new-entries-wrong" if is_scale else "present-does-not-grow"
    return Cause(name, f"the entry of {piece.present} at the new position is the same whatever the token is")


def other_prefill(builder: FeedBuilder, start: int, first: Answer, whole: Answer) -> Decision:
    """Entries that a prefill fills the cache with, and that one of more tokens returns otherwise.

    No later token changes the keys and values of an earlier one, in any layer: one of the two prefills is wrong. Where
    those of the first layer are the same, and the logits are not, later tokens change them, or their number does.
    """
    compared = [*compare_prefills(builder, start, first, whole)]
    wrong = next((piece for piece, same in compared if not same), None)
    rests_on_others = compared and (wrong is None or wrong.layer != compared[0][0].layer)
    ours, theirs = first.logits, whole.logits[:, : first.logits.shape[1]]
    comparable = not builder.contract.last_logits_only and ours.shape == theirs.shape
    if rests_on_others and comparable and not same_logits(ours, theirs, builder.tolerance):
        text, tokens = f"without a cache, {start} tokens get other logits where more tokens follow them", builder.tokens
        for other in (tokens.min(), tokens.max()):
            changed = np.concatenate([tokens[:, :start], np.full_like(tokens[:, start:], other)], axis=1)
            answer = yield as_probe(replace(builder, tokens=changed).prefill(whole.new))
            if answer.failed or not same_logits(answer.logits[:, :start], theirs, builder.tolerance):
                return Cause("not-causal", text)
        return Cause("wrong-at-lengths", f"{text}, whichever tokens these are")
    if wrong is None:
        return None
    text = f"a prefill of {start} tokens returns different entries in {wrong.filled_by} than one of more tokens"
    return Cause("new-entries-wrong", text)


def compare_prefills(builder: FeedBuilder, start: int, first: Answer, whole: Answer) -> Iterator[tuple[Piece, bool]]:
    """Yield the keys and values of each layer, and whether two prefills return the same ones of the first tokens."""
    slots = [slot for slot in by_position(builder.contract) if slot.filled_by in first.outputs.keys() & whole.outputs]
    for piece in pieces_of(slots, whole):
        if keeps_all(piece.slot, first) and keeps_all(piece.slot, whole):
            ours, theirs = piece.right_entry(first, 0, start), piece.right_entry(whole, 0, start)
            if ours.shape == theirs.shape:
                yield piece, same_entries(ours, theirs, builder.tolerance)


def crossed(slot: Slot, slots: Iterable[Slot], step: Answer, past: Past, limit: Tolerance) -> Cause | None:
    """A present, or a layer or part of one, that begins with the past of another."""
    begins, pieces = take_returned(slot, step, False, 0, step.past), pieces_of(slots, step, first=False)
    fed = [p.of(take_entries(p.slot, as_array(past[p.slot.past]), (0, step.past), step.past)) for p in pieces]
    for piece, own in zip(pieces, fed, strict=True):
        begin = piece.of(begins) if piece.slot is slot else own
        if same_entries(begin, own, limit):
            continue
        for other, entries in zip(pieces, fed, strict=True):
            if entries.any() and same_entries(begin, entries, limit):
                text = f"{piece.present} begins with the entries that were fed as {other.fed_as}"
                return Cause(_swapped(piece, other), text)
    return None


def same_for_two(slots: tuple[Slot, ...], whole: Answer, limit: Tolerance) -> Cause | None:
    """Two slots that a prefill fills with the same entries: one of them holds what belongs to the other."""
    pieces = pieces_of(slots, whole)
    entries = [piece.of(read_returned(piece.slot, whole, True)) for piece in pieces]
    for index, piece in enumerate(pieces):
        for other in range(index):
            if same_entries(entries[index], entries[other], limit):
                mine, theirs = piece.filled_by, pieces[other].filled_by
                name = _swapped(piece, pieces[other])
                return Cause(name, f"a prefill returns the same entries as {theirs} and as {mine}")
    return None


def from_empty(builder: FeedBuilder, past: Past, stop: int) -> Call:
    """The first tokens in the graph or branch that takes a past, whose past is empty."""
    emptied = {s.past: builder.placeholder(s, 0) for s in builder.contract.slots if s.growth != "constant"}
    return as_probe(builder.decode(0, stop, Past({**past, **emptied})))


@undecided
def _other_first_entry(builder: FeedBuilder, start: int, piece: Piece) -> Decision:
    """From an empty past nothing can be wrong with positions: another entry of the first token is other mathematics.

    Where the logits of two tokens are right, the attention has used the right entry, and another one leaves the graph.
    """
    if builder.contract.first_step == "empty-past":
        return None
    first, past = yield from prefill(builder, start)
    (answer,) = yield from ask(from_empty(builder, past, 1))
    ours, theirs = piece.new_entry(answer, 0), piece.right_entry(first, 0)
    if ours.shape != theirs.shape or same_entries(ours, theirs, builder.tolerance):
        return None
    if has_length(builder.contract) is None and not builder.contract.last_logits_only:
        right, both = (yield as_probe(builder.prefill(2))), (yield from_empty(builder, past, 2))
        if not right.failed and not both.failed and same_logits(both.logits, right.logits, builder.tolerance):
            text = "from an empty past two tokens get the logits that they get without a past, and the first one gets "
            text += f"a different entry in {piece.present}: the attention uses other entries than those returned"
            return Cause("new-entries-wrong", text)
    text = f"from an empty past {piece.present} gets a different entry for the first token than without a past"
    return Cause("branches-disagree", text)


@undecided
def other_attention(builder: FeedBuilder, start: int, past: Past, piece: Piece) -> Decision:
    """A deeper layer adds a wrong entry: do the branches compute different things where no offset is at play?

    Two tokens on an empty past: the second one's entry in a deeper layer rests on the attention of the layers before.
    What it sees is shown by a change of the first token, so that a mask cannot be at fault.
    """
    if builder.contract.first_step == "empty-past":
        return None
    if cause := (yield from _other_first_entry(builder, start, piece)):
        return cause
    if has_length(builder.contract) is not None:
        return None  # it takes one token at a time
    calls = builder.prefill(2), from_empty(builder, past, 2), from_empty(change_token(builder, 0), past, 2)
    right, both, changed = yield from ask(*calls)
    ours = piece.new_entry(both, 1)
    if any(
        same_entries(ours, one, builder.tolerance) for one in (piece.right_entry(right, 1), piece.new_entry(changed, 1))
    ):
        return None
    text = (
        f"of two tokens on an empty past the second one sees the first, and gets a different entry in {piece.present} "
    )
    return Cause("branches-disagree", f"{text}than without a past")
