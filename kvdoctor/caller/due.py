"""What the past of a slot is due to be at a step, by its carry rule. numpy only."""

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from kvdoctor.caller.moment import Before, Moment, size_of
from kvdoctor.caller.recorded import Recorded, same
from kvdoctor.calls import Answer, Array, Past, Scenario
from kvdoctor.contract import Axis, Slot
from kvdoctor.feeds import Deal

MOST_ROWS = 64
"""Rows of a batch that are looked for one by one: more beams than that nobody has."""


@dataclass(frozen=True, slots=True)
class Due:
    """The shape (None: not known), the value where the trace has it, and where it comes from, in words."""

    shape: tuple[int | None, ...]
    value: Recorded | None
    words: str


def due_of(slot: Slot, moment: Moment) -> Due:
    """Say what a past is due to be."""
    before = moment.before
    if before is None:
        return _first(slot, moment)
    if slot.carry == "hold" or slot.present is None:
        value = before.filled.get(slot.past)
        shape = _shape(slot, moment, None)
        return Due(_of(value, slot, moment) if value is not None else shape, value, _held_words(slot, before))
    source = slot.filled_by if before.phase == "prefill" else slot.present
    got = before.last.got.get(source or "")
    words = f"{source} as step {before.last.number} returned it"
    at = slot.length_axis
    if slot.carry == "feed-back" or at is None:
        if got is None or len(got.shape) != len(slot.axes):
            return Due(_shape(slot, moment, _counted(slot, moment)), None, words)
        return Due(_of(got, slot, moment), got, words)
    return _carried(slot, moment, before, got, f"{words}, by the rule {slot.carry}")


def _first(slot: Slot, moment: Moment) -> Due:
    if slot.filled_in == "encode" and slot.filled_by is not None:
        made = moment.encoded.got.get(slot.filled_by) if moment.encoded is not None else None
        return Due(_shape(slot, moment, None), made, f"{slot.filled_by} of the encoder graph")
    words = {"empty": "a past of length 0", "dummy": "a past of length 1, masked", "zeros": "zeros"}
    length = {"empty": 0, "dummy": 1}.get(slot.first) if "past" in slot.axes and not moment.buffered else None
    return Due(_shape(slot, moment, length), None, words.get(slot.first, "anything"))


def _carried(slot: Slot, moment: Moment, before: Before, got: Recorded | None, words: str) -> Due:
    """Where a past is made of the past before and the present's rows."""
    at, past = slot.length_axis, before.last.fed.get(slot.past)
    assert at is not None  # noqa: S101 - such a rule is one of lengths
    rows = got.shape[at] if got is not None and at < len(got.shape) else None
    had = past.shape[at] if past is not None and at < len(past.shape) else None
    lengths = {
        "append": None if rows is None else (had or 0) + rows,
        "drop-oldest": None if rows is None else rows - 1,
        "extend": None if rows is None else rows + moment.new,
    }
    length = lengths.get(slot.carry, had)
    value = None
    known = got is not None and got.has_values and past is not None and past.has_values
    if known and past is not None and got is not None and slot.carry != "extend":
        shape = tuple(length if axis == at and length is not None else size for axis, size in enumerate(past.shape))
        value = Recorded(slot.dtype, shape, partial(_made, slot, moment, past, got))
    return Due(_shape(slot, moment, length), value, words)


def _made(slot: Slot, moment: Moment, past: Recorded, got: Recorded) -> Array:
    """The next past as kvdoctor's own loop makes it."""
    before = moment.before
    assert before is not None  # noqa: S101 - made for later steps only
    alone = replace(moment.contract, slots=(replace(slot, present="present"),))
    deal = Deal(alone, Scenario(batch=before.batch))
    answer = Answer({"present": got}, "", before.tokens - before.new, before.new)
    carried = deal.carry(Past({slot.past: past.array()}, before.tokens), answer, "held")[slot.past]
    return carried if isinstance(carried, np.ndarray) else carried.array()


def _counted(slot: Slot, moment: Moment) -> int | None:
    """The length of a past whose source is not in the trace, by counting tokens."""
    before = moment.before
    if before is None or slot not in moment.contract.growing:
        return None
    if before.buffered and slot.growth == "shared":
        fed = before.last.fed.get(slot.past)
        return size_of(slot.axes, fed.shape, "past") if fed is not None else None
    return before.tokens


def _shape(slot: Slot, moment: Moment, length: int | None) -> tuple[int | None, ...]:
    """The shape by the contract, `length` long where the slot counts tokens."""
    sizes = moment.sizes
    shape: list[int | None] = []
    for axis, declared in zip(slot.axes, slot.shape, strict=True):
        if axis in ("past", "capacity"):
            # A number on this axis may be meant for another use of the graph.
            shape.append(length if length is not None or axis == "past" else _number(declared))
        elif axis in ("batch", "batch_heads", "encoder"):
            shape.append(_number(declared) if _number(declared) is not None else sizes.get(axis))
        else:
            shape.append(_number(declared))
    return tuple(shape)


def _number(size: object) -> int | None:
    return size if isinstance(size, int) else None


def _of(value: Recorded, slot: Slot, moment: Moment) -> tuple[int | None, ...]:
    """The shape of a value, for the batch of this step."""
    sizes = moment.sizes
    known: dict[Axis, int | None] = {axis: sizes[axis] for axis in slot.axes if axis in ("batch", "batch_heads")}
    if len(value.shape) != len(slot.axes) or moment.before is None or moment.batch == moment.before.batch:
        return value.shape
    return tuple(known.get(axis, size) for axis, size in zip(slot.axes, value.shape, strict=True))


def _held_words(slot: Slot, before: Before) -> str:
    if slot.filled_in == "encode":
        return f"{slot.filled_by} of the encoder graph, held"
    if slot.filled_by is None:
        return f"what step {before.first.number} was fed, held"
    return f"{slot.filled_by} of step {before.first.number}, held"


def holds_values_of(slot: Slot, fed: Recorded, due: Due, moment: Moment) -> bool:
    """Whether a past holds what is due, row by row in any order: beams are picked and repeated.

    Tensors without elements say nothing.
    """
    if due.value is None or not due.value.has_values or not fed.has_values or fed.empty:
        return False
    mine, theirs = relevant(slot, fed.array(), moment), relevant(slot, due.value.array(), moment)
    if mine.ndim != theirs.ndim:
        return False
    if same(mine, theirs):
        return True
    axis = slot.axes.index("batch") if "batch" in slot.axes else None
    if axis is None or moment.before is None or not 1 <= theirs.shape[axis] <= MOST_ROWS:
        return False
    if mine.shape[axis] > MOST_ROWS or max(mine.shape[axis], theirs.shape[axis]) == 1:
        return False
    rows = [np.take(theirs, [row], axis) for row in range(theirs.shape[axis])]
    return all(any(same(np.take(mine, [row], axis), other) for other in rows) for row in range(mine.shape[axis]))


def relevant(slot: Slot, values: Array, moment: Moment) -> Array:
    """The entries of a past that a step may read: behind the tokens a buffer holds anything."""
    at = slot.length_axis
    if at is None or at >= values.ndim or slot.growth not in ("static", "delta") or moment.before is None:
        return values
    if slot.carry in ("write", "feed-back") and slot.axes[at] == "capacity":
        return np.take(values, range(min(moment.before.tokens, values.shape[at])), axis=at)
    return values
