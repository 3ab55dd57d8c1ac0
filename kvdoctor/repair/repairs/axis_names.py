"""Gives different lengths different symbolic names.

Requires: a growing slot whose present has the axis name of its past, shapes inside the graph that make the runtime plan
its memory wrongly, or shapes that are declared and not computed.
Ensures: the length of such a present is named `past + new`, by the names of the two; if a step failed because of them,
the shapes declared inside the graph are removed, which no runtime needs. A declared shape that is not computed is
removed inside the graph, and corrected at an output. The computation is unchanged.
"""

from collections.abc import Iterator

from kvdoctor.analysis.stale_shapes import StaleShape, find_stale_shapes
from kvdoctor.contract import Slot
from kvdoctor.model.edit import describe_graph, keep_only
from kvdoctor.model.proto import ValueInfoProto
from kvdoctor.model.traverse import graphs_in
from kvdoctor.model.view import GraphView
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext, describe_type, find_declared


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Rename the axes of the presents; drop inner declarations if the finding is an error."""
    file = context.file_of("decode")
    view, changes = context.view(file), list[Change]()
    new = name_of_new_axis(context)
    for slot in context.drivable.growing:
        if slot.present is not None and slot.growth == "grow":
            changes += _rename_axis(view, slot, new, file)
    if any(finding.severity == "error" for finding in context.found("axis-name-collision")):
        dropped = 0
        for graph in graphs_in(view.model.graph):
            dropped += len(graph.value_info)
            del graph.value_info[:]
        if dropped:
            changes.append(Change(file, "shapes declared inside the graphs", f"{dropped} declarations", "none"))
    changes += _correct_stale(view, find_stale_shapes(context.stack, context.drivable), file)
    return tuple(changes)


def _correct_stale(view: GraphView, stale: tuple[StaleShape, ...], file: str) -> Iterator[Change]:
    """Take stale shapes from inside the graph; of an output the axis: one entry, or a length without a name."""
    graph = view.model.graph
    inside = {one.name for one in stale}.intersection(value.name for value in graph.value_info)
    keep_only(graph.value_info, lambda value: value.name not in inside)
    if inside:
        yield Change(file, "main graph, declared shapes that are not computed", f"{len(inside)} declarations", "none")
    for one in stale:
        for value in (value for value in graph.output if value.name == one.name):
            before = describe_type(value)
            for axis in one.axes:
                dim = value.type.tensor_type.shape.dim[axis]
                dim.Clear()
                if one.found[axis] == 1:
                    dim.dim_value = 1
            yield Change(file, f"main graph, output {one.name!r}", before, describe_type(value))


def name_of_new_axis(context: RepairContext) -> str:
    """The name of the axis of new tokens in the decode graph."""
    return str(context.drivable.graph("decode").declared_new_tokens or "sequence_length")


def _rename_axis(view: GraphView, slot: Slot, new: str, file: str) -> Iterator[Change]:
    axis = slot.axes.index("past")
    past = find_declared(view.model.graph.input, slot.past)
    output = find_declared(view.model.graph.output, slot.present)
    if output is None or not (name := _axis_name(past, axis)):
        return
    scope, inner_name = view.behind(output.name)
    inner = find_declared(scope.graph.output, inner_name) or output
    for place, value in {"main graph": output, describe_graph(view, scope.graph): inner}.items():
        if _axis_name(value, axis) == name:
            before = describe_type(value)
            value.type.tensor_type.shape.dim[axis].dim_param = f"{name} + {new}"
            yield Change(file, f"{place}, output {value.name!r}", before, describe_type(value))


def _axis_name(value: ValueInfoProto | None, axis: int) -> str:
    """The symbolic name of an axis, empty if it has none."""
    dims = value.type.tensor_type.shape.dim if value is not None else ()
    return str(dims[axis].dim_param) if axis < len(dims) else ""


REPAIR = Repair("axis-names", ("axis-name-collision",), "names", "bits", apply)
