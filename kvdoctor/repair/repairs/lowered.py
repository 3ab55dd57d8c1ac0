"""Lowers the IR version and the opset to what the runtime accepts.

Requires: a target, or without one the local runtime, accepts less than the model asks for, and every operator of the
graph has a form there.
Ensures: node by node the same computation in the older form, and the lower versions in the file; weights, names and all
other nodes stay as they are. If something has no older form it is named, and nothing is changed.
"""

from dataclasses import replace

from kvdoctor.repair.lowering.limits import LOWERED_CHECKS, CannotChangeVersion, exceeds, limit_for_targets
from kvdoctor.repair.lowering.lower import lower_model
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import CannotRepair, Change, RepairContext
from kvdoctor.runtime.release_environments import measure_limits_beside
from kvdoctor.runtime.targets import of_release


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Lower the files of a stack, including the encoder next to the decoder."""
    here = context.running.versions.get("onnxruntime")
    targets = context.options.targets or ((of_release(here),) if here else ())
    measured = (measure_limits_beside(target, context.running, context.options.offline) for target in targets)
    want = limit_for_targets(tuple(measured))
    if not context.found("operator-unsupported"):  # the targets have all operators, whatever the table says
        want = replace(want, unsupported=frozenset())
    changes: list[Change] = []
    for name in context.files:
        if want.is_anything and exceeds(context.view(name), want):
            try:
                changes += lower_model(context.model(name), want, name)
            except CannotChangeVersion as reason:
                raise CannotRepair(f"{name}: {'; '.join(reason.blocks)}", reason.advice) from None
    return tuple(changes)


ADVICE = ("Run the model under an onnxruntime that takes its IR version and opset; docs/targets.md has the table.",)
# ir-too-new, opset-too-new, operator-unsupported: `load_for_check` looks for the names here
REPAIR = Repair("lowered", LOWERED_CHECKS, "session", "bits", apply, ADVICE)
