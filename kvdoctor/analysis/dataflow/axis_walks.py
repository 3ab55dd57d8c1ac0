"""Follows the axes of an input through a graph: where layers are taken apart, and where new entries join.

The sizes of values on the way follow from the weights and constants of the graph, whatever is fed (`DeclaredSizes`).

Pasts of layers may be put together in a stack for a loop over the layers. The body of a loop stands in a flow once, so
that all pasts of a stack meet in one value. An iteration gets the entry of its number, and what it returns is put at
its number again: the place in the stack tells which output belongs to which past (`place_after`).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdoctor.analysis.dataflow.uses import UseFinder
from kvdoctor.analysis.dataflow.walks import NEAR, Walk, WalkBudget
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import REVERSED, Flow
from kvdoctor.model.node_sizes import AxisOf, NodeSizes, NumberOf, axis_within, shape_from
from kvdoctor.model.operator_axes import axes_of, numbers_of
from kvdoctor.model.operators import operator_of, operators_with, ports_of
from kvdoctor.model.view import integers
from kvdoctor.records import record

MOST_NODES_BACK = 12

Known = tuple[int | None, ...] | None


@dataclass(eq=False, repr=False)
class DeclaredSizes:
    """Follows values of one flow back over a few nodes, each once.

    `shapes` and `listed` are the sizes, and the numbers of short tensors of integers, that are known beforehand.
    """

    flow: Flow
    shapes: dict[str, Known] = field(default_factory=dict)
    listed: dict[str, Known] = field(default_factory=dict)

    def shape(self, value: str, left: int = MOST_NODES_BACK, rank: int | None = None) -> Known:
        """The sizes of a value, None for each that is not known; None where its rank is not.

        `left` is the number of nodes to go back; `rank` is that of the value, where it is known.
        """
        if value not in self.shapes:
            self.shapes[value] = None  # of a value that depends on itself
            self.shapes[value] = self._find_shape(value, left, rank)
        return self.shapes[value]

    def _find_shape(self, value: str, left: int, rank: int | None) -> Known:
        tensor, node = self.flow.constants.get(value), self.flow.producers.get(value)
        if tensor is not None:
            return tuple(tensor.dims)
        if value in self.flow.iterations:
            return (1,) * self.flow.iterations[value].rank
        if node is None or left == 0:
            return None
        known = self.node(node, left - 1, rank)
        made = dict(zip(node.outputs, axes_of(known) or (), strict=False)).get(value)
        return None if made is None else shape_from(known, made)

    def numbers(self, value: str, left: int = MOST_NODES_BACK) -> Known:
        """The numbers of a short tensor of integers, None for each that depends on the feeds."""
        if value not in self.listed:
            self.listed[value] = None
            self.listed[value] = self._find_numbers(value, left)
        return self.listed[value]

    def _find_numbers(self, value: str, left: int) -> Known:
        tensor, node = self.flow.constant(value), self.flow.producers.get(value)
        if tensor is not None:
            return integers(tensor)
        if node is None or left == 0:
            return None
        known = self.node(node, left - 1)
        made = numbers_of(known)
        return None if made is None else shape_from(known, made)

    def node(self, node: FlatNode, left: int, rank: int | None = None) -> NodeSizes:
        """A node with what is known of its inputs; an operand of unknown rank counts as one of the result's."""
        kind = operator_of(node.op)
        ranked = len(node.inputs) if kind.axes in ("first", "broadcast") or node.has("permute") else 0
        ranked = 1 if node.has("product") else ranked

        def shape(index: int) -> Known:
            wanted = rank if index < ranked else None
            found = self.shape(node.input(index), left, wanted)
            return found if found is not None or wanted is None else (None,) * wanted

        def numbers(index: int) -> Known:
            known = self.numbers(node.input(index), left)
            return (None,) if known is None and node.has("join") else known  # an entry of a shape

        return NodeSizes(node.op, node.inputs, len(node.outputs), node.attribute, shape, numbers)


NEW = -1
"""An axis that a node inserted: none of the input's."""

NEAREST = 8
"""Nodes between constants and the axes, bounds or index that a node on the way takes."""

_VIEWS = operators_with("copy", "cast", "permute", "view")
"""Operators after which a stack is still the same stack."""


@record
class Place:
    """The number of an entry of a stack, and how many there are; in a loop, the number of the iteration."""

    number: int
    count: int

    def turned(self, node: FlatNode) -> "Place":
        """The place after a node that may stand for a Scan which goes from the last entry to the first."""
        return Place(self.count - 1 - self.number, self.count) if node.number(REVERSED, 0) else self


class PlaceUnknown(Exception):
    """A node takes other entries of the stack, or ones of which the graph does not say where they stand."""


