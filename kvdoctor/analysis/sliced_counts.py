"""Counts of padding that see the columns of the new tokens alone: a step after a padded prefill then counts none.

Positions are made inside: the number of a token less the padding before it. Where the mask is cut to the new tokens
first, and counted along afterwards, the prefill is right, and each later step is as many positions too far.
"""

from collections.abc import Iterator

from kvdoctor.model.operators import has
from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import find_attribute, input_of, output_of, readers
from kvdoctor.model.view import GraphView, Scope, integers
from kvdoctor.records import record

MOST_BETWEEN = 8
"""Nodes between a mask and a count along it that are followed."""


@record(slots=False)
class SlicedCount:
    """A node that counts along a mask which was cut before; `between` stand after the cut, the last one first."""

    scope: Scope
    count: NodeProto
    cut: NodeProto
    between: tuple[NodeProto, ...]


def find_sliced_counts(view: GraphView, mask: str) -> Iterator[SlicedCount]:
    """The counts of padding along a mask [batch, total] that was cut along the same axis, and that are subtracted."""
    for scope in view.scopes():
        users = readers(scope.graph)
        for node in scope.graph.node:
            subtracted = any(has(user.op_type, "subtract") and at == 1 for user, at in users.get(output_of(node), ()))
            if has(node.op_type, "accumulate") and subtracted and not find_attribute(node, "exclusive"):
                found = _follow_back(scope, node, mask)
                yield from (found,) if found is not None else ()


def _follow_back(scope: Scope, count: NodeProto, mask: str) -> SlicedCount | None:
    """The cut between a mask and a count along it; None where there is none, or more than the mask comes in."""
    cut, between, name = None, list[NodeProto](), input_of(count, 0)
    for _ in range(MOST_BETWEEN):
        if name == mask:
            return SlicedCount(scope, count, cut, tuple(between)) if cut is not None else None
        node = scope.producers.get(name)
        if node is None:
            return None
        if node.op_type == "Slice" and cut is None:
            if _number(scope, node, 3) is None or _number(scope, node, 3) != _number(scope, count, 1):
                return None
            cut, name = node, input_of(node, 0)
            continue
        values = [each for each in node.input if scope.constant(each) is None]
        if len(values) != 1 or not has(node.op_type, "copy", "cast", "elementwise"):
            return None
        between += [node] if cut is None else []
        name = values[0]
    return None


def _number(scope: Scope, node: NodeProto, index: int) -> int | None:
    """The axis that an input says, of the two of a mask."""
    tensor = scope.constant(input_of(node, index)) if input_of(node, index) else None
    numbers = integers(tensor) if tensor is not None else None
    return numbers[0] % 2 if numbers is not None and len(numbers) == 1 else None
