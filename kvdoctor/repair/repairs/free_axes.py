"""Frees the batch, the past length or the number of new tokens where it is declared or baked in as a number.

Requires: `batch-axis-frozen`, `past-axis-frozen` or `sequence-axis-frozen`, in a graph whose numbers show which of them
stand for the length: at any other length, something could not be added, joined or reshaped. Values that were computed
for the traced length (rows of a table of positions, distances) must not be folded into the graph: what they were
computed from is not in the file.
Ensures: inputs and outputs declare the length by a name; the numbers that stood for it are computed from the shapes of
the inputs; at the traced length every output is equal to the original's, bit for bit.
"""

from collections.abc import Callable

from kvdoctor.contract import Axis
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.shapes.agreement import free_axis
from kvdoctor.repair.workspace import Change, RepairContext

AXES: tuple[tuple[str, str, Axis, str], ...] = (
    ("free-batch", "batch-axis-frozen", "batch", "the number of sequences"),
    ("free-past", "past-axis-frozen", "past", "the length of the past"),
    ("free-sequence", "sequence-axis-frozen", "new", "the number of new tokens"),
)
ADVICE = ("Without a change to the model: only steps at exactly that length work.",)
TITLE = "Frees {} if it is declared or baked into the graph as a number."


def _freeing(check: str, axis: Axis) -> Callable[[RepairContext], tuple[Change, ...]]:
    return lambda context: free_axis(context, check, axis)


REPAIRS = tuple(
    Repair(name, (check,), "axes", "sizes", _freeing(check, axis), ADVICE, TITLE.format(what))
    for name, check, axis, what in AXES
)
