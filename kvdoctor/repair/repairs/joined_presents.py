"""Returns as present the value that the attention of the same step uses: the past followed by the new entries.

Requires: the step joins the past with its new entries in the graph itself (Concat along the length, or an attention
operator that returns its present), once for each slot, and computes its logits from that.
Ensures: every present of such a slot is that value; logits, names and declarations stay as they are.
"""

from collections.abc import Mapping

from kvdoctor.contract import Slot
from kvdoctor.model.edit import describe_graph, describe_maker, return_values
from kvdoctor.model.operators import has, ports_of
from kvdoctor.model.proto import GraphProto, NodeProto
from kvdoctor.model.traverse import Readers, input_of, needed_for, output_of, producers, readers
from kvdoctor.records import record
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext

INSTEAD = "export again, so that present = past followed by the new tokens"


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Return the joined value for every present of a growing slot that returns another value."""
    contract, file = context.drivable, context.file_of("decode")
    logits = contract.graph("decode").port("logits")
    slots = [slot for slot in contract.of_kind("self-attention") if slot.present and slot.growth in ("grow", "shared")]
    if logits is None or not slots:
        context.cannot("no slot grows, or the graph returns no logits that would show the right value", INSTEAD)
    view = context.view(file)
    scope, used_name = view.behind(logits.name)
    graph = scope.graph
    joined, made = JoinedValues.of(graph, used_name), producers(graph)
    values: dict[str, str] = {}
    changes: list[Change] = []
    for slot in slots:
        behind, name = view.behind(slot.present or "")
        if behind.graph is not graph or name not in made:
            context.cannot(f"{slot.present} is not computed in the graph that computes the logits", INSTEAD)
        right = joined.find(slot)
        if len(right) != 1:
            count = "no" if not right else f"{len(right)}"
            context.cannot(f"{count} nodes join {slot.past} with new entries for the attention", INSTEAD)
        if _skip_identities(made, name) != right[0]:
            values[name] = right[0]
            after = f"Identity({right[0]}), from {describe_maker(graph, right[0])}"
            where = f"{describe_graph(view, graph)}, output {slot.present!r}"
            changes.append(Change(file, where, describe_maker(graph, name), after))
    if not changes:
        context.cannot("every present is the value that the attention uses: the fault is in its computation", INSTEAD)
    return_values(view.model, graph, values)
    return tuple(changes)


@record
class JoinedValues:
    """The values of a graph that hold a past followed by the new entries.

    Attributes:
        readers: The nodes that read each value.
        used: The values that the logits depend on.
    """

    readers: Readers
    used: set[str]

    @classmethod
    def of(cls, graph: GraphProto, logits: str) -> "JoinedValues":
        """Those of a graph that computes logits of that name."""
        return cls(readers(graph), needed_for(graph, [logits]))

    def find(self, slot: Slot) -> list[str]:
        """The values that hold the past of a slot followed by the new entries, and that the logits depend on."""
        found, names = list[str](), [slot.past]
        for value in names:  # and its copies by Identity
            for node, index in self.readers.get(value, ()):
                made = _joined_output(node, index)
                if made and made not in found and not self.used.isdisjoint(node.output):
                    found.append(made)
                names += [output_of(node)] if has(node.op_type, "copy") and output_of(node) else []
        return found


def _joined_output(node: NodeProto, index: int) -> str | None:
    """The output of a node that holds the past at that input followed by the new entries."""
    if has(node.op_type, "join") and not node.domain:
        # New entries follow the past: a Concat in front of it has another meaning.
        return output_of(node) or None if index == 0 and len(node.input) == 2 else None
    ports = ports_of(node.domain, node.op_type)
    if ports is None or index not in ports.pasts:
        return None
    at = ports.pasts[index][1]
    return str(node.output[at]) if at < len(node.output) and node.output[at] else None


def _skip_identities(made: Mapping[str, NodeProto], name: str) -> str:
    """The value that Identity nodes pass on."""
    for _ in made:
        node = made.get(name)
        if node is None or not has(node.op_type, "copy"):
            break
        name = input_of(node, 0)
    return name


CHECKS = (
    *("cached-differs", "cache-misread", "new-entries-wrong", "present-drops-past", "present-does-not-grow"),
    *("present-rewrites-past", "layers-swapped", "key-value-swapped"),
)
ADVICE = ("If only the past is missing (present-drops-past), append the returned entries to your cache.",)
REPAIR = Repair("joined-presents", CHECKS, "slots", "first-step", apply, ADVICE)
