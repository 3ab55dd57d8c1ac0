"""Each past is what its carry rule makes of the step before: the present, the held value, the buffer written to."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvdoctor.addons.traces.lengths import compare_with_length
from kvdoctor.addons.traces.recorded import TraceTensor, same_values
from kvdoctor.addons.traces.step import (
    ContractViolation,
    ExpectedPast,
    Kind,
    StepContext,
    compare_samples,
    expect_past,
    holds_values_of,
    match_rows,
    misfits,
    size_of,
    take_readable,
    tokens,
)
from kvdoctor.contract import Slot, describe


def _wrong(  # noqa: PLR0913, PLR0917 - the parts of a violation
    kind: Kind, slot: Slot, fed: TraceTensor, due: ExpectedPast, cause: str, advice: str, **more: Any
) -> ContractViolation:
    promised = f"{slot.past} {describe(slot.dtype, due.shape)}: {due.words}"
    return ContractViolation(kind, (slot.past,), promised, f"{slot.past} {fed}", cause, advice, **more)


def pasts(moment: StepContext) -> Iterator[ContractViolation]:
    """One break for each way in which pasts are wrong."""
    found: dict[str, list[ContractViolation]] = {}
    for slot, fed in moment.slots:
        due = expect_past(slot, moment)
        if moment.before is None:
            wrong = _first_wrong(moment, slot, fed, due)
        else:
            wrong = (_by_shape if misfits(due.shape, fed) else _by_values)(moment, slot, fed, due)
        if wrong is not None:
            found.setdefault(wrong.kind, []).append(wrong)
    if "slots-crossed" in found:
        # What stands in the wrong place is missing in its own.
        found = {kind: entries for kind, entries in found.items() if kind == "slots-crossed"}
    for entries in found.values():
        yield replace(entries[0], inputs=tuple(name for entry in entries for name in entry.inputs))
    if not found and moment.before is not None:
        yield from _rows(moment)


def _rows(moment: StepContext) -> Iterator[ContractViolation]:
    """Pasts that are right one by one, and hold the sequences in different rows: some were reordered, others not."""
    known: list[tuple[Slot, tuple[frozenset[int], ...]]] = []
    for slot, fed in moment.slots:
        rows = match_rows(slot, fed, expect_past(slot, moment), moment) if slot.carry != "hold" else ()
        if not rows or not all(rows):
            continue  # rows of small values may be equal within the digits of the whole tensor, and differ in their own
        for other, theirs in known:
            at = next((i for i, (one, two) in enumerate(zip(rows, theirs, strict=False)) if not one & two), None)
            if at is None:
                continue
            ours, due = min(rows[at]), min(theirs[at])
            yield ContractViolation(
                kind="rows-disagree",
                inputs=(slot.past, other.past),
                declared="row i of every slot of the cache belongs to sequence i",
                observed=f"row {at} of {slot.past} was row {ours} of the step before, "
                f"row {at} of {other.past} was row {due}",
                cause=f"some slots of the cache were reordered and others not: row {at} of {slot.past} and of "
                f"{other.past} belong to different sequences",
                advice="reorder every slot of the cache by the same row numbers, both keys and values",
            )
            return
        known.append((slot, rows))


def _first_wrong(moment: StepContext, slot: Slot, fed: TraceTensor, due: ExpectedPast) -> ContractViolation | None:
    if slot.first == "ignored" or (moment.contract.first_step == "no-past-branch" and slot.filled_in != "encode"):
        return None
    if slot.filled_in == "encode" and slot.filled_by is not None:
        if fed.empty or misfits(due.shape, fed):
            cause = f"{slot.past} is not filled on the first step: {slot.filled_by} of the encoder graph fills it"
            return _wrong("cross-cache-replaced", slot, fed, due, cause, f"feed {slot.filled_by} of the encoder graph")
        return _by_values(moment, slot, fed, due)
    length = size_of(slot.axes, fed.shape, "past")
    if length and slot in moment.contract.growing and not moment.buffered and slot.first == "empty":
        return _not_empty(moment, slot, fed, due, length)
    if misfits(due.shape, fed) and not (length and slot.first == "empty"):
        advice = f"allocate it as {describe(slot.dtype, slot.shape)}, as the graph declares"
        return _wrong("wrong-size", slot, fed, due, f"{slot.past} has another size than the graph declares", advice)
    if slot.growth == "replace" and slot.first == "zeros":
        values = moment.values(slot.past)
        if values is not None and values.any():
            cause = f"{slot.past} is not zero on the first step, so that it holds the state of another sequence"
            return _wrong("past-not-empty", slot, fed, due, cause, "feed zeros on the first step of each sequence")
    return None


def _not_empty(
    moment: StepContext, slot: Slot, fed: TraceTensor, due: ExpectedPast, length: int
) -> ContractViolation | None:
    """A past on the first step: a dummy that is masked does no harm."""
    for port, mask in moment.ports("attention_mask"):
        values = moment.values(port.name)
        if values is None and mask.shape and mask.shape[-1] == length + moment.new:
            return None
        if values is not None and values.shape[-1] == length + moment.new and not values[..., :length].any():
            return None
    cause = f"the first step is fed a past of {tokens(length)} that nothing has filled and nothing masks"
    advice = "begin with a past of length 0; or record the trace from the first call of a sequence on"
    return _wrong("past-not-empty", slot, fed, due, cause, advice)


def _by_shape(moment: StepContext, slot: Slot, fed: TraceTensor, due: ExpectedPast) -> ContractViolation:
    before = moment.before
    assert before is not None  # noqa: S101 - asked of later steps only
    step = before.last.number
    for other, theirs in moment.slots:
        wanted = expect_past(other, moment)
        known = None not in (*wanted.shape, *due.shape) and (fed.shape, theirs.shape) == (wanted.shape, due.shape)
        if other is not slot and (known or holds_values_of(slot, fed, wanted, moment)):
            return _crossed(slot, other, fed, due, "as their shapes show")
    if sorted(fed.shape) == sorted(size or 0 for size in due.shape):
        cause = f"the axes of {slot.past} stand in another order"
        return _wrong("wrong-size", slot, fed, due, cause, "feed it as it was returned, or in the declared layout")
    returned = before.last.got.get(slot.present or "")
    others = [size for axis, size in enumerate(fed.shape) if axis != slot.length_axis]
    if slot.carry == "hold" or 0 in others:
        back = returned is not None and returned.shape == fed.shape
        if fed.empty:
            cause = f"what is fed to {slot.past} has no elements"
            if back:
                cause = f"the placeholder without elements that step {step} returned as {slot.present} is fed back"
            shown = f"{slot.present} as {returned}" if back else None
            return _wrong("placeholder-fed-back", slot, fed, due, cause, _hold(slot), graph_returned=shown)
        cause = f"{slot.past} does not keep what filled it: its shape changes"
        return _wrong("cross-cache-replaced", slot, fed, due, cause, _hold(slot))
    length, held = _length(slot, fed.shape), _length(slot, due.shape)
    if length is None or held is None or length == held:
        cause = f"{slot.past} has not the shape of what was returned"
        return _wrong("wrong-size", slot, fed, due, cause, _feed(slot, step))
    kind, cause = _name_length(moment, slot, fed, length, held)
    return _wrong(kind, slot, fed, due, cause, _feed(slot, step), suspected=_suspect_cut(moment, slot, fed, length))


def _suspect_cut(moment: StepContext, slot: Slot, fed: TraceTensor, length: int) -> str | None:
    """Why a shorter past may also be one that the loop cut on purpose; None where something in the step denies it."""
    before, agree = moment.before, list(compare_with_length(moment, length))
    if before is None or not 0 < length < before.tokens or not all(agree):
        return None
    if agree:
        return "the other inputs go with the shorter length: a loop that takes tokens back feeds the same"
    if fed.has_values:
        return None
    return f"a loop that takes tokens back by cutting the cache feeds the same shapes: give the data of {slot.past}"


def _name_length(moment: StepContext, slot: Slot, fed: TraceTensor, length: int, held: int) -> tuple[Kind, str]:
    """Name what a past of another length is, where `held` tokens are in the cache."""
    before = moment.before
    assert before is not None  # noqa: S101 - asked of later steps only
    step, previous = before.last.number, before.last.fed.get(slot.past)
    if length == 0:
        return "cache-dropped", f"the cache is dropped: its past has length 0, and {tokens(held)} are in it"
    if previous is not None and _length(slot, previous.shape) == length:
        again = holds_values_of(slot, fed, ExpectedPast(previous.shape, previous, ""), moment)
        if again or not (fed.has_values and previous.has_values):
            what = f"the past of step {step} is fed again" if again else f"the past is as long as at step {step}"
            return "past-stale", f"{what}: it did not grow by the {tokens(before.new)} of that step"
    for earlier in before.earlier:
        past = earlier.fed.get(slot.past)
        if past is not None and holds_values_of(slot, fed, ExpectedPast(past.shape, past, ""), moment):
            age = f"{step - earlier.number + 1} steps old"
            text = f"the past of step {earlier.number} is fed again, {age}: {tokens(held)} are in the cache"
            return "past-stale", text
    return "past-length", f"the past has length {length}, where {tokens(held)} are in the cache"


def _by_values(moment: StepContext, slot: Slot, fed: TraceTensor, due: ExpectedPast) -> ContractViolation | None:
    sampled = compare_samples(slot, fed, due, moment)
    if sampled is None:
        if due.value is None or not due.value.has_values or due.value.shape != fed.shape:
            moment.blind[slot.past] = None
            return None
        if moment.values(slot.past) is None:
            return None
    if holds_values_of(slot, fed, due, moment):
        return None
    for other, _ in moment.slots:
        if other is not slot and holds_values_of(slot, fed, expect_past(other, moment), moment):
            return _crossed(slot, other, fed, due, "as their values show")
    before = moment.before
    previous = before.last.fed.get(slot.past) if before is not None else None
    if slot.carry == "hold" or before is None:
        cause = f"{slot.past} does not keep what filled it: its values change"
        return _wrong("cross-cache-replaced", slot, fed, due, cause, _hold(slot))
    step = before.last.number
    if previous is not None and holds_values_of(slot, fed, ExpectedPast(previous.shape, previous, ""), moment):
        if takes_frames(moment) and fed_again(moment):
            return None  # put back after a blank
        cause = f"the past of step {step} is fed again: its values are those of before that step"
        return _wrong("past-stale", slot, fed, due, cause, _feed(slot, step))
    return _wrong("past-differs", slot, fed, due, _count_wrong(moment, slot, fed, due), _feed(slot, step))


def _count_wrong(moment: StepContext, slot: Slot, fed: TraceTensor, due: ExpectedPast) -> str:
    if due.value is None or fed.source is None or due.value.source is None:
        return f"its sampled values are not those of {due.words}"
    wrong = take_readable(slot, fed.array(), moment) != take_readable(slot, due.value.array(), moment)
    return f"{int(wrong.sum())} of {wrong.size} values are not those of {due.words}"


def _crossed(slot: Slot, other: Slot, fed: TraceTensor, due: ExpectedPast, how: str) -> ContractViolation:
    cause = f"slots are crossed: what belongs to {other.past} is fed to {slot.past}, {how}"
    return _wrong(
        "slots-crossed", slot, fed, due, cause, "pair each output with its own input, by name and not by order"
    )


def _length(slot: Slot, shape: tuple[int | None, ...]) -> int | None:
    at = slot.length_axis
    return shape[at] if at is not None and at < len(shape) else None


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


def takes_frames(moment: StepContext) -> bool:
    """Whether a step takes one frame of the encoder, and has states alone: a transducer, whose frames change.

    Its prediction network takes in the last token; where that is fed again, the state goes with it.
    """
    states = [fed for _, fed in moment.ports("encoder_states", "condition")]
    slots = moment.contract.slots
    return (
        bool(states and slots)
        and all(1 in fed.shape[1:] for fed in states)
        and all(slot.growth == "replace" for slot in slots)
    )


def fed_again(moment: StepContext) -> bool:
    """Whether a step feeds the one token of the step before again."""
    before = moment.before
    for port, fed in moment.ports("token_ids"):
        earlier = before.last.fed.get(port.name) if before is not None else None
        if earlier is not None and earlier.has_values and fed.has_values and fed.array().size == 1:
            return same_values(fed.array(), earlier.array())
    return False
