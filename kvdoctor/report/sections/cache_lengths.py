"""The length of each cache in each step of a run: what was fed, what came back, and the step at which it goes wrong."""

from typing import Literal

from kvdoctor.contract import CacheContract, Slot, describe
from kvdoctor.decode.runs import REPLAY, WRONG, ObservedTensor, Run, Step
from kvdoctor.records import record
from kvdoctor.report.blocks import Span, Table, Text, table
from kvdoctor.report.wording.runs import NOT_COMPARED, format_difference, format_logits

State = Literal["grown", "same-length", "new-only", "held", "emptied", "shrunk", "not-returned", "fails"]

STATE_TEXTS: dict[State, str] = {
    "grown": "grown",
    "same-length": "same length",
    "new-only": "only the new entries are returned",
    "held": "the value of step 0 is held",
    "emptied": "emptied",
    "shrunk": "shorter",
    "not-returned": "not returned",
    "fails": "the step fails",
}
MOST_ROWS, FIRST_ROWS = 6, 2
"""Steps in a table, and those of them that are the first ones."""
LARGE = 0.05
"""A difference in standard deviations of the logits that is named as one also before the step that fails."""
HERE = "\u2190 here"


@record
class CacheLength:
    """A slot in one step: lengths in tokens or encoder states, None where there is none (or no axis that counts)."""

    step: int
    new_tokens: int
    fed: int | None
    returned: int | None
    state: State


def trace_slot(run: Run, slot: Slot) -> tuple[CacheLength, ...]:
    """The slot in each step of the run. Tensors without elements have length 0, whatever their axes say."""
    cells = []
    for step in run.steps:
        seen = step.returned.get((slot.filled_by if step.phase == "prefill" else slot.present) or "")
        fed, returned = _length(step.fed.get(slot.past), slot), _length(seen, slot)
        state = _state(run, step, slot, (fed, seen, returned))
        cells.append(CacheLength(step.step, step.new_tokens, fed, returned, state))
    return tuple(cells)


def _state(run: Run, step: Step, slot: Slot, seen: tuple[int | None, ObservedTensor | None, int | None]) -> State:
    fed, tensor, returned = seen
    if not step.returned:
        return "fails"
    # The plain loop feeds the value of step 0 again only to slots that are not returned.
    feeds_again = slot.carry == "hold" and (slot.present is None or run.experiment != "plain-loop")
    if step.phase == "decode" and feeds_again and not run.experiment.startswith(REPLAY):
        return "held"
    if tensor is None:
        return "not-returned"
    if tensor.empty and fed != returned:
        return "emptied"
    if slot.growth == "delta" and step.phase == "decode":
        return "new-only"
    if fed is None or returned is None or fed == returned:
        return "grown" if fed is None and returned else "same-length"
    return "grown" if returned > fed else "shrunk"


def _length(seen: ObservedTensor | None, slot: Slot) -> int | None:
    if seen is None or len(seen.shape) != len(slot.axes):
        return None
    if seen.empty:
        return 0
    return seen.shape[slot.length_axis] if slot.length_axis is not None else None


def tabulate_lengths(run: Run, contract: CacheContract) -> Table | None:
    """A row for each step up to the wrong one, a column for each kind of cache; None where no logits were compared."""
    if not run.steps or not contract.slots:
        return None
    kinds = list(dict.fromkeys(slot.kind for slot in contract.slots))
    slots = []
    for of_kind in map(contract.of_kind, kinds):
        wrong_at = {at: slot for slot in reversed(of_kind) if (at := _first_wrong_step(run, slot)) is not None}
        slots.append(wrong_at[min(wrong_at)] if wrong_at else of_kind[0])
    # The last step that is shown is the first wrong one.
    last = next((at for at, step in enumerate(run.steps) if step.step == run.failed_step), len(run.steps) - 1)
    rows: list[list[Text]] = []
    for at, step in enumerate(run.steps[: last + 1]):
        cells = [_format_length(trace_slot(run, slot)[at], step, slot) for slot in slots]
        rows.append([str(step.step), *cells, _format_result(run, step, contract)])
    if run.outcome == "died" and run.steps[-1].returned:
        rows.append([str(run.steps[-1].step + 1), *("" for _ in slots), f"ends the process ({run.died_by})"])
        last += 1
    if all(row[-1] == NOT_COMPARED for row in rows):
        return None
    if (wrong := _find_wrong_cell(run, slots, last)) is not None:
        row, column = wrong
        rows[row][column] = Span(f"{rows[row][column]} {HERE}", "wrong")
    left_out = len(rows) - MOST_ROWS
    if left_out > 1:
        rows[FIRST_ROWS : FIRST_ROWS + left_out] = [["\u2026", *("" for _ in kinds), f"{left_out} more steps"]]
    counted = "; of cross-attention in encoder states" if "cross-attention" in kinds else ""
    title = f"cache of {run.experiment}, step by step: length fed \u2192 returned, in tokens{counted}"
    return table(["step", *kinds, "logits"], rows, title, "step", "lengths")


