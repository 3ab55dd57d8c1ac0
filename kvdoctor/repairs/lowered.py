"""Lowers the IR version and the opset as far as the runtime needs it.

Requires: a target, or without one the runtime that is here, takes less than the model asks for, and everything that the
graph uses has a form there. Ensures: node by node the same mathematics in the older form, the smaller numbers in the
file; weights, names and all other nodes stand as they were. What has no older form is named, and nothing is changed.
"""

from dataclasses import replace

from kvdoctor.elsewhere.measuring import measured_beside
from kvdoctor.lowering import MENDS, CannotLower, lower, wanted
from kvdoctor.lowering.files import asks_more
from kvdoctor.patient import CannotRepair, Patient
from kvdoctor.repairs import Repair
from kvdoctor.report.document import Change
from kvdoctor.targets import of_release


def apply(patient: Patient) -> tuple[Change, ...]:
    """Lower the files of a stack, the encoder beside the decoder as well."""
    here = patient.running.versions.get("onnxruntime")
    targets = patient.options.targets or ((of_release(here),) if here else ())
    want = wanted(tuple(measured_beside(target, patient.running, patient.options.offline) for target in targets))
    if not patient.found("operator-unsupported"):
        want = replace(want, lacks=frozenset())  # whatever the table says, the targets have all operators
    changes: list[Change] = []
    for name in patient.files:
        if want.is_anything and asks_more(patient.view(name), want):
            try:
                changes += lower(patient.model(name), want, name)
            except CannotLower as reason:
                raise CannotRepair(f"{name}: {'; '.join(reason.blocks)}", reason.advice) from None
    return tuple(changes)


REPAIR = Repair(
    name="lowered",
    mends=MENDS,
    stage="session",
    keeps="bits",
    apply=apply,
    advice=("Run the model under an onnxruntime that takes its IR version and opset; docs/targets.md has the table.",),
)
