"""Frees lengths that the graph declares to be of any size, and that numbers inside it hold at one.

Requires: a step that fails (`step-fails`, `chunk-fails`) in a graph in which a length meets a number that it cannot
equal: in a Reshape, an Expand, an addition, a concatenation. Supposing that the length was that number when the graph
was traced must leave nothing that clashes.
Ensures: the numbers that stood for the length are computed from the shapes of the inputs, or left to be copied; at the
sizes of the trace every output is what it was, bit for bit.
"""

from kvdoctor.patient import CannotRepair, Patient
from kvdoctor.repairs import Repair
from kvdoctor.report.document import Change
from kvdoctor.sizing.axes import EXPORT_AGAIN, changes, graph_of, held
from kvdoctor.sizing.baked import unbake
from kvdoctor.sizing.freeing import NotFreed

CHECKS = ("step-fails", "chunk-fails")


def apply(patient: Patient) -> tuple[Change, ...]:
    """Free what is baked into each file in which a step fails."""
    made: tuple[Change, ...] = ()
    for file in dict.fromkeys(f.file for f in patient.found(*CHECKS) if f.file is not None):
        model = patient.model(file)
        try:
            found = unbake(model, graph_of(patient, file), lambda tensor, file=file: patient.values(file, tensor))  # type: ignore[misc]
        except NotFreed as reason:
            raise CannotRepair(str(reason), EXPORT_AGAIN) from None
        held(patient, file, found.traced)
        made += changes(file, found.edits)
    return made


REPAIR = Repair(
    name="free-baked-sizes",
    mends=CHECKS,
    stage="axes",
    keeps="bits",
    apply=apply,
    advice=("Without a change to the model: only calls of the sizes it was traced at can be made.",),
)
