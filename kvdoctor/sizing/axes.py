"""The repairs that free an axis: which files they concern, what they change there, and the first proof."""

from collections.abc import Mapping
from pathlib import Path

from kvdoctor.contract import Axis, Graph
from kvdoctor.errors import WorkerDied
from kvdoctor.patient import CannotRepair, Patient
from kvdoctor.report.document import Change
from kvdoctor.sizing.agreement import Differs, hold_against
from kvdoctor.sizing.freeing import Edit, NotFreed, free

EXPORT_AGAIN = "export again with dynamic axes, and with sample sizes of 2 or more, all different"


def freed(patient: Patient, check: str, kind: Axis) -> tuple[Change, ...]:
    """Free one kind of axis in every file where the check found it frozen, and it is not meant so.

    Raises:
        CannotRepair: a graph does not tell what it would have to compute at other lengths.
    """
    files = dict.fromkeys(f.file for f in patient.found(check) if f.severity != "note" and f.file is not None)
    return tuple(change for file in files for change in freed_in(patient, file, (kind,)))


def freed_in(patient: Patient, file: str, kinds: tuple[Axis, ...]) -> tuple[Change, ...]:
    """Free axes of one file, and hold it against the original at the sizes of the trace.

    Raises:
        CannotRepair: the graph does not tell, or what came out computes something else.
    """
    graph, model = graph_of(patient, file), patient.model(file)
    if any(slot.window is not None or slot.trimmed for slot in patient.drivable.slots):
        raise CannotRepair(
            "a window hides older tokens: of a mask that was traced it does not show how far", EXPORT_AGAIN
        )
    try:
        edits = free(model, graph, kinds, lambda tensor: patient.values(file, tensor))
    except NotFreed as reason:
        raise CannotRepair(str(reason), EXPORT_AGAIN) from None
    if edits and not held(patient, file):
        raise CannotRepair(f"{file} runs at no size, so that there is nothing to hold the change against", EXPORT_AGAIN)
    return changes(file, edits)


def graph_of(patient: Patient, file: str) -> Graph:
    """What the contract says of the graph in a file."""
    return next(graph for graph in patient.drivable.graphs.values() if graph.file == file)


def held(patient: Patient, file: str, sizes: Mapping[Axis, int] | None = None) -> int:
    """Hold a changed file against the original, at the sizes that this takes; in how many calls that could be done.

    Raises:
        CannotRepair: at the sizes that the original takes it computes something else.
    """
    source, graph = Path(patient.copy.file(file).path), graph_of(patient, file)
    try:
        provider = patient.options.provider
        return hold_against(source, patient.model(file), graph, runtime=patient.running, provider=provider, sizes=sizes)
    except Differs as reason:
        raise CannotRepair(f"{file}, changed so: {reason}", EXPORT_AGAIN) from None
    except WorkerDied as death:
        raise CannotRepair(f"the runtime did not live through the changed graph: {death.how}", EXPORT_AGAIN) from None


def changes(file: str, edits: tuple[Edit, ...]) -> tuple[Change, ...]:
    """Edits as the report shows them."""
    return tuple(Change(file, edit.where, edit.before, edit.after) for edit in edits)
