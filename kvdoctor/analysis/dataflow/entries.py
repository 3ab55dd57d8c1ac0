"""What a graph does with the entries of one past: adds them up, masks them, stores others than it uses."""

from kvdoctor.analysis.dataflow.axis_walks import DeclaredSizes
from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.analysis.dataflow.walks import outputs_with_content
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.operators import operators_with

VIEWS = operators_with("copy", "cast", "view", "permute", "repeat")
"""Operators that leave entries what they are: they may stand before one of two joins alone."""

MOST_ALIKE = 8
"""Nodes that are compared before two values that may be the same."""


def is_convolved(dataflow: Dataflow, name: str, rank: int) -> bool:
    """Whether the entries of an input and new ones are added up along their axis, each with a weight of its own."""
    for value, path in dataflow.walk(name, rank, computed=True):
        takers = dataflow.flow.consumers.get(value, ()) if path.join is not None and path.axes is not None else ()
        if sum(node.has("pick") for node, _ in takers) > 1:
            return True
        if any(
            n.has("reduce") and path.axis not in (dataflow.axes.axes_after(n, i, path.axes) or ()) for n, i in takers
        ):
            return True
    return False


def find_masked_axis(dataflow: Dataflow, name: str, rank: int) -> int | None:
    """The axis of an input along which it is multiplied by a mask, or selected by one, before it is written."""
    declared = tuple(dataflow.shapes.get(name) or ())
    for value, path in dataflow.walk(name, rank):
        for node, index in dataflow.flow.consumers.get(value, ()) if (path.join, path.place) == (None, None) else ():
            if not node.has("select") and not node.has("multiply"):
                continue
            mask = node.input(0 if node.has("select") else 1 - index)
            sizes = DeclaredSizes(dataflow.flow, {**dataflow.shapes}).shape(mask) or ()
            axes = path.axes or tuple(declared.index(size) if declared.count(size) == 1 else -1 for size in sizes)
            places = [(axes[at - len(sizes)], size) for at, size in enumerate(sizes) if at >= len(sizes) - len(axes)]
            for narrow in ((1,), (1, None)):  # each row may have a mask of its own
                found = [axis for axis, size in places if size not in narrow]
                if len(found) == 1 and found[0] in range(rank):
                    return found[0]
    return None


def find_other_entries(dataflow: Dataflow, name: str, rank: int, output: str) -> tuple[FlatNode, FlatNode] | None:
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
    alike = all(_are_alike(dataflow, one, other, moves) for one, other in zip(*new, strict=False))
    return None if alike else joins


def returns_turned(dataflow: Dataflow, name: str, rank: int, output: str) -> bool:
    """Whether a graph returns what it computes of an input entry by entry with the axes in another order."""
    found = [path.axes for one, path in dataflow.outputs_reached(name, rank, computed=True) if one == output]
    right = tuple(range(rank))
    return bool(found) and all(axes is not None and axes != right and sorted(axes) == [*right] for axes in found)


def _are_alike(dataflow: Dataflow, one: str, other: str, moves: set[str], left: int = MOST_ALIKE) -> bool:
    """Whether two values are the same but for nodes of some operators, or made of such by the same operators."""
    if one == other or left == 0:
        return one == other
    first, second = dataflow.flow.producers.get(one), dataflow.flow.producers.get(other)
    if first is not None and first.op in moves:
        return _are_alike(dataflow, first.input(0), other, moves, left - 1)
    if second is not None and second.op in moves:
        return _are_alike(dataflow, one, second.input(0), moves, left - 1)
    if first is None or second is None or (first.op, len(first.inputs)) != (second.op, len(second.inputs)):
        return False
    pairs = zip(first.inputs, second.inputs, strict=True)
    same = list(first.proto.attribute) == list(second.proto.attribute)
    return same and all(_are_alike(dataflow, *pair, moves, left - 1) for pair in pairs)