def _first_wrong_step(run: Run, slot: Slot) -> int | None:
    """The first step in which the length of a slot is wrong whatever the logits are."""
    grows = slot.growth == "grow" and not slot.trimmed and "past" in slot.axes
    for at, cell in enumerate(trace_slot(run, slot)):
        must_grow = grows and run.steps[at].phase == "decode"
        if cell.state == "emptied" or (must_grow and cell.state in ("same-length", "shrunk")):
            return at
    return None


def _find_wrong_cell(run: Run, slots: list[Slot], last: int) -> tuple[int, int] | None:
    """Row and column of the first wrong cell of a run that is wrong; the last column is that of the logits."""
    if run.shows not in WRONG:
        return None
    found = [(at, column) for column, slot in enumerate(slots, 1) if (at := _first_wrong_step(run, slot)) is not None]
    at_fault = min(((at, column) for at, column in found if at <= last), default=None)
    if at_fault is not None:
        return at_fault
    return (last, len(slots) + 1) if run.failed_step is not None or run.outcome == "died" else None


def _format_length(cell: CacheLength, step: Step, slot: Slot) -> str:
    """`3 -> 4`, `7 -> 0 empty, null pointer`, `7, reused`, `none -> 7`."""
    fed = "-" if cell.fed is None else str(cell.fed)
    if slot.length_axis is None:
        whole = "blocks" if slot.growth == "paged" else "number" if slot.kind == "counter" else "state"
        return "fails" if cell.state == "fails" else whole if cell.state != "not-returned" else "not returned"
    match cell.state:
        case "fails":
            return f"{fed} \u2192 \u2717"
        case "held":
            return f"{fed}, reused"
        case "not-returned":
            return f"{fed}, not returned"
        case "emptied":
            seen = step.returned.get(slot.present or "")
            return f"{fed} \u2192 0 empty" + (", null pointer" if seen is not None and seen.null else "")
    returned = "?" if cell.returned is None else str(cell.returned)
    return f"{fed if cell.fed is not None else 'none'} \u2192 {returned}"


def _format_result(run: Run, step: Step, contract: CacheContract) -> str:
    """The difference of the logits of a step, or what ended it."""
    if step.returned:
        found = step.difference
        right = run.failed_step is None or step.step < run.failed_step
        if found is None or not found.finite:
            return format_logits(step)
        if right and found.relative < LARGE:
            return f"equal within {found.relative:.1e}" if found.relative else "equal"
        return f"off by {format_difference(found.relative)}"
    if run.died_by is not None:
        return f"ends the process ({run.died_by})"
    # The runtime looks at the types and sizes of inputs before any node runs.
    for port in contract.graph("decode" if step.phase == "decode" else "prefill").inputs:
        if (fed := step.fed.get(port.name)) is not None and port.shape is not None:
            fixed = tuple(size if isinstance(size, int) else None for size in port.shape)
            sizes = tuple(size if due is not None else None for size, due in zip(fed.shape, fixed, strict=False))
            if (fed.dtype, len(fed.shape), sizes) != (port.dtype, len(fixed), fixed):
                declared = describe(port.dtype, port.shape)
                return f"input {port.name} refused: {describe(fed.dtype, fed.shape)} fed, {declared} declared"
    return f"fails in {run.fault_node.shown}" if run.fault_node is not None else "fails"
