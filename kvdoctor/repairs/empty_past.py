"""Lets Reshapes take a past of length 0.

Requires: `empty-past-rejected`, and a Reshape on the way whose target cannot be worked out, or means another axis,
where the past is empty: a -1 beside a 0, or a computed 0 that the operator takes for "copy this axis".
Ensures: the target gives the axes that it gives at every other length; nothing else is changed.
"""

from kvdoctor.patient import CannotRepair, Patient
from kvdoctor.repairs import Repair
from kvdoctor.report.document import Change
from kvdoctor.sizing.axes import EXPORT_AGAIN, changes, graph_of, held
from kvdoctor.sizing.emptiness import make_room
from kvdoctor.sizing.freeing import NotFreed


def apply(patient: Patient) -> tuple[Change, ...]:
    """Rewrite the targets of such Reshapes in the graph that takes the first step."""
    file = patient.file_of("prefill")
    try:
        edits = make_room(patient.model(file), graph_of(patient, file))
    except NotFreed as reason:
        raise CannotRepair(str(reason), EXPORT_AGAIN) from None
    if not edits:
        raise CannotRepair("no Reshape fails for an empty past: what does cannot be told to take one", EXPORT_AGAIN)
    held(patient, file)
    return changes(file, edits)


REPAIR = Repair(
    name="empty-past",
    mends=("empty-past-rejected",),
    stage="axes",
    keeps="bits",
    apply=apply,
    advice=("Feed the first step a past of one row that the attention mask hides, where the model has a mask.",),
)
