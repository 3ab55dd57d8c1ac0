"""Anchors a causal mask to the past.

Requires: `mask-not-offset`, or `chunk-fails` where the mask has a column for each new token alone; and a graph that
takes the first rows of a square table, counts rows from 0 to compare them with columns, or cuts a triangle from the
first column on, while its columns are those of the whole cache.
Ensures: rows are counted from the length of the past on. Where there is no past that changes nothing, so that the run
without a cache is what it was, and the steps can be held against it.
"""

from kvdoctor.patient import CannotRepair, Patient
from kvdoctor.repairs import Repair
from kvdoctor.report.document import Change
from kvdoctor.sizing.axes import EXPORT_AGAIN, changes, graph_of
from kvdoctor.sizing.offsets import offset


def apply(patient: Patient) -> tuple[Change, ...]:
    """Count the rows of the mask from the past on, in the graph that decodes."""
    file = patient.file_of("decode")
    failing = not patient.found("mask-not-offset")
    edits = offset(patient.model(file), graph_of(patient, file), of_mask=True, only_clashing=failing)
    if not edits:
        raise CannotRepair("nothing in the graph counts the rows of a mask from 0", EXPORT_AGAIN)
    return changes(file, edits)


REPAIR = Repair(
    name="offset-mask",
    mends=("mask-not-offset", "chunk-fails"),
    stage="values",
    keeps="first-step",
    apply=apply,
    advice=("Without a change to the model: once there is a cache, give it one new token at a time.",),
)
