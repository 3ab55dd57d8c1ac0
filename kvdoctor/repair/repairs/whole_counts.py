"""Counts the padding along the whole mask, and cuts the counts to the new tokens afterwards.

Requires: positions from which a count of padding is subtracted, in a graph that cuts attention_mask to the columns of
the new tokens before it counts along them.
Ensures: the count begins at the first column. Without a past both are the same, so the prefill is as it was.
"""

from kvdoctor.analysis.sliced_counts import SlicedCount, find_sliced_counts
from kvdoctor.model.edit import describe_graph, drop_unused, new_name, sort_nodes
from kvdoctor.model.proto import ModelProto, NodeProto
from kvdoctor.model.traverse import describe_node, input_of, output_of
from kvdoctor.model.view import GraphView
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import Change

INSTEAD = "export again with position_ids as an input and masks made from attention_mask"


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Move the cut of a mask after the count, in the graph that decodes."""
    file = context.file_of("decode")
    mask, model = context.drivable.graph("decode").port("attention_mask"), context.model(file)
    changes = []
    while mask is not None and (found := next(find_sliced_counts(GraphView(model), mask.name), None)) is not None:
        where = f"{describe_graph(GraphView(model), found.scope.graph)}, {describe_node(found.count)}"
        changes.append(
            Change(file, where, "counts the columns of the new tokens", "counts all columns, cut afterwards")
        )
        _move_cut(model, found)
    if not changes:
        context.cannot("no count of padding sees the columns of the new tokens alone", INSTEAD)
    return tuple(changes)


def _move_cut(model: ModelProto, found: SlicedCount) -> None:
    graph, cut = found.scope.graph, NodeProto.FromString(found.cut.SerializeToString())
    old, value = output_of(found.cut), input_of(found.cut, 0)
    before, output = input_of(found.count, 0), output_of(found.count)
    for node in reversed(found.between):
        copy = NodeProto.FromString(node.SerializeToString())
        copy.input[:] = [value if name == old else name for name in node.input]
        old, value = output_of(node), new_name(model, f"{output_of(node)}.whole")
        copy.name, copy.output[0] = value, value
        graph.node.append(copy)
    counted = new_name(model, f"{output}.whole")
    found.count.input[0], found.count.output[0] = value, counted
    cut.name, cut.input[0], cut.output[0] = new_name(model, f"{output}.cut"), counted, output
    graph.node.append(cut)
    drop_unused(graph, before)
    sort_nodes(graph)


REPAIR = Repair(
    name="whole-counts",
    checks=("padding-changes-logits",),
    stage="values",
    keeps="first-step",
    apply=apply,
    advice=("Without a change to the model: decode only sequences of the same length together.",),
)
