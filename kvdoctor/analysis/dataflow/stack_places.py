"""Follows the place of an input in a stack: pasts of layers that are put together for a loop over the layers.

The body of a loop stands in a flow once, so that all pasts of a stack meet in one value. An iteration gets the entry of
its number, and what it returns is put at its number again: the place tells which output is whose.
"""

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
        if node.op == "Split" and len(node.outputs) == place.count:
            if node.outputs.index(output) == place.number:
                return None
        elif node.op == "Gather":
            return self._gathered(node, place)
        raise PlaceUnknown

    def _axes_of(self, node: FlatNode, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The axes that a node takes entries along; NEW as well where it does not say."""
        if node.op in ("Gather", "Split"):
            at = normalize_axis(node.number("axis", 0), len(axes))
            return (axes[at] if at is not None else NEW,)
        if node.op != "Slice":
            return (NEW,)
        tensor = self.flow.constant(node.input(3))
        given = (integers(tensor) if tensor is not None else node.numbers("axes")) or ()
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
        tensor = self.flow.constant(index)
        numbers = (integers(tensor) if tensor is not None else None) or ()
        taken = [number % place.count for number in numbers]
        if place.number not in taken:
            raise PlaceUnknown
        return Place(taken.index(place.number), len(taken)) if len(taken) > 1 else None
