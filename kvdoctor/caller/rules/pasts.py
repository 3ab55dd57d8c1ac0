"""Each past is what its carry rule makes of the step before: the present, the held value, the buffer written to."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvdoctor.caller.due import Due, due_of, holds_values_of, relevant
from kvdoctor.caller.moment import Break, Kind, Moment, size_of, tokens
from kvdoctor.caller.recorded import Recorded
from kvdoctor.contract import Slot, describe


@dataclass(frozen=True, slots=True)
class _Wrong:
    """What is wrong with one past."""

    kind: Kind
    slot: Slot
    fed: Recorded
    due: Due
    cause: str
    advice: str
    returned: str | None = None


def pasts(moment: Moment) -> Iterator[Break]:
    """One break for each way in which pasts are wrong."""
    find = _first_wrong if moment.before is None else _later_wrong
    found: dict[str, list[_Wrong]] = {}
    for slot, fed in moment.slots:
        wrong = find(moment, slot, fed)
        if wrong is not None:
            found.setdefault(wrong.kind, []).append(wrong)
    if "slots-crossed" in found:
        # What stands in the wrong place is missing in its own.
        found = {kind: entries for kind, entries in found.items() if kind == "slots-crossed"}
    for entries in found.values():
        first = entries[0]
        yield Break(
            kind=first.kind,
            inputs=tuple(entry.slot.past for entry in entries),
            promised=f"{first.slot.past} {describe(first.slot.dtype, first.due.shape)}: {first.due.words}",
            observed=f"{first.slot.past} {first.fed}",
            cause=first.cause,
            advice=first.advice,
            graph_returned=first.returned,
        )


def _first_wrong(moment: Moment, slot: Slot, fed: Recorded) -> _Wrong | None:
    """What is wrong with a past on the first step."""
    if slot.first == "ignored" or (moment.contract.first_step == "no-past-branch" and slot.filled_in != "encode"):
        return None
    due = due_of(slot, moment)
    if slot.filled_in == "encode" and slot.filled_by is not None:
        if fed.empty or _misfits(due, fed):
            cause = f"{slot.past} is not filled on the first step: {slot.filled_by} of the encoder graph fills it"
            return _Wrong("cross-cache-replaced", slot, fed, due, cause, f"feed {slot.filled_by} of the encoder graph")
        return _by_values(moment, slot, fed, due)
    length = size_of(slot.axes, fed.shape, "past")
    if length and slot in moment.contract.growing and not moment.buffered and slot.first == "empty":
        return _not_empty(moment, slot, fed, due, length)
    if _misfits(due, fed) and not (length and slot.first == "empty"):
        return _Wrong("wrong-size", slot, fed, due, f"{slot.past} has another size than the graph declares", _AS_IS)
    if slot.growth == "replace" and slot.first == "zeros":
        values = moment.values(slot.past)
        if values is not None and values.any():
            cause = f"{slot.past} is not zero on the first step, so that it holds the state of another sequence"
            return _Wrong("past-not-empty", slot, fed, due, cause, "feed zeros on the first step of each sequence")
    return None


_AS_IS = "allocate it in the declared shape"


def _not_empty(moment: Moment, slot: Slot, fed: Recorded, due: Due, length: int) -> _Wrong | None:
    """A past on the first step: a dummy that is masked does no harm."""
    for port, mask in moment.ports("attention_mask"):
        values = moment.values(port.name)
        if values is None and mask.shape and mask.shape[-1] == length + moment.new:
            return None
        if values is not None and values.shape[-1] == length + moment.new and not values[..., :length].any():
            return None
    cause = f"the first step is fed a past of {tokens(length)} that nothing has filled and nothing masks"
    advice = "begin with a past of length 0; or record the trace from the first call of a sequence on"
    return _Wrong("past-not-empty", slot, fed, due, cause, advice)


def _later_wrong(moment: Moment, slot: Slot, fed: Recorded) -> _Wrong | None:
    due = due_of(slot, moment)
    if _misfits(due, fed):
        return _by_shape(moment, slot, fed, due)
    return _by_values(moment, slot, fed, due)


def _misfits(due: Due, fed: Recorded) -> bool:
    return len(due.shape) != len(fed.shape) or any(
        size is not None and size != got for size, got in zip(due.shape, fed.shape, strict=True)
    )


def _by_shape(moment: Moment, slot: Slot, fed: Recorded, due: Due) -> _Wrong:
    """Name what a past of a wrong shape is."""
    before = moment.before
    assert before is not None  # noqa: S101 - asked of later steps only
    step = before.last.number
    crossed = next((o for o, t in moment.slots if o is not slot and _swapped(moment, slot, o, fed, t)), None)
    if crossed is not None:
        return _crossed(slot, crossed, fed, due, "as their shapes show")
    if sorted(fed.shape) == sorted(size or 0 for size in due.shape):
        cause = f"the axes of {slot.past} stand in another order"
        return _Wrong("wrong-size", slot, fed, due, cause, "feed it as it was returned, or in the declared layout")
    returned = before.last.got.get(slot.present or "")
    if slot.carry == "hold" or 0 in _beside_length(slot, fed.shape):
        back = returned is not None and returned.shape == fed.shape
        if fed.empty:
            cause = f"what is fed to {slot.past} has no elements"
            if back:
                cause = f"the placeholder without elements that step {step} returned as {slot.present} is fed back"
            shown = f"{slot.present} as {returned}" if back else None
            return _Wrong("placeholder-fed-back", slot, fed, due, cause, _hold(slot), shown)
        cause = f"{slot.past} does not keep what filled it: its shape changes"
        return _Wrong("cross-cache-replaced", slot, fed, due, cause, _hold(slot), None)
    length, held = _length(slot, fed.shape), _length(slot, due.shape)
    previous = before.last.fed.get(slot.past)
    if length is not None and held is not None and length != held:
        if length == 0:
            cause = f"the cache is dropped: its past has length 0, and {tokens(held)} are in it"
            return _Wrong("cache-dropped", slot, fed, due, cause, _feed(slot, step))
        if previous is not None and _length(slot, previous.shape) == length:
            again = holds_values_of(slot, fed, Due(previous.shape, previous, ""), moment)
            if again or not (fed.has_values and previous.has_values):
                what = f"the past of step {step} is fed again" if again else f"the past is as long as at step {step}"
                cause = f"{what}: it did not grow by the {tokens(before.new)} of that step"
                return _Wrong("past-stale", slot, fed, due, cause, _feed(slot, step))
        cause = f"the past has length {length}, where {tokens(held)} are in the cache"
        return _Wrong("past-length", slot, fed, due, cause, _feed(slot, step))
    return _Wrong(
        "wrong-size", slot, fed, due, f"{slot.past} has not the shape of what was returned", _feed(slot, step)
    )


def _swapped(moment: Moment, slot: Slot, other: Slot, fed: Recorded, theirs: Recorded) -> bool:
    """Whether two pasts have one another's shapes, or the other's values."""
    due = due_of(other, moment)
    if holds_values_of(slot, fed, due, moment):
        return True
    own = due_of(slot, moment)
    known = None not in due.shape and None not in own.shape
    return known and fed.shape == due.shape and theirs.shape == own.shape


def _by_values(moment: Moment, slot: Slot, fed: Recorded, due: Due) -> _Wrong | None:
    """Name what a past of the right shape and other values is."""
    if due.value is None or not due.value.has_values or due.value.shape != fed.shape:
        moment.blind[slot.past] = None
        return None
    if moment.values(slot.past) is None or holds_values_of(slot, fed, due, moment):
        return None
    for other, _ in moment.slots:
        if other is not slot and holds_values_of(slot, fed, due_of(other, moment), moment):
            return _crossed(slot, other, fed, due, "as their values show")
    before = moment.before
    previous = before.last.fed.get(slot.past) if before is not None else None
    if slot.carry == "hold" or before is None:
        cause = f"{slot.past} does not keep what filled it: its values change"
        return _Wrong("cross-cache-replaced", slot, fed, due, cause, _hold(slot))
    step = before.last.number
    if previous is not None and holds_values_of(slot, fed, Due(previous.shape, previous, ""), moment):
        cause = f"the past of step {step} is fed again: its values are those of before that step"
        return _Wrong("past-stale", slot, fed, due, cause, _feed(slot, step))
    wrong = relevant(slot, fed.array(), moment) != relevant(slot, due.value.array(), moment)
    cause = f"{int(wrong.sum())} of {wrong.size} values are not those of {due.words}"
    return _Wrong("past-differs", slot, fed, due, cause, _feed(slot, step))


def _crossed(slot: Slot, other: Slot, fed: Recorded, due: Due, how: str) -> _Wrong:
    cause = f"slots are crossed: what belongs to {other.past} is fed to {slot.past}, {how}"
    return _Wrong(
        "slots-crossed", slot, fed, due, cause, "pair each output with its own input, by name and not by order"
    )


def _length(slot: Slot, shape: tuple[int | None, ...]) -> int | None:
    at = slot.length_axis
    return shape[at] if at is not None and at < len(shape) else None


def _beside_length(slot: Slot, shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for axis, size in enumerate(shape) if axis != slot.length_axis)


def _hold(slot: Slot) -> str:
    source = f"the {slot.filled_by} of the first step" if slot.filled_by else "what the first step was fed"
    if slot.filled_in == "encode":
        source = f"{slot.filled_by} of the encoder graph"
    return f"in your loop, hold {source} and feed it to {slot.past} at every later step"


def _feed(slot: Slot, step: int) -> str:
    verbs = {
        "append": "append the rows of {p} to the past",
        "write": "write the rows of {p} into the buffer at the past length",
        "shift": "drop the oldest rows and put those of {p} at the end",
        "drop-oldest": "feed {p} without its first row",
        "extend": "feed {p} and a row of zeros for each new token",
    }
    text = verbs.get(slot.carry, "feed {p} back")
    return text.format(p=f"{slot.present} of the step before (step {step})")
