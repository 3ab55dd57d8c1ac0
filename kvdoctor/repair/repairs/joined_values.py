"""Repairs of presents that are not the past with the new entries."""

from collections.abc import Mapping, Sequence

from kvdoctor.analysis.configs import declared_windows
from kvdoctor.analysis.dialects.dialect import find_dialect
from kvdoctor.analysis.proof.prove import looks_back_to_start
from kvdoctor.contract import Slot
from kvdoctor.model.edit import describe_graph, describe_maker, new_name, rename_values, return_values, set_size
from kvdoctor.model.operators import Trait, has, ports_of
from kvdoctor.model.proto import GraphProto, NodeProto
from kvdoctor.model.traverse import (
    Readers,
    find_attribute,
    input_of,
    needed_for,
    output_of,
    own_names,
    producers,
    readers,
)
from kvdoctor.records import record
from kvdoctor.repair.repairs.declarations import name_of_new_axis
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext, describe_type, find_declared

JOINS: tuple[Trait, ...] = ("add", "write", "select", "join")
MOVES: tuple[Trait, ...] = ("copy", "permute")
KEEPS: tuple[Trait, ...] = (*MOVES, "cast", "elementwise", "pick")
"""What may stand between a buffer and its attention: new entries come in; axes move; entries are copied or left out."""

INSTEAD = "export again, so that present = past followed by the new tokens"
WINDOW = "let the graph retain as many of the latest entries as the attention looks back over, or export again"


def return_joined(context: RepairContext) -> tuple[Change, ...]:
    """Returns as present the value that the attention of the same step uses: the past with the new entries.

    Requires: the step joins the past with its new entries in the graph itself (Concat along the length, or an attention
    operator that returns its present), once for each slot, and computes its logits from that. Or it writes them into a
    buffer of fixed size, and returns the buffer as it was: an update through a slice was traced as a copy. Where a step
    cuts off old entries, no config declares a window, and the masks show that the attention has none.
    Ensures: every present of such a slot is that value; logits, names and declarations stay as they are.
    """
    contract, file = context.drivable, context.file_of("decode")
    logits = contract.graph("decode").port("logits")
    slots = [
        slot
        for slot in contract.of_kind("self-attention")
        if slot.present and (slot.growth in ("grow", "shared") or (slot.growth == "static" and slot.takes_new is False))
    ]
    if logits is None or not slots:
        context.cannot("no slot grows, or the graph returns no logits that would show the right value", INSTEAD)
    view = context.view(file)
    scope, used_name = view.behind(logits.name)
    graph = scope.graph
    tokens = [p.name for p in contract.graph("decode").inputs if p.role in ("token_ids", "embeddings")]
    joined, made = JoinedValues.of(graph, used_name, tokens), producers(graph)
    values: dict[str, str] = {}
    changes: list[Change] = []
    config = context.copy.folder.side_cars.config
    for slot in slots:
        behind, name = view.behind(slot.present or "")
        if behind.graph is not graph or name not in made:
            context.cannot(f"{slot.present} is not computed in the graph that computes the logits", INSTEAD)
        right = joined.find(slot)
        if len(right) != 1:
            count = "no" if not right else f"{len(right)}"
            context.cannot(f"{count} nodes join {slot.past} with new entries for the attention", INSTEAD)
        if _skip_identities(made, name) != right[0]:
            if slot.trimmed and (declared_windows(config) or not looks_back_to_start(context.stack, contract)):
                context.cannot(f"{slot.present} is cut to a window, and nothing shows that none is meant", WINDOW)
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
    """The values of a graph that hold a past with the new entries.

    Attributes:
        readers: The nodes that read each value.
        used: The values that the logits depend on.
        new: The values that depend on the tokens of the step, and not on their number alone.
    """

    readers: Readers
    used: set[str]
    new: set[str]

    @classmethod
    def of(cls, graph: GraphProto, logits: str, tokens: Sequence[str] = ()) -> "JoinedValues":
        """Those of a graph that computes logits of that name from `tokens`."""
        reading, new = readers(graph), list(tokens)
        known = set(new)
        for name in new:
            for node, _ in reading.get(name, ()):
                outputs = {*node.output} - known if not has(node.op_type, "measure", "sizes") else ()
                known.update(outputs)
                new += outputs
        return cls(reading, needed_for(graph, [logits]), known)

    def find(self, slot: Slot) -> list[str]:
        """The values that hold the past of a slot with the new entries, and that the logits depend on."""
        if slot.growth == "static":
            return self._find_written(slot.past, len(slot.axes))
        found, names = list[str](), [slot.past]
        for value in names:  # and its copies by Identity
            for node, index in self.readers.get(value, ()):
                made = _joined_output(node, index)
                if made and made not in found and not self.used.isdisjoint(node.output):
                    found.append(made)
                names += [output_of(node)] if has(node.op_type, "copy") and output_of(node) else []
        return found

    def _find_written(self, past: str, rank: int) -> list[str]:
        """Where what is retained of a buffer first meets values of the new tokens, under the axes of the buffer."""
        usual = tuple(range(rank))
        found, seen, front = list[str](), {past}, [(past, usual, False)]
        for value, axes, written in front:
            if written and axes == usual:
                found += [value]
                continue
            for node, _ in self.readers.get(value, ()):
                output, joins = output_of(node), not written and not self.new.isdisjoint(node.input)
                passing = JOINS if joins else MOVES if written else KEEPS
                if output in self.used and output not in seen and has(node.op_type, *passing):
                    seen.add(output)
                    front.append((output, _permute(node, axes), written or joins))
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