@dataclass(eq=False, repr=False)
class AxisWalks:
    """Follows the axes of the inputs of one flow, and their places in stacks, through operators that move them."""

    flow: Flow
    budget: WalkBudget
    uses: UseFinder

    def axes_after(self, node: FlatNode, index: int, axes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Where the axes of one input are after a node, NEW for an inserted one; None once they cannot be followed."""
        if axes is None or node.has("copy"):
            return axes
        given = node.inputs if node.has("join") else (node.input(index),)
        made = axes_of(DeclaredSizes(self.flow, dict.fromkeys(given, (None,) * len(axes))).node(node, NEAREST))
        if made is None:  # of other operators, those that hold the content of the input keep its axes
            return None if operator_of(node.op).keeps else axes
        found = [(NEW if size == 1 else axis_within(size, index)) for size in made[0]]
        after = tuple(at if at == NEW else axes[at] if at is not None and at < len(axes) else None for at in found)
        return tuple(at for at in after if at is not None) if None not in after else None

    def find_stacked_axes(self, name: str, rank: int) -> tuple[int | None, int | None]:
        """The axes along which an input is taken apart: into the caches of each attention, and into keys and values."""
        waiting = deque([(name, tuple(range(rank)), name)])
        seen, sites, looped = {name}, set[tuple[int, str, str, int]](), None
        while waiting and self.budget.goes_on():
            value, axes, stack = waiting.popleft()
            for node, index in self.flow.consumers.get(value, ()):
                at = self._axis_taken_apart(node, len(axes)) if index == 0 else None
                if at is not None and axes[at] != NEW:
                    uses = [use for output in node.outputs if output and (use := self.uses.use_of(output)) is not None]
                    if uses and self._follows_iterations(node):
                        looped = axes[at]
                    sites |= {(axes[at], use.part, stack, use.site) for use in uses}
                moved = self.axes_after(node, 0, axes) if index == 0 and (at is not None or node.op in _VIEWS) else None
                for output in node.outputs if moved else ():
                    if output and moved and output not in seen:
                        seen.add(output)
                        waiting.append((output, moved, stack if at is None else output))
        # Within one stack: keys and values of several layers are not the layers.
        several = sorted(site[:3] for site in sites)
        layers = looped
        if layers is None:
            layers = next((site[0] for site in several if several.count(site) > 1), None)
        both = (axis for axis, part, stack in several if part == "key" and (axis, "value", stack) in several)
        return layers, next((axis for axis in both if axis != layers), None)

    def _axis_taken_apart(self, node: FlatNode, rank: int) -> int | None:
        """The axis along which a node takes out entries at constant indices, which no length changes."""
        if not node.has("pick") or any(name and name not in self.flow.fixed for name in node.inputs[1:]):
            return None
        made = axes_of(DeclaredSizes(self.flow, {node.input(0): (None,) * rank}).node(node, NEAREST))
        taken = [at for at in range(rank) if AxisOf(0, at) not in made[0]] if made else []
        return taken[0] if len(taken) == 1 else None

    def _follows_iterations(self, node: FlatNode) -> bool:
        """Whether a node takes another entry in each iteration of a loop that carries a value from one to the next.

        Iterations that carry nothing stand side by side: rows of a batch, heads.
        """
        walk = Walk(node.inputs[1:], self.budget, NEAR)
        for value in walk:
            numbered = self.flow.iterations.get(value)
            if value in self.flow.carried or (numbered is not None and numbered.carries):
                return True
            made = self.flow.producers.get(value)
            walk.add(made.inputs if made is not None and value in self.flow.fixed else ())
        return False

    def stacks(self, node: FlatNode, axes: tuple[int, ...] | None) -> bool:
        """Whether a node puts values together along an axis that was inserted for it: no entries join there."""
        if not node.has("join") or len(node.inputs) < 2 or axes is None:
            return False
        at = node.number("axis", 0)
        return -len(axes) <= at < len(axes) and axes[at] == NEW

    def place_after(self, node: FlatNode, output: str, axes: tuple[int, ...] | None, place: Place) -> Place | None:
        """The place in an output of a node; None where the stack has been taken apart. `axes` are those before it.

        Raises:
            PlaceUnknown: the output has other entries.
        """
        if self.stacks(node, axes):
            raise PlaceUnknown  # a stack of stacks, or one that a loop collects
        if node.has("view"):
            return place.turned(node)
        if axes is None or NEW not in axes or not node.has("pick"):
            return place
        at, data = axes.index(NEW), node.input(0)
        shape = tuple(place.count if axis == at else 1 for axis in range(len(axes)))
        known = DeclaredSizes(self.flow, {data: shape}, {data: tuple(range(place.count))}).node(node, NEAREST)
        made = axes_of(known) or []
        if made and AxisOf(0, at) in made[0]:
            return place
        if operator_of(node.op).places and self._is_numbered(node.input(1)):
            return place.turned(node)
        if len(node.outputs) == 1:
            numbers = numbers_of(known) or ()
            return _place_among([number.at if isinstance(number, NumberOf) else -1 for number in numbers], place)
        sizes = [shape_from(known, sizes)[at] or 0 for sizes in made]  # of a Split
        part = node.outputs.index(output)
        taken = range(sum(sizes[:part]), sum(sizes[: part + 1]))
        return _place_among(taken if sum(sizes) == place.count else (), place)

    def _is_numbered(self, index: str) -> bool:
        """Whether an index is the number of an iteration, or a view of it."""
        for _ in range(NEAREST):
            made = self.flow.producers.get(index)
            if (
                made is None
                or not made.has("copy", "cast", "view")
                or index in (*self.flow.iterations, *self.flow.carried)
            ):
                break
            index = made.input(0)
        return index in self.flow.iterations


def join_axis(node: FlatNode, axes: tuple[int, ...] | None) -> int | None:
    """The input's axis along which a node adds new entries, where the node says so."""
    if axes is None:
        return None
    at = operator_of(node.op).axis
    if at is not None:
        at = node.number("axis", at)
    elif (ports := ports_of(node.domain, node.op)) is not None and ports.growth in ("grow", "shared", "static"):
        at = len(axes) - 2
    if at is None or not -len(axes) <= at < len(axes):
        return None
    return axes[at] if axes[at] != NEW else None


def _place_among(taken: Sequence[int], place: Place) -> Place | None:
    """The place of an entry among those that were taken; None where it alone was.

    Raises:
        PlaceUnknown: it is not among them, or they are not known.
    """
    if place.number not in taken:
        raise PlaceUnknown
    return Place(taken.index(place.number), len(taken)) if len(taken) > 1 else None
