"""Follows the place of an input in a stack: pasts of layers that are put together for a loop over the layers.

The body of a loop stands in a flow once, so that all pasts of a stack meet in one value. An iteration gets the entry of
its number, and what it returns is put at its number again: the place tells which output is whose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvdoctor.analysis.dataflow.axis_walks import NEW, normalize_axis
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import REVERSED, Flow
from kvdoctor.model.view import integers
from kvdoctor.records import record

VIEWS = ("Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape")
"""Operators between the number of an iteration and the index that is made of it."""
MOST_VIEWS = 8


@record
class Place:
    """The number of an entry of a stack, and how many there are; in a loop, the number of the iteration."""

    number: int
    count: int

    def turned(self, node: FlatNode) -> "Place":
        """The place behind a node that may stand for a Scan which goes from the last entry to the first."""
        return Place(self.count - 1 - self.number, self.count) if node.number(REVERSED, 0) else self


class PlaceUnknown(Exception):
    """A node takes other entries of the stack, or ones of which the graph does not say where they stand."""


@dataclass(eq=False, repr=False)
class StackPlaces:
    """Follows places through the nodes of one flow."""

    flow: Flow

    def stacks(self, node: FlatNode, axes: tuple[int, ...] | None) -> bool:
        """Whether a node puts values together along an axis that was inserted for it: no entries join there."""
        if node.op != "Concat" or len(node.inputs) < 2 or axes is None:
            return False
        at = normalize_axis(node.number("axis", 0), len(axes))
        return at is not None and axes[at] == NEW

    def place_after(self, node: FlatNode, output: str, axes: tuple[int, ...] | None, place: Place) -> Place | None:
        """The place in an output of a node; None where the stack has been taken apart. `axes` are those before it.

        Raises:
            PlaceUnknown: the output has other entries.
        """
        if self.stacks(node, axes):
            raise PlaceUnknown  # a stack of stacks, or one that a loop collects
        if node.op == "Unsqueeze":
            return place.turned(node)
        if axes is None or node.op not in ("Gather", "Split", "Slice", "GatherND", "GatherElements", "Compress"):
            return place
        if NEW not in self._axes_of(node, axes):
            return place
        if node.op == "Gather":
            return self._gathered(node, place)
        taken = None
        if node.op == "Split":
            taken = self._part(node, node.outputs.index(output), place.count)
        elif node.op == "Slice":
            taken = self._sliced(node, place.count)
        return _place_among(taken, place)

    def _axes_of(self, node: FlatNode, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The axes that a node takes entries along; NEW as well where it does not say."""
        if node.op in ("Gather", "Split"):
            at = normalize_axis(node.number("axis", 0), len(axes))
            return (axes[at] if at is not None else NEW,)
        if node.op != "Slice":
            return (NEW,)
        given = self._bounds(node, 3, "axes") or ()
        places = [normalize_axis(axis, len(axes)) for axis in given]
        return tuple(axes[at] if at is not None else NEW for at in places) or (NEW,)

    def _gathered(self, node: FlatNode, place: Place) -> Place | None:
        index = node.input(1)
        for _ in range(MOST_VIEWS):
            made = self.flow.producers.get(index)
            if index in self.flow.iterations or made is None or made.op not in VIEWS or index in self.flow.carried:
                break
            index = made.input(0)
        if index in self.flow.iterations:
            return place.turned(node)
        numbers = self._integers(index) or ()
        return _place_among([number % place.count for number in numbers], place)

    def _part(self, node: FlatNode, part: int, count: int) -> Sequence[int] | None:
        """The entries that one output of a Split has; None where the graph does not say."""
        sizes: Sequence[int] | None = node.numbers("split")
        if sizes is None and node.input(1):
            sizes = self._integers(node.input(1))
        elif sizes is None:
            each = -(-count // len(node.outputs))  # the last part may be smaller
            sizes = [each] * (len(node.outputs) - 1)
            sizes = [*sizes, count - sum(sizes)]
        if sizes is None or len(sizes) != len(node.outputs) or sum(sizes) != count or min(sizes) < 0:
            return None
        start = sum(sizes[:part])
        return range(start, start + sizes[part])

    def _sliced(self, node: FlatNode, count: int) -> Sequence[int] | None:
        """The entries that a Slice takes along one axis alone; None where the graph does not say."""
        starts, ends, axes = (self._bounds(node, at, name) for at, name in enumerate(("starts", "ends", "axes"), 1))
        steps = self._integers(node.input(4)) if node.input(4) else (1,)
        one_axis = all(numbers is not None and len(numbers) == 1 for numbers in (starts, ends, axes, steps))
        if not (starts and ends and steps) or not one_axis or steps[0] < 1:
            return None
        return range(count)[starts[0] : ends[0] : steps[0]]

    def _bounds(self, node: FlatNode, at: int, name: str) -> tuple[int, ...] | None:
        """Numbers of a Slice: an attribute up to opset 9, an input since."""
        return self._integers(node.input(at)) if node.input(at) else node.numbers(name)

    def _integers(self, name: str) -> tuple[int, ...] | None:
        """The numbers of a constant."""
        tensor = self.flow.constant(name)
        return integers(tensor) if tensor is not None else None


def _place_among(taken: Sequence[int] | None, place: Place) -> Place | None:
    """The place of an entry among those that were taken; None where it alone was.

    Raises:
        PlaceUnknown: it is not among them, or they are not known.
    """
    if taken is None or place.number not in taken:
        raise PlaceUnknown
    return Place(taken.index(place.number), len(taken)) if len(taken) > 1 else None
