"""Frees the batch, the past length or the number of new tokens where it is declared or baked in as a number.

Requires: `batch-axis-frozen`, `past-axis-frozen` or `sequence-axis-frozen`, in a graph whose numbers show which of them
stand for the length: at any other length, something could not be added, joined or reshaped. Values that were computed
for the traced length (rows of a table of positions, distances) must not be folded into the graph: what they were
computed from is not in the file.
Ensures: inputs and outputs declare the length by a name; the numbers that stood for it are computed from the shapes of
the inputs; at the traced length every output is equal to the original's, bit for bit.
"""

from kvdoctor.contract import Axis
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.shapes.agreement import free_axis
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import Change


def _declare_repair(name: str, check: str, axis: Axis, what: str) -> Repair:
    def apply(context: RepairContext) -> tuple[Change, ...]:
        """Free the axis in every graph that the check names."""
        return free_axis(context, check, axis)

    return Repair(
        name=name,
        checks=(check,),
        stage="axes",
        keeps="sizes",
        apply=apply,
        advice=("Without a change to the model: only steps at exactly that length work.",),
        title=f"Frees {what} if it is declared or baked into the graph as a number.",
    )


REPAIRS = (
    _declare_repair("free-batch", "batch-axis-frozen", "batch", "the number of sequences"),
    _declare_repair("free-past", "past-axis-frozen", "past", "the length of the past"),
    _declare_repair("free-sequence", "sequence-axis-frozen", "new", "the number of new tokens"),
)
