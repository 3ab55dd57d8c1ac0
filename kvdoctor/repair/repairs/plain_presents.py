"""Returns keys and values as the attention uses them, without post-processing that is applied only to the output.

Requires: a present that elementwise operators (rounding, clipping, scaling, a cast to another type and back) compute
from a value that the logits depend on too.
Ensures: the present is that value; the logits of the same call stay as they are.
"""

from collections.abc import Iterator

from kvdoctor.analysis.processed_presents import find_processed
from kvdoctor.contract import Slot
from kvdoctor.model.edit import describe_graph, describe_maker, return_value
from kvdoctor.model.view import GraphView
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext

INSTEAD = "export again, so that each present is the value that the attention used"


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Repair the outputs of the first step and of a decode step."""
    contract, changes = context.drivable, list[Change]()
    for phase, file in context.graphs():
        port = contract.graph(phase).port("logits")
        for slot in contract.slots if port is not None else ():
            output = slot.present if phase == "decode" else slot.filled_by
            view = context.view(file)
            if port is not None and output in view.outputs and slot.kind in ("self-attention", "cross-attention"):
                changes += _repair_output(view, slot, output, (file, phase == "decode"), port.name)
    if not changes:
        context.cannot("no present is post-processed on its way to the output alone", INSTEAD)
    return tuple(changes)


def _repair_output(view: GraphView, slot: Slot, output: str, at: tuple[str, bool], logits: str) -> Iterator[Change]:
    file, cached = at
    found = find_processed(view, output, logits, cached=cached)
    if found is None or (slot.emptied and cached):
        return
    before = describe_maker(found.graph, found.name)
    return_value(view.model, found.graph, found.name, found.used)
    where = f"{describe_graph(view, found.graph)}, output {output!r}"
    yield Change(file, where, before, f"Identity({found.used}), which the attention uses")


CHECKS = ("cached-differs", "cache-misread", "new-entries-wrong", "present-rewrites-past")
REPAIR = Repair("plain-presents", CHECKS, "slots", "first-step", apply)
