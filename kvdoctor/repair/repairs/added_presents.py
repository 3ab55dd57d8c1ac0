"""Returns the caches that a decode step computes but does not return.

Requires: one graph for all steps, or the decode graph of a pair; a past that the step joins with its new entries for
its attention; and an exporter whose naming scheme gives the present a name that no output has yet.
Ensures: the joined value is a further output, declared like the past with a length of its own; nothing else is changed.
"""

from kvdoctor.analysis.dialects.dialect import find_dialect
from kvdoctor.contract import Slot
from kvdoctor.model.edit import describe_maker, new_name, rename_values
from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import own_names
from kvdoctor.repair.repairs.axis_names import name_of_new_axis
from kvdoctor.repair.repairs.joined_presents import JoinedValues
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext, describe_type, find_declared

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
    return tuple(_add_present(context, file, *one) for one in found)


def _add_present(context: RepairContext, file: str, slot: Slot, name: str, value: str) -> Change:
    model = context.model(file)
    graph, new = model.graph, name_of_new_axis(context)
    text = f"from {describe_maker(graph, value)}"
    if value != name:
        if name in own_names(graph):
            rename_values(graph, {name: new_name(model, f"{name}.inner")})
        node = NodeProto(op_type="Identity", name=new_name(model, f"{name}.added"), input=[value], output=[name])
        graph.node.append(node)
        text = f"Identity({value}), {text}"
    output = graph.output.add()
    output.CopyFrom(find_declared(graph.input, slot.past))
    output.name = name
    dim = output.type.tensor_type.shape.dim[slot.axes.index("past")]
    length = dim.dim_param or "past_sequence_length"
    dim.Clear()
    dim.dim_param = f"{length} + {new}"
    text = f"{describe_type(output)}, {text}"
    return Change(file, f"main graph, outputs, {name!r}", f"no output returns {slot.past}", text)


REPAIR = Repair("added-presents", ("past-without-present",), "slots", "first-step", apply)
