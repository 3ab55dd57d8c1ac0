"""Counts positions from the length of the past on.

Requires: `positions-not-offset`, and a graph that numbers its new tokens by a Range from 0, or takes the first rows of
a table of positions.
Ensures: they are counted from the length of the past on. Where there is no past that changes nothing, so that the run
without a cache is what it was, and the steps can be held against it.
"""

from kvdoctor.patient import CannotRepair, Patient
from kvdoctor.repairs import Repair
from kvdoctor.report.document import Change
from kvdoctor.sizing.axes import EXPORT_AGAIN, changes, graph_of
from kvdoctor.sizing.offsets import offset


def apply(patient: Patient) -> tuple[Change, ...]:
    """Number the new tokens from the past on, in the graph that decodes."""
    file = patient.file_of("decode")
    edits = offset(patient.model(file), graph_of(patient, file), of_mask=False)
    if not edits:
        raise CannotRepair("nothing in the graph counts positions from 0", EXPORT_AGAIN)
    return changes(file, edits)


REPAIR = Repair(
    name="offset-positions",
    mends=("positions-not-offset",),
    stage="values",
    keeps="first-step",
    apply=apply,
)
