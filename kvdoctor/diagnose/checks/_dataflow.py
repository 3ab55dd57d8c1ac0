"""Not a check: what the dataflow of the decode graph says of a slot, as evidence for what the runs show."""

from collections.abc import Collection, Iterator

from kvdoctor.analysis.completeness import find_unread_loops
from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.analysis.dataflow.walks import outputs_with_content, skip_copies
from kvdoctor.contract import Slot
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.errors import CannotCheck
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.operators import has, operators_with
from kvdoctor.report.wording import shorten_names

MOST_NODES = 3
VIEWS = operators_with("copy", "cast", "view", "permute", "repeat")
"""Operators that leave entries what they are: they may stand before one of two joins alone."""

MOST_COMPARED = 8
"""Nodes that are compared before two values that may be the same."""


def describe_changes(context: ContractContext, past: str) -> tuple[str, ...]:
    """The nodes between a past and its present that change its entries or cut some off, in one line; () for none."""
    flow = _follow(context)
    slot = next((slot for slot in context.contract.slots if slot.past == past), None)
    if flow is None or slot is None or slot.present is None:
        return ()
    nodes = flow.find_changes(past, len(slot.shape), slot.present)
    changes = f"entries are changed or cut off between {past} and {slot.present}"
    return (f"{changes}: {shorten_names([*map(_name, nodes)], MOST_NODES)}",) if nodes else ()


def find_other_entries(context: ContractContext, slot: Slot) -> str | None:
    """How a step returns other entries of a slot than it uses itself, as text; None where it does not."""
    flow, rank = _follow(context), len(slot.shape)
    if flow is None or slot.present is None:
        return None
    if slot.growth == "replace" and _returns_transposed(flow, slot.past, rank, slot.present):
        return f"{slot.present} is returned with the axes of {slot.past} in another order"
    found = _find_joins(flow, slot.past, rank, slot.present)
    if found is None:
        return None
    return f"the step uses {_name(found[1])}, but returns {_name(found[0])} as {slot.present}"


def describe_rounded(context: ContractContext, past: str | None = None) -> tuple[str, ...]:
    """The nodes that round the present of a slot, or the first one that is rounded, on the way out; () for none."""
    wanted = next((slot.present for slot in context.contract.slots if slot.past == past), None)
    for name, processed in context.rounded_presents.items():
        if past is None or name == wanted:
            text = f"rounded between the attention and {name}: {', '.join(processed.words)}"
            cuts = any(has(node.op_type, "quantize") for node in processed.rounding)
            return (text + ("; it would also cut off entries beyond the range of its scale" if cuts else ""),)
    return ()


def describe_unread(context: ContractContext) -> tuple[str, ...]:
    """The pasts that no logit of a decode step depends on, with an attention that should read one; () for none."""
    flow, logits = _follow(context), context.contract.graph("decode").port("logits")
    if flow is None or logits is None or logits.name not in flow.flow.results:
        return ()
    behind = flow.descent.ancestors(flow.flow.results[logits.name])
    unread = [slot for slot in context.contract.of_kind("self-attention") if slot.past not in behind]
    if not unread:
        return ()
    uses = (flow.state(slot.past, len(slot.shape)).use for slot in unread)
    site = next((use.site for use in uses if use is not None), None)
    where = f": {_name(flow.flow.nodes[site])} reads the new entries alone" if site is not None else ""
    return (f"no logit depends on {shorten_names(tuple(slot.past for slot in unread))}{where}",)


def find_exchanged_entries(context: ContractContext) -> Iterator[tuple[Slot, Slot]]:
    """Slots that are returned with the new entries which another one uses, each with that one."""
    flow, stored, users = _follow(context), dict[str, set[str]](), dict[str, list[Slot]]()
    if flow is None:
        return
    slots = [slot for slot in context.contract.slots if slot.present is not None]
    for slot in slots:
        found = _find_joins(flow, slot.past, len(slot.shape), slot.present or "")
        joined = None if found is not None else flow.find_joined(slot.past, len(slot.shape))
        stored[slot.past] = set(found[0].inputs) if found is not None else set()
        for name in set(found[1].inputs) if found is not None else {joined[0]} if joined is not None else ():
            users.setdefault(name, []).append(slot)
    for slot in slots:
        others = {
            other.past: other
            for name in stored[slot.past] - {slot.past}
            for other in users.get(name, ())
            if name != other.past and other is not slot
        }
        yield from ((slot, other) for other in slots if other.past in others) if others else ()