def _permute(node: NodeProto, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a buffer, in the order in which they are after a node."""
    if not has(node.op_type, "permute"):
        return axes
    order = find_attribute(node, "perm")
    places = order.ints if order is not None else range(len(axes))[::-1]
    return tuple(axes[at] for at in places) if sorted(places) == list(range(len(axes))) else ()


def _skip_identities(made: Mapping[str, NodeProto], name: str) -> str:
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


APPEND_ADVICE = ("If only the past is missing (present-drops-past), append the returned entries to your cache.",)


OUTPUTS = "export again with an output for each past"


def add_presents(context: RepairContext) -> tuple[Change, ...]:
    """Returns the caches that a decode step computes but does not return.

    Requires: one graph for all steps, or the decode graph of a pair; a past that the step joins with its new entries
    for its attention; and an exporter whose naming scheme gives the present a name that no output has yet.
    Ensures: the joined value is a further output, declared like the past with a length of its own; nothing else is
    changed.
    """
    contract, file = context.drivable, context.file_of("decode")
    view, logits = context.view(file), contract.graph("decode").port("logits")
    if view.branches is not None or logits is None:
        context.cannot(
            "both branches of a merged decoder must return the present, and one branch does not compute it", OUTPUTS
        )
    wanted = [s for s in contract.slots if s.present is None and s.kind == "self-attention" and not s.is_given]
    dialect = find_dialect(view.inputs)
    names = {name.past: name.present for name in dialect.find_slots(view.inputs)} if dialect is not None else {}
    joined, found = JoinedValues.of(view.model.graph, logits.name), list[tuple[Slot, str, str]]()
    for slot in wanted:
        values, name = joined.find(slot), names.get(slot.past)
        if name is None or name in view.outputs:
            context.cannot(f"the name of the present of {slot.past} is not known", OUTPUTS)
        if len(values) != 1:
            context.cannot(f"the step does not join {slot.past} with its new entries in exactly one place", OUTPUTS)
        found.append((slot, str(name), values[0]))
    if not wanted:
        context.cannot(
            "the past inputs without a present are no caches of tokens, or their first value is not computed", OUTPUTS
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
    set_size(dim, f"{length} + {new}")
    text = f"{describe_type(output)}, {text}"
    return Change(file, f"main graph, outputs, {name!r}", f"no output returns {slot.past}", text)


REPAIRS = (
    Repair("joined-presents", CHECKS, "slots", "first-step", return_joined, APPEND_ADVICE),
    Repair("added-presents", ("past-without-present",), "slots", "first-step", add_presents),
)
