"""Returns as present what the attention of the same step uses: the past and behind it the new entries.

Requires: the step joins the past with its new entries in the graph itself (Concat along the length, or an attention
operator that returns its present), once for each slot, and computes its logits from that.
Ensures: every present of such a slot is that value; logits, names and declarations stand as they were.
"""

from collections.abc import Iterator

from kvdoctor.cache_operators import ports_of
from kvdoctor.contract import Slot
from kvdoctor.graph import GraphView
from kvdoctor.onnx_schema import GraphProto, NodeProto
from kvdoctor.repairs import Change, Patient, Repair
from kvdoctor.rewiring import in_words, needs, place_of, producer, readers, return_value, returned_in

INSTEAD = "export again, so that present = past followed by the new tokens"


def apply(patient: Patient) -> tuple[Change, ...]:
    """Lead the right value to every present of a growing slot that is another one."""
    contract, file = patient.drivable, patient.file_of("decode")
    logits = contract.graph("decode").port("logits")
    slots = [slot for slot in contract.of_kind("self-attention") if slot.present and slot.growth in ("grow", "shared")]
    if logits is None or not slots:
        patient.cannot("no slot grows, or the graph gives no logits to tell the right value by", INSTEAD)
    changes: list[Change] = []
    for slot in slots:
        changes += _mended(patient, patient.view(file), slot, logits.name, file)
    if not changes:
        patient.cannot(
            "every present is what the attention of the step uses: the fault lies in what it computes", INSTEAD
        )
    return tuple(changes)


def _mended(patient: Patient, view: GraphView, slot: Slot, logits: str, file: str) -> Iterator[Change]:
    graph, name = returned_in(view, slot.present or "")
    used_graph, used_name = returned_in(view, logits)
    if graph is not used_graph or producer(graph, name) is None:
        patient.cannot(f"{slot.present} is not made in the graph that makes the logits", INSTEAD)
    right = joined(graph, slot, needs(graph, used_name))
    if len(right) != 1:
        count = "no" if not right else f"{len(right)}"
        patient.cannot(f"{count} places of the graph join {slot.past} with new entries for the attention", INSTEAD)
    if _source(graph, name) == right[0]:
        return
    before, after = in_words(graph, name), in_words(graph, right[0])
    return_value(view.model, graph, name, right[0])
    yield Change(
        file, f"{place_of(view, graph)}, output {slot.present!r}", before, f"Identity({right[0]}), made by {after}"
    )


def joined(graph: GraphProto, slot: Slot, used: set[str]) -> list[str]:
    """The values that hold the past of a slot with the new entries behind it, and that the logits hang on."""
    found = list[str]()
    for value in _aliases(graph, slot.past):
        for node, index in readers(graph, value):
            made = _joins(node, index)
            if made and made not in found and not used.isdisjoint(node.output):
                found.append(made)
    return found


def _joins(node: NodeProto, index: int) -> str | None:
    """The output of a node that carries the past at that input on with the new entries behind it."""
    if node.op_type == "Concat" and not node.domain:
        # New entries stand behind the past: what is joined in front of it is another thing.
        return str(node.output[0]) if index == 0 and len(node.input) == 2 else None
    ports = ports_of(node.domain if node.domain != "ai.onnx" else "", node.op_type)
    if ports is None or index not in ports.pasts:
        return None
    at = ports.pasts[index][1]
    return str(node.output[at]) if at < len(node.output) and node.output[at] else None


def _aliases(graph: GraphProto, name: str) -> list[str]:
    """A value and what Identity makes of it."""
    names = [name]
    for known in names:
        names += [str(node.output[0]) for node, _ in readers(graph, known) if node.op_type == "Identity"]
    return names


def _source(graph: GraphProto, name: str) -> str:
    """What stands behind Identity."""
    for _ in range(len(graph.node)):
        node = producer(graph, name)
        if node is None or node.op_type != "Identity":
            break
        name = node.input[0]
    return name


REPAIR = Repair(
    name="joined-presents",
    mends=(
        "cached-differs",
        "present-drops-past",
        "present-does-not-grow",
        "present-rewrites-past",
        "layers-swapped",
        "key-value-swapped",
    ),
    stage="slots",
    keeps="first-step",
    apply=apply,
    advice=("Where only the past is missing (present-drops-past), append what is returned to what you hold.",),
)
