"""Gives lengths that differ names that differ.

Requires: a growing slot whose present bears the axis name of its past, or shapes inside the graph that lead the runtime
to plan its memory wrongly.
Ensures: the length of such a present is called `past + new`, by the names of the two; where a step failed because of
them, the shapes declared inside the graph are gone, which no runtime needs. Nothing is computed otherwise.
"""

from collections.abc import Iterator

from kvdoctor.contract import Slot, describe
from kvdoctor.graph import GraphView, declared
from kvdoctor.onnx_schema import ValueInfoProto
from kvdoctor.repairs import Change, Patient, Repair
from kvdoctor.rewiring import place_of, returned_in
from kvdoctor.scoping import graphs


def apply(patient: Patient) -> tuple[Change, ...]:
    """Rename the axes of the presents; drop inner declarations where the finding is an error."""
    file = patient.file_of("decode")
    view, changes = patient.view(file), list[Change]()
    new = new_axis(patient)
    for slot in patient.drivable.growing:
        if slot.present is not None and slot.growth == "grow":
            changes += _renamed(view, slot, new, file)
    if any(finding.severity == "error" for finding in patient.found("axis-name-collision")):
        dropped = 0
        for graph in graphs(view.model.graph):
            dropped += len(graph.value_info)
            del graph.value_info[:]
        if dropped:
            changes.append(Change(file, "shapes declared inside the graphs", f"{dropped} declarations", "none"))
    return tuple(changes)


def new_axis(patient: Patient) -> str:
    """What the decode graph calls the number of new tokens."""
    graph = patient.drivable.graph("decode")
    port = graph.port("token_ids") or graph.port("embeddings")
    if port is not None and port.shape is not None and "new" in port.axes:
        return str(port.shape[port.axes.index("new")] or "sequence_length")
    return "sequence_length"


def _renamed(view: GraphView, slot: Slot, new: str, file: str) -> Iterator[Change]:
    axis = slot.axes.index("past")
    past = next(value for value in view.model.graph.input if value.name == slot.past)
    output = next((value for value in view.model.graph.output if value.name == slot.present), None)
    if output is None or (name := _axis(past, axis)) is None:
        return
    graph, inner_name = returned_in(view, output.name)
    inner = next((value for value in graph.output if value.name == inner_name), output)
    for place, value in {"main graph": output, place_of(view, graph): inner}.items():
        if _axis(value, axis) == name:
            before = describe(declared(value).dtype, declared(value).shape)
            value.type.tensor_type.shape.dim[axis].dim_param = f"{name} + {new}"
            after = describe(declared(value).dtype, declared(value).shape)
            yield Change(file, f"{place}, output {value.name!r}", before, after)


def _axis(value: ValueInfoProto, axis: int) -> str | None:
    """The symbolic name of an axis."""
    dims = value.type.tensor_type.shape.dim
    return str(dims[axis].dim_param) or None if axis < len(dims) else None


REPAIR = Repair(name="axis-names", mends=("axis-name-collision",), stage="names", keeps="bits", apply=apply)
