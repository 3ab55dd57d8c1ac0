"""How long a slot must be after a step, and which slots are not."""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.contract import Slot
from kvdoctor.trace import Seen, Step


def has_wrong_lengths(case: Case) -> bool:
    """Whether any slot of this case is as long as it must not be: then wrong logits need no other cause."""
    return next(wrong_lengths(case), None) is not None


def dropped(item: tuple[Slot, Step, Seen, int]) -> bool:
    """Whether a slot of a wrong length holds the new tokens alone."""
    slot, step, _, length = item
    return slot.growth in ("grow", "shared") and step.past_length > 0 and length == step.new_tokens


def wrong_lengths(case: Case) -> Iterator[tuple[Slot, Step, Seen, int]]:
    """Each slot at the first step after which it has a wrong length: (slot, step, what came back, length)."""
    run = case.run("plain-loop")
    if case.declared_faults:
        return  # which axis is the length is then not known
    for slot in case.contract.slots if case.contract else ():
        at = slot.length_axis
        if at is None or slot.growth in ("constant", "paged"):
            continue
        for step in run.steps if run else ():
            seen = step.returned.get((slot.filled_by if step.phase == "prefill" else slot.present) or "")
            if seen is None or len(seen.shape) != len(slot.axes):
                continue
            right = _right_lengths(slot, step, at)
            if slot.trimmed and case.judged is not None and case.judged.outcome == "passed":
                break  # a window whose width nothing declares: the logits say that it is wide enough
            if None not in right and seen.shape[at] not in right:
                yield slot, step, seen, seen.shape[at]
                break


def _right_lengths(slot: Slot, step: Step, at: int) -> set[int | None]:
    """The lengths that a slot may rightly have after a step, in tokens; None where nothing says."""
    shape = step.fed[slot.past].shape if slot.past in step.fed else ()
    # In the first graph of a pair another input may bear the name.
    fed = shape[at] if len(shape) == len(slot.axes) else slot.size("capacity")
    total = step.past_length + step.new_tokens
    if slot.growth == "delta":
        return {step.new_tokens}
    if slot.growth in ("static", "ring"):
        return {fed + step.new_tokens if fed and slot.carry == "drop-oldest" else fed}
    # A cache with a window may drop what no later token sees: of W positions the next one needs W - 1.
    windowed = (slot.window - 1, slot.window) if slot.window is not None else ()
    return {total, *(length for length in windowed if length < total)}
