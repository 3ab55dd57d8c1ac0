"""Returns the caches that a decode step computes but does not return.

Requires: one graph for all steps, or the decode graph of a pair; a past that the step joins with its new entries for
its attention; and an exporter whose naming scheme gives the present a name that no output has yet.
Ensures: the joined value is a further output, declared like the past with a length of its own; nothing else is changed.
"""

from kvdoctor.analysis.dialects.dialect import find_dialect
from kvdoctor.contract import Slot, describe
from kvdoctor.model.edit import describe_maker, new_name, rename_values
from kvdoctor.model.proto import GraphProto, NodeProto, ValueInfoProto
from kvdoctor.model.traverse import own_names
from kvdoctor.model.view import GraphView, declared
from kvdoctor.repair.repairs.axis_names import name_of_new_axis
from kvdoctor.repair.repairs.joined_presents import JoinedValues
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import Change

INSTEAD = "export again with an output for each past"


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Add the outputs of all slots without a present, or none."""
    contract, file = context.drivable, context.file_of("decode")
    view, logits = context.view(file), contract.graph("decode").port("logits")
    if view.branches is not None or logits is None:
        context.cannot(
            "both branches of a merged decoder must return the present, and one branch does not compute it", INSTEAD
        )
    wanted = [s for s in contract.slots if s.present is None and s.kind == "self-attention" and not s.is_given]
    dialect = find_dialect(view.inputs)
    names = {name.past: name.present for name in dialect.find_slots(view.inputs)} if dialect is not None else {}
    joined, found = JoinedValues.of(view.model.graph, logits.name), list[tuple[Slot, str, str]]()
    for slot in wanted:
        values, name = joined.find(slot), names.get(slot.past)
        if name is None or name in view.outputs:
            context.cannot(f"the name of the present of {slot.past} is not known", INSTEAD)
        if len(values) != 1:
            context.cannot(f"the step does not join {slot.past} with its new entries in exactly one place", INSTEAD)
        found.append((slot, str(name), values[0]))
    if not wanted:
        context.cannot(
            "the past inputs without a present are no caches of tokens, or their first value is not computed", INSTEAD
        )
    return tuple(
        _add_present(view, slot, name, value, (file, name_of_new_axis(context))) for slot, name, value in found
    )


def _add_present(view: GraphView, slot: Slot, name: str, value: str, at: tuple[str, str]) -> Change:
    graph, (file, new) = view.model.graph, at
    text = f"from {describe_maker(graph, value)}"
    if value != name:
        if name in own_names(graph):
            rename_values(graph, {name: new_name(view.model, f"{name}.inner")})
        node = NodeProto(op_type="Identity", name=new_name(view.model, f"{name}.added"), input=[value], output=[name])
        graph.node.append(node)
        text = f"Identity({value}), {text}"
    shown = declared(_declare_output(graph, slot, name, new))
    text = f"{describe(shown.dtype, shown.shape)}, {text}"
    return Change(file, f"main graph, outputs, {name!r}", f"no output returns {slot.past}", text)


def _declare_output(graph: GraphProto, slot: Slot, name: str, new: str) -> ValueInfoProto:
    past = next(value for value in graph.input if value.name == slot.past)
    output: ValueInfoProto = graph.output.add()
    output.CopyFrom(past)
    output.name = name
    dim = output.type.tensor_type.shape.dim[slot.axes.index("past")]
    length = dim.dim_param or "past_sequence_length"
    dim.Clear()
    dim.dim_param = f"{length} + {new}"
    return output


REPAIR = Repair(name="added-presents", checks=("past-without-present",), stage="slots", keeps="first-step", apply=apply)
