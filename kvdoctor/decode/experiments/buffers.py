"""Memory that a loop uses again: past and present in one buffer, content that no one may read, and a full ring.

Where each present is bound to the memory of its past, the graph reads what it is about to write. Operators that hold
the cache (GroupQueryAttention) are made for that; a graph that writes with other operators may read entries of the past
after the present has replaced them.

No call without a cache forgets what a full ring does, so steps on it are compared with the last one that fits, over
tokens that repeat with a period that does not divide its size. They overwrite the oldest entry, attend to as many ages,
and go on in positions: where products of first keys depend on distances alone, so does what their attention computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvdoctor.contract import Axis, CacheContract, Slot
from kvdoctor.decode.calls import Answer, Array, Asking, Call, Past, Scenario, Value, as_array
from kvdoctor.decode.experiments import Calls, Decision, Experiment, Use, as_probe, ask, several_tokens
from kvdoctor.decode.experiments.cache_entries import (
    Piece,
    by_position,
    can_be_copied,
    keep_entries,
    list_entries,
    pieces_of,
    read_returned,
    same_entries,
    same_logits,
)
from kvdoctor.decode.experiments.each_length import FAR_LENGTH, MOST_LENGTH, WALK
from kvdoctor.decode.experiments.lengths import is_all_attention
from kvdoctor.decode.experiments.loops import takes_rows
from kvdoctor.decode.experiments.multi_turn import takes_chunks
from kvdoctor.decode.experiments.one_token import right_logits
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import NOT_FULL, RING, Cause
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record

SINGLE, CHUNK = 2, 3
"""Single tokens after the prompt, then tokens of one chunk; single ones again to the end."""


def has_buffers(contract: CacheContract) -> str | None:
    """Past and present must have one shape, and the graph must place the new entries in the buffer itself."""
    if not _buffers(with_buffers(contract)):
        return "no present has the shape of its past"
    if any(slot.growth in ("grow", "delta") and slot.kind == "self-attention" for slot in contract.slots):
        return "some presents are longer than their pasts"
    fixed = contract.new_tokens
    return None if fixed in (None, 1) else f"the first step takes {fixed} new tokens only"


@Experiment(
    "one-buffer",
    "past and present bound to one buffer: a prompt, single tokens and a chunk",
    applies=has_buffers,
    thorough=True,
    changes_feeds=True,
    use=Use("past and present in one buffer"),
    order=36,
)
@Experiment(
    "one-buffer-batch",
    "the same with batch 2",
    Scenario(batch=2),
    lambda contract: has_buffers(contract) or takes_rows(contract),
    thorough=True,
    changes_feeds=True,
    use=Use("past and present in one buffer, with a batch of 2", after=("batch", "one-buffer")),
    order=36,
)
def one_buffer(builder: FeedBuilder) -> Calls:
    """The prompt, single tokens and a chunk, each written into the buffers that are read; as with separate buffers."""
    expected = yield from right_logits(builder)
    shared = replace(builder, contract=with_buffers(builder.contract))
    start, total = builder.scenario.prompt, builder.scenario.total
    call = shared.prefill(start, expected[:, :start])
    if not _pairs(shared.contract, call):
        raise CannotCheck("the first step takes no buffer")
    answer = yield _in_place(shared.contract, call)
    past, position = shared.carry(None, answer, "held"), start
    # GroupQueryAttention of onnxruntime takes several tokens on a past in batch 1 alone.
    several = takes_chunks(builder.contract) is None and builder.scenario.batch == 1
    chunk = CHUNK if several else 1
    before, last = past, start
    while position < total:
        new = min(chunk if position == start + SINGLE else 1, total - position)
        before = Past({name: as_array(value).copy() for name, value in past.items()}, past.length)
        last, stop = position, position + new
        answer = yield _in_place(shared.contract, shared.decode(position, stop, past, expected[:, position:stop]))
        past, position = shared.carry(past, answer, "held"), stop
    yield from shared.controls(last, total, before, expected)


def _in_place(contract: CacheContract, call: Call) -> Call:
    return replace(call, via="one-buffer", in_place=_pairs(contract, call))


def _pairs(contract: CacheContract, call: Call) -> dict[str, str]:
    """The pasts by the presents that are written into them, of a call."""
    names = ((slot.filled_by if call.phase == "prefill" else slot.present, slot.past) for slot in _buffers(contract))
    return {present: past for present, past in names if present is not None and past in call.feeds}


def _buffers(contract: CacheContract) -> tuple[Slot, ...]:
    """The slots whose past and present are one buffer."""
    found = (slot for slot in contract.of_kind("self-attention") if slot.growth in ("static", "ring"))
    return tuple(slot for slot in found if slot.carry == "feed-back" and slot.present is not None)


def with_buffers(contract: CacheContract) -> CacheContract:
    """The contract of a loop that feeds buffers of fixed size to slots that take either."""
    slots = list[Slot]()
    for slot in contract.slots:
        axes: tuple[Axis, ...] = tuple("capacity" if axis == "past" else axis for axis in slot.axes)
        slots.append(replace(slot, growth="static", axes=axes) if slot.growth == "shared" else slot)
    return replace(contract, slots=tuple(slots))


LARGE, LEFT_OVER = 1e4, 10.0
"""What stands where zeros might: in a branch that reads no past, within the range of float16; in a buffer about what
an earlier sequence leaves there, since masks hide that, and not every number (0 * NaN is NaN)."""


def has_unread_content(contract: CacheContract) -> str | None:
    """There must be a place whose content does not count, and a first step that takes it."""
    if not any(_unread_slots(contract)):
        return "every entry of the cache is read"
    return several_tokens(contract)


@Experiment(
    "unread-content",
    "the held loop with large numbers in every place of the cache that counts as empty",
    Scenario(steps=4),
    has_unread_content,
    use=Use("other content than zeros in places of the cache that count as empty", required="speculation"),
    order=7,
)
def unread(builder: FeedBuilder) -> Calls:
    """The held loop where large numbers stand in every place that the contract calls empty."""
    expected = yield from builder.whole()
    start = builder.scenario.prompt
    call = builder.prefill(start, expected[:, :start], dummy=int(builder.contract.first_step == "no-past-branch"))
    answer = yield replace(call, feeds={**call.feeds, **_filled(builder.contract, call.feeds, 0)})
    past = builder.carry(None, answer, "held")
    for position in range(start, builder.scenario.total):
        past = Past({**past, **_filled(builder.contract, past, position, buffers_only=True)}, past.length)
        before = past
        answer = yield builder.decode(position, position + 1, past, expected[:, position : position + 1])
        past = builder.carry(past, answer, "held")
    yield from builder.controls(position, position + 1, before, expected)


@Experiment(
    "written-places",
    "which places of its buffers a prefill writes",
    applies=has_unread_content,
    shown=False,
    explains=("unread-content",),
    order=8,
)
def written_places(builder: FeedBuilder) -> Decision:
    """Whether a step writes its tokens at their places: what stood there must be gone, and stay at later places."""
    start = builder.scenario.prompt
    call = builder.prefill(start)
    (answer,) = yield from ask(replace(call, feeds={**call.feeds, **_filled(builder.contract, call.feeds, 0)}))
    for slot in _unread_slots(builder.contract):
        made = slot.filled_by or ""
        if slot.growth != "static" or made not in answer.outputs:
            continue
        places = np.moveaxis(as_array(answer.outputs[made]), slot.axes.index("capacity"), 0)
        after = places.reshape(len(places), -1)
        kept = [place for place in range(start) if np.all(after[place] == LEFT_OVER)]
        beyond = [place for place in range(start, len(after)) if np.any(after[place] != LEFT_OVER)]
        if kept and beyond:
            text = f"{start} tokens leave place {kept[0]} of {slot.filled_by} as it was, and change place {beyond[0]}"
            return Cause("present-does-not-grow", text)
    return None


def _filled(
    contract: CacheContract, past: Mapping[str, Value | Array], length: int, buffers_only: bool = False
) -> dict[str, Any]:
    """The pasts whose content after the first `length` tokens is not to be read, with large numbers there."""
    filled = {}
    for slot in _unread_slots(contract):
        if slot.past not in past or (buffers_only and slot.growth != "static"):
            continue
        tensor = as_array(past[slot.past]).copy()
        if slot.growth == "static":
            place: list[Any] = [slice(None)] * tensor.ndim
            place[slot.axes.index("capacity")] = slice(length, None)
            tensor[tuple(place)] = LEFT_OVER
        else:
            tensor = np.full_like(tensor, LARGE)
        filled[slot.past] = tensor
    return filled


def _unread_slots(contract: CacheContract) -> Iterator[Slot]:
    """Every slot of a branch without a past; buffers that are written at the length of the past, in any layout."""
    for slot in contract.slots:
        if "int" in slot.dtype or slot.kind == "counter":
            continue
        buffer = slot.growth == "static" and slot.carry in ("feed-back", "write") and "capacity" in slot.axes
        if buffer or (slot.first == "ignored" and slot.growth != "constant"):
            yield slot


CHOSEN, LEAST = 16, 4
"""Tokens of a ring whose size the loop chooses, and of the smallest ring that is filled."""
FEW, MOST_CALLS = 12, 100
"""Entries that are all looked at; calls with noise, beyond which fewer entries of each layer are."""


def has_ring(contract: CacheContract) -> str | None:
    """Buffers that go on, tokens one at a time, and room for more in the model."""
    size, limit = contract.ring, contract.context_limit
    if size is None or not _rings(contract):
        return "no step writes over the oldest entry of a full buffer"
    if contract.exactness == "dynamic-quantization":
        return f"{NOT_FULL}: dynamic quantization rounds every entry another way"
    if limit is not None and limit <= size:
        return f"sequences end at {limit} tokens, before the ring of {size} is full"
    one = contract.new_tokens == 1
    if 0 < size < LEAST or size > (MOST_LENGTH if one else FAR_LENGTH) or not (one or contract.new_tokens is None):
        return f"{NOT_FULL}: its {size} tokens take too few or too many calls"
    return None


def _rings(contract: CacheContract) -> tuple[Slot, ...]:
    """The slots that are rings: buffers of that size, or of one that the loop chooses."""
    found = (slot for slot in by_position(contract) if slot.growth == "static")
    return tuple(slot for slot in found if slot.size("capacity") == (contract.ring or None))


@Experiment(
    RING,
    "steps on a full ring, each of them written over the oldest entry",
    Scenario(prompt=1, steps=2),
    has_ring,
    changes_feeds=True,
    use=Use("more tokens than a ring holds", "error", after=("each-length", "long-past")),
    order=34,
)
def full_ring(builder: FeedBuilder) -> Decision:
    """Where steps write, what they attend to, and at which positions they are."""
    full = yield from _fill(builder)
    if cause := full.find_misplaced():
        return cause
    size, noisy = full.size, (yield from full.noisy(full.size, full.size, full.slots))
    for piece in full.pieces(0):
        if not same_entries(full.entry(piece, size, noisy), full.entry(piece, size), builder.tolerance):
            text = f"the new entry of {piece.present} at position {size} depends on the entry that it replaces"
            return Cause("present-rewrites-past", text, piece.slot.past)
    # An attention that takes past and new entries apart may read the replaced one: its window is one token longer.
    reads_replaced = not full.is_same(size, noisy)
    if reads_replaced and (windows := [slot.window for slot in full.slots if slot.window and slot.window <= size]):
        text = f"the window has {windows[0]} tokens, and the step at position {size} reads the entry that it replaces"
        return Cause("mask-not-offset", text)
    for layer in dict.fromkeys(slot.layer for slot in full.slots):
        if cause := (yield from _hidden(full, [slot for slot in full.slots if slot.layer == layer])):
            return cause
    if is_all_attention(builder.contract) or by_position(full.builder.contract)[0] not in full.slots:
        return None  # what comes before the first ring is not known to depend on the token and its position alone
    return (yield from _earlier_position(full)) or full.find_wrong_distance(size - 1 + reads_replaced)


def _fill(builder: FeedBuilder) -> Asking["_FullRing"]:
    """Fill a ring with tokens that repeat, and go on for a period; for a second round where that is few steps."""
    contract = builder.contract
    size = contract.ring or max(CHOSEN, *(slot.window or 0 for slot in contract.slots))
    shapes = [
        [size if a == "capacity" and d != size else d for d, a in zip(s.shape, s.axes, strict=True)]
        for s in contract.slots
    ]
    if not contract.ring:
        slots = tuple(replace(slot, shape=tuple(shape)) for slot, shape in zip(contract.slots, shapes, strict=True))
        contract = replace(contract, ring=size, slots=slots)
    period = next(number for number in range(3, size + 2) if size % number)
    least, limit = size + period + 1, contract.context_limit
    stop = max(least, min(2 * size + 2, limit or MOST_CALLS)) if size <= WALK else least
    tokens = (builder.tokens[:, :1] + np.arange(stop) % period) % (contract.vocabulary or 2**31)
    sizes = replace(builder.scenario, prompt=1, steps=stop)
    builder = replace(builder, contract=contract, scenario=sizes, tokens=tokens)
    start = 1 if contract.new_tokens == 1 else size - 1
    past, steps = (yield from builder.begin(stop=start)), dict[int, tuple[Past, Answer]]()
    if not can_be_copied(contract, past):
        raise CannotCheck(f"{NOT_FULL}: {size} tokens take too much memory")
    for position in range(start, stop):
        call = builder.decode(position, position + 1, past)
        answer = yield as_probe(call)
        if answer.failed and position >= least:
            break  # a table of positions may end
        if answer.failed:
            raise CannotCheck(f"{NOT_FULL}: a step after {position} tokens fails")
        if position >= size - 1:
            steps[position] = (past, (yield call))
        past = builder.carry(past, answer, "held")
    return _FullRing(builder, _rings(contract), size, period, steps)


@record
class _FullRing:
    """Steps by position, from the last one that fits on: the past that each is fed, and its answer."""

    builder: FeedBuilder
    slots: tuple[Slot, ...]
    size: int
    period: int
    steps: dict[int, tuple[Past, Answer]]

    def entry(self, piece: Piece, position: int, answer: Answer | None = None) -> Array:
        """What a piece holds of the token at a position, after its step, the first of those here, or another answer."""
        held = read_returned(piece.slot, answer or self.steps[max(position, self.size - 1)][1], False)
        return piece.of(np.take(held, [position % self.size], axis=piece.slot.length_axis))

    def pieces(self, at: int) -> list[Piece]:
        """The pieces of the first layer, or of a later one; none after the last one."""
        found = pieces_of(self.slots, self.steps[self.size][1], first=False)
        layers = list(dict.fromkeys(piece.layer for piece in found))
        return [piece for piece in found if layers[at : at + 1] == [piece.layer]]

    def noisy(self, position: int, age: int, slots: Sequence[Slot]) -> Asking[Answer]:
        """The step at a position, with noise in the entry of the token `age` tokens before.

        It is as large as the ring: so an entry counts, however many others the softmax weighs. Noise in keys might hide
        an entry, so it is in values where these are apart.
        """
        changed, (past, _) = dict(self.steps[position][0]), self.steps[position]
        for slot in [slot for slot in slots if slot.part == "value"] or slots:
            held = as_array(past[slot.past]).copy()
            row = np.moveaxis(held, slot.length_axis or 0, 0)[(position - age) % self.size]
            drawn = np.random.default_rng(11).standard_normal(row.shape)
            row[...] = -row - 1 if held.dtype.kind in "iu" else drawn * max(float(held.std()), 1e-3) * self.size
            changed[slot.past] = held
        return (yield as_probe(self.builder.decode(position, position + 1, Past(changed, past.length))))

    def sees(self, position: int, age: int, slots: Sequence[Slot]) -> Asking[bool]:
        """Whether the step at a position attends to the token `age` tokens before."""
        return not self.is_same(position, (yield from self.noisy(position, age, slots)))

    def is_same(self, position: int, answer: Answer) -> bool:
        """Whether an answer has the logits of the step at a position."""
        return same_logits(answer.logits, self.steps[position][1].logits, self.builder.tolerance)

    def find_misplaced(self) -> Cause | None:
        """A step that changes other entries than the oldest one."""
        for (position, (past, answer)), slot in ((step, slot) for step in self.steps.items() for slot in self.slots):
            fed, returned = list_entries(slot, past, answer)
            places, right = np.flatnonzero((fed != returned).any(axis=1)).tolist(), position % self.size
            if position < self.size and len(places) > 1 and keep_entries(fed, returned):
                raise CannotCheck(f"{NOT_FULL}: entries move within their buffers")
            if places != [right]:
                listed = ", ".join(map(str, places[:4]))
                named = f"entr{'y' if len(places) == 1 else 'ies'} {listed}" if places else "no entry"
                allowed = f"only entry {right} (the oldest) may change"
                text = f"the step at position {position} changes {named} of {slot.past}; {allowed}"
                return Cause("present-rewrites-past" if places else "present-does-not-grow", text, slot.past)
        return None

    def find_wrong_distance(self, begin: int) -> Cause | None:
        """Products of entries of the first layer, or what it computes, that change when the ring is full.

        Both are the same after each period, where the products were so before; from `begin` on a window is full.
        """
        first, limit, m, end = self.pieces(0), self.builder.tolerance, self.period, self.size + self.period + 1
        for piece in first:
            entries = [self.entry(piece, place).astype(np.float64).ravel() for place in range(end)]
            scale = max(float(entry @ entry) for entry in entries)
            products = [float(entries[place] @ entries[place - m]) / scale for place in range(m, end)]
            moved = [abs(one - other) for one, other in zip(products[m:], products, strict=False)]
            before, after = moved[: max(self.size - 2 * m, 0)], moved[max(self.size - 2 * m, 0) :]
            if not before or max(before) > limit.passes:
                return None  # positions are absolute, or the ring is too small to tell
            if max(after) > 10 * limit.passes:
                place = self.size + int(np.argmax(after))
                text = f"the entry of {piece.present} at position {place} is at another distance from those before it"
                return Cause("positions-not-offset", text)
        free = [same_entries(self.entry(piece, 0), self.entry(piece, m), limit) for piece in first]
        for place in range(begin, end - m):
            one, other = self.computed(place, free), self.computed(place + m, free)
            for name in one:
                if not same_entries(one[name], other[name], replace(limit, passes=limit.fails)):
                    text = f"tokens repeat every {m}, and {name} at position {place + m} differ from those at {place}"
                    return Cause("positions-not-offset", f"{text}, as if distances were others")
        return None

    def computed(self, place: int, free: Sequence[bool]) -> dict[str, Array]:
        """What the first attention gives: entries of the second layer that are `free` of positions, or the logits."""
        second = self.pieces(1)
        found = {
            f"numbers of {one.present}": self.entry(one, place)
            for one, counts in zip(second, free, strict=False)
            if counts
        }
        return found if second else {"logits": self.steps[place][1].logits}


def _hidden(full: _FullRing, slots: Sequence[Slot]) -> Decision:
    """Ages of entries that a layer attends to before its ring is full and not afterwards, or the other way round."""
    size, layers = full.size, len({slot.layer for slot in full.slots})
    ages = range(1, size) if size <= FEW else sorted({1, 2, 3, size // 3, size // 2, size - 2, size - 1})
    for age in ages[:: 1 + 3 * layers * len(ages) // MOST_CALLS]:
        before = yield from full.sees(size - 1, age, slots)
        for position in (size, size + full.period):
            if (yield from full.sees(position, age, slots)) != before:
                layer = f"in layer {slots[0].layer} " if slots[0].layer is not None else ""
                which = ("does not attend", "does") if before else ("attends", "does not")
                text = f"{layer}the step at position {position} {which[0]} to the token {age} before it, "
                return Cause("mask-not-offset", f"{text}and the one at {size - 1} {which[1]}")
    return None


def _earlier_position(full: _FullRing) -> Decision:
    """A new entry of the first layer that is the one of its token at an earlier position."""
    builder, size = full.builder, full.size
    for place in range(full.period):
        tokens = builder.tokens.copy()
        tokens[:, size] = tokens[:, place]
        answer = yield as_probe(replace(builder, tokens=tokens).decode(size, size + 1, full.steps[size][0]))
        for piece in full.pieces(0):
            new, places = full.entry(piece, size, answer), range(place, size, full.period)
            same = [at for at in places if same_entries(new, full.entry(piece, at), builder.tolerance)]
            if len(same) == 1 < len(places):
                text = f"the entry of {piece.present} at position {size} is that of the same token at {same[0]}"
                return Cause("positions-not-offset", text)
    return None
