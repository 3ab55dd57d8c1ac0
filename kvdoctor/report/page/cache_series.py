"""The length of a slot over the steps of a run: what was fed, what came back, and what became of it."""

from dataclasses import dataclass
from typing import Literal

from kvdoctor.contract import Slot
from kvdoctor.trace import REPLAY, Run, Seen, Step

State = Literal["grown", "kept", "new-only", "held", "emptied", "shrunk", "not-returned", "fails"]

WORDS: dict[State, str] = {
    "grown": "grown",
    "kept": "same length",
    "new-only": "the new entries alone are returned",
    "held": "held",
    "emptied": "emptied",
    "shrunk": "shorter",
    "not-returned": "not returned",
    "fails": "the step fails",
}


@dataclass(frozen=True, slots=True)
class Cell:
    """A slot in one step: lengths in tokens or encoder states, None where there is none (or no axis that counts)."""

    step: int
    new_tokens: int
    fed: int | None
    returned: int | None
    state: State


def series(run: Run, slot: Slot) -> tuple[Cell, ...]:
    """The slot in each step of the run. Tensors without elements have length 0, whatever their axes say."""
    return tuple(_cell(run, step, slot) for step in run.steps)


def _cell(run: Run, step: Step, slot: Slot) -> Cell:
    fed = _length(step.fed.get(slot.past), slot)
    name = slot.filled_by if step.phase == "prefill" else slot.present
    seen = step.returned.get(name or "")
    returned = _length(seen, slot)
    return Cell(step.step, step.new_tokens, fed, returned, _state(run, step, slot, (fed, seen, returned)))


def _state(run: Run, step: Step, slot: Slot, seen: tuple[int | None, Seen | None, int | None]) -> State:
    fed, tensor, returned = seen
    if not step.returned:
        return "fails"
    if step.phase == "decode" and _holds(run, slot):
        return "held"
    if tensor is None:
        return "not-returned"
    if tensor.empty and fed != returned:
        return "emptied"
    if slot.growth == "delta" and step.phase == "decode":
        return "new-only"
    if fed is None or returned is None or fed == returned:
        return "grown" if fed is None and returned else "kept"
    return "grown" if returned > fed else "shrunk"


def _holds(run: Run, slot: Slot) -> bool:
    """Whether the loop feeds what it has from the first step: the plain loop holds only what is not returned."""
    if run.experiment == REPLAY or slot.carry != "hold":
        return False
    return slot.present is None or run.experiment != "plain-loop"


def _length(seen: Seen | None, slot: Slot) -> int | None:
    if seen is None or len(seen.shape) != len(slot.axes):
        return None
    if seen.empty:
        return 0
    return seen.shape[slot.length_axis] if slot.length_axis is not None else None
