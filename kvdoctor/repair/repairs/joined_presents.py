"""Returns as present the value that the attention of the same step uses: the past followed by the new entries.

Requires: the step joins the past with its new entries in the graph itself (Concat along the length, or an attention
operator that returns its present), once for each slot, and computes its logits from that.
Ensures: every present of such a slot is that value; logits, names and declarations stay as they are.
"""

from collections.abc import Iterator

from kvdoctor.contract import Slot
from kvdoctor.model.cache_operators import ports_of
from kvdoctor.model.edit import describe_graph, describe_maker, return_value
from kvdoctor.model.proto import GraphProto, NodeProto
from kvdoctor.model.traverse import needed_for, producer, readers
from kvdoctor.model.view import GraphView
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import Change

INSTEAD = "export again, so that present = past followed by the new tokens"


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Return the joined value for every present of a growing slot that returns another value."""
    contract, file = context.drivable, context.file_of("decode")
    logits = contract.graph("decode").port("logits")
    slots = [slot for slot in contract.of_kind("self-attention") if slot.present and slot.growth in ("grow", "shared")]
    if logits is None or not slots:
        context.cannot("no slot grows, or the graph returns no logits that would show the right value", INSTEAD)
    changes: list[Change] = []
    for slot in slots:
        changes += _repair_present(context, context.view(file), slot, logits.name, file)
    if not changes:
        context.cannot("every present is the value that the attention uses: the fault is in its computation", INSTEAD)
    return tuple(changes)


def _repair_present(context: RepairContext, view: GraphView, slot: Slot, logits: str, file: str) -> Iterator[Change]:
    scope, name = view.behind(slot.present or "")
    used_scope, used_name = view.behind(logits)
    graph = scope.graph
    if graph is not used_scope.graph or producer(graph, name) is None:
        context.cannot(f"{slot.present} is not computed in the graph that computes the logits", INSTEAD)
    right = find_joined(graph, slot, needed_for(graph, [used_name]))
    if len(right) != 1:
        count = "no" if not right else f"{len(right)}"
        context.cannot(f"{count} nodes join {slot.past} with new entries for the attention", INSTEAD)
    if _skip_identities(graph, name) == right[0]:
        return
    before, after = describe_maker(graph, name), describe_maker(graph, right[0])
    return_value(view.model, graph, name, right[0])
    yield Change(
        file,
        f"{describe_graph(view, graph)}, output {slot.present!r}",
        before,
        f"Identity({right[0]}), from {after}",
    )


def find_joined(graph: GraphProto, slot: Slot, used: set[str]) -> list[str]:
    """The values that hold the past of a slot followed by the new entries, and that the logits depend on."""
    found = list[str]()
    for value in _find_aliases(graph, slot.past):
        for node, index in readers(graph, value):
            made = _joined_output(node, index)
            if made and made not in found and not used.isdisjoint(node.output):
                found.append(made)
    return found


def _joined_output(node: NodeProto, index: int) -> str | None:
    """The output of a node that holds the past at that input followed by the new entries."""
    if node.op_type == "Concat" and not node.domain:
        # New entries follow the past: a Concat in front of it has another meaning.
        return str(node.output[0]) if index == 0 and len(node.input) == 2 else None
    ports = ports_of(node.domain, node.op_type)
    if ports is None or index not in ports.pasts:
        return None
    at = ports.pasts[index][1]
    return str(node.output[at]) if at < len(node.output) and node.output[at] else None


def _find_aliases(graph: GraphProto, name: str) -> list[str]:
    """A value and its copies by Identity."""
    names = [name]
    for known in names:
        names += [str(node.output[0]) for node, _ in readers(graph, known) if node.op_type == "Identity"]
    return names


def _skip_identities(graph: GraphProto, name: str) -> str:
    """The value behind Identity nodes."""
    for _ in range(len(graph.node)):
        node = producer(graph, name)
        if node is None or node.op_type != "Identity":
            break
        name = node.input[0]
    return name


REPAIR = Repair(
    name="joined-presents",
    checks=(
        "cached-differs",
        "cache-misread",
        "new-entries-wrong",
        "present-drops-past",
        "present-does-not-grow",
        "present-rewrites-past",
        "layers-swapped",
        "key-value-swapped",
    ),
    stage="slots",
    keeps="first-step",
    apply=apply,
    advice=("If only the past is missing (present-drops-past), append the returned entries to your cache.",),
)
