"""Returns the caches that a decode step makes and does not return.

Requires: one graph for all steps, or the decode graph of a pair; a past that the step joins with its new entries for
its attention, and whose present has a name by the exporter's table of names, which no output bears yet.
Ensures: that value is an output more, declared as the past with a length of its own; nothing else is changed.
"""

from kvdoctor.contract import Slot, describe
from kvdoctor.dialects import spoken
from kvdoctor.graph import GraphView, declared
from kvdoctor.onnx_schema import GraphProto, NodeProto, ValueInfoProto
from kvdoctor.repairs import Change, Patient, Repair
from kvdoctor.repairs.axis_names import new_axis
from kvdoctor.repairs.joined_presents import joined
from kvdoctor.rewiring import fresh, in_words, made_in, needs, rename_values

INSTEAD = "export again, so that each past is returned"


def apply(patient: Patient) -> tuple[Change, ...]:
    """Add the outputs of all slots that lack them, or none."""
    contract, file = patient.drivable, patient.file_of("decode")
    view, logits = patient.view(file), contract.graph("decode").port("logits")
    if view.branches is not None or logits is None:
        patient.cannot("both branches of a merged decoder must return it, and one does not make it by itself", INSTEAD)
    wanted = [s for s in contract.slots if s.present is None and s.kind == "self-attention" and not s.is_given]
    dialect = spoken(view.inputs)
    names = {name.past: name.present for name in dialect.named(view.inputs)} if dialect is not None else {}
    used, found = needs(view.model.graph, logits.name), list[tuple[Slot, str, str]]()
    for slot in wanted:
        values, name = joined(view.model.graph, slot, used), names.get(slot.past)
        if name is None or name in view.outputs:
            patient.cannot(f"what the present of {slot.past} is to be called is not known", INSTEAD)
        if len(values) != 1:
            patient.cannot(f"the step does not join {slot.past} with new entries in one place", INSTEAD)
        found.append((slot, str(name), values[0]))
    if not wanted:
        patient.cannot(
            "the pasts that no output fills are no caches of tokens, or nothing makes their first value", INSTEAD
        )
    return tuple(_added(view, slot, name, value, (file, new_axis(patient))) for slot, name, value in found)


def _added(view: GraphView, slot: Slot, name: str, value: str, at: tuple[str, str]) -> Change:
    graph, (file, new) = view.model.graph, at
    text = f"made by {in_words(graph, value)}"
    if value != name:
        if name in made_in(graph):
            rename_values(graph, {name: fresh(view.model, f"{name}.inner")})
        node = NodeProto(op_type="Identity", name=fresh(view.model, f"{name}.added"), input=[value], output=[name])
        graph.node.append(node)
        text = f"Identity({value}), {text}"
    shown = declared(_declared(graph, slot, name, new))
    text = f"{describe(shown.dtype, shown.shape)}, {text}"
    return Change(file, f"main graph, outputs, {name!r}", f"no output carries {slot.past} on", text)


def _declared(graph: GraphProto, slot: Slot, name: str, new: str) -> ValueInfoProto:
    past = next(value for value in graph.input if value.name == slot.past)
    output: ValueInfoProto = graph.output.add()
    output.CopyFrom(past)
    output.name = name
    dim = output.type.tensor_type.shape.dim[slot.axes.index("past")]
    length = dim.dim_param or "past_sequence_length"
    dim.Clear()
    dim.dim_param = f"{length} + {new}"
    return output


REPAIR = Repair(name="added-presents", mends=("past-without-present",), stage="slots", keeps="first-step", apply=apply)