def find_repeated(context: ContractContext) -> dict[str, tuple[str, Slot]]:
    """The pasts that no output carries on, each with an output that returns another slot again, and that slot."""
    flow, graph = _follow(context), context.contract.graph("decode")
    if flow is None:
        return {}
    made = {name: skip_copies(flow.flow, value) for name, value in flow.flow.results.items()}
    owners = {made[slot.present]: slot for slot in context.contract.slots if slot.present in made}
    presents = {slot.present for slot in context.contract.slots}
    again = [port.name for port in graph.outputs if port.name not in presents and made.get(port.name) in owners]
    lost = [slot.past for slot in context.contract.of_kind("self-attention") if slot.present is slot.filled_by is None]
    if len(again) != len(lost):
        return {}
    return {past: (name, owners[made[name]]) for past, name in zip(lost, again, strict=True)}


def unread_in_loops(context: ContractContext) -> dict[str, str]:
    """The inputs and outputs between which a loop stands that was not followed, each with that loop."""
    return find_unread_loops(_follow(context), context.contract)


def refuse_unread(unread: dict[str, str], left_out: Collection[str]) -> None:
    """Raise `CannotCheck` where a check left some pasts out, and say why nothing is known of them."""
    if left_out:
        loop = next(unread[name] for name in left_out)
        which = f"which output returns {shorten_names(tuple(left_out))} cannot be read from the graph"
        why = f"the cache passes through {loop}; `step-test --contract FILE` takes a contract that says it"
        raise CannotCheck(f"{which}, because {why}", essential=True)


def _find_joins(dataflow: Dataflow, name: str, rank: int, output: str) -> tuple[FlatNode, FlatNode] | None:
    """Where a graph joins new entries to an input that it returns, and where other ones for its own use.

    None where both are joined by the same entries, but for operators that move the past as well.
    """
    walked = [(value, path) for value, path in dataflow.walk(name, rank) if path.place is None]
    own = {value for value, path in walked if path.join is None}
    returned, used = dict[int, FlatNode](), dict[int, FlatNode]()
    for value, path in walked:
        if path.join is None or not path.join.has("join"):
            continue
        if output in dataflow.flow.outputs_of.get(value, ()):
            returned[path.join.index] = path.join
        if any(not any(outputs_with_content(*taker)) for taker in dataflow.flow.consumers.get(value, ())):
            used[path.join.index] = path.join
    if len(returned) != 1 or not used or not returned.keys().isdisjoint(used):
        return None
    joins = next(iter(returned.values())), used[min(used)]
    if len({tuple(value in own for value in node.inputs) for node in joins}) > 1:
        return None  # the same entries may be joined in another order
    moves = {*VIEWS, *(dataflow.flow.producers[value].op for value in own - {name})}
    new = [[value for value in node.inputs if value not in own] for node in joins]
    same = all(_are_equal(dataflow, one, other, moves) for one, other in zip(*new, strict=False))
    return None if same else joins


def _returns_transposed(dataflow: Dataflow, name: str, rank: int, output: str) -> bool:
    """Whether a graph returns what it computes of an input entry by entry with the axes in another order."""
    found = [path.axes for one, path in dataflow.outputs_reached(name, rank, computed=True) if one == output]
    right = tuple(range(rank))
    return bool(found) and all(axes is not None and axes != right and sorted(axes) == [*right] for axes in found)


def _are_equal(dataflow: Dataflow, one: str, other: str, moves: set[str], left: int = MOST_COMPARED) -> bool:
    """Whether two values are the same but for nodes of some operators, or made of such by the same operators."""
    if one == other or left == 0:
        return one == other
    first, second = dataflow.flow.producers.get(one), dataflow.flow.producers.get(other)
    if first is not None and first.op in moves:
        return _are_equal(dataflow, first.input(0), other, moves, left - 1)
    if second is not None and second.op in moves:
        return _are_equal(dataflow, one, second.input(0), moves, left - 1)
    if first is None or second is None or (first.op, len(first.inputs)) != (second.op, len(second.inputs)):
        return False
    pairs = zip(first.inputs, second.inputs, strict=True)
    same = list(first.proto.attribute) == list(second.proto.attribute)
    return same and all(_are_equal(dataflow, *pair, moves, left - 1) for pair in pairs)


def _follow(context: ContractContext) -> Dataflow | None:
    """The dataflow of a decode step, where its graph is one file of the stack."""
    name = context.contract.graph("decode").file
    return next((file.dataflow for file in context.stack.files.values() if file.name == name), None)


def _name(node: FlatNode) -> str:
    return f'{node.op} "{node.proto.name or node.output()}"'
