"""Follows the axes of an input through a graph: where layers are taken apart, and where new entries join."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from kvdoctor.analysis.dataflow.uses import UseFinder
from kvdoctor.analysis.dataflow.walks import NEAR, Walk, WalkBudget
from kvdoctor.model.cache_operators import ports_of
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.view import integers

NEW = -1
"""An axis that a node inserted: none of the input's."""

_VIEWS = ("Identity", "Cast", "Transpose", "Squeeze", "Unsqueeze")
"""Operators behind which a stack is still the same stack."""


@dataclass(eq=False, repr=False)
class AxisWalks:
    """Follows the axes of the inputs of one flow through operators that transpose, slice and split them."""

    flow: Flow
    budget: WalkBudget
    uses: UseFinder

    def axes_after(self, node: FlatNode, axes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Where the input's axes are after a node, NEW for an inserted one; None once they cannot be followed."""
        if axes is None or node.op in ("Reshape", "Flatten", "Expand", "Compress"):
            return None
        if node.op == "Transpose":
            order = node.numbers("perm") or tuple(reversed(range(len(axes))))
            return tuple(axes[i] for i in order) if sorted(order) == list(range(len(axes))) else None
        if node.op == "Gather":
            picked = self._rank_of_index(node.input(1))
            if picked is None or picked > 1:
                return None
            at = normalize_axis(node.number("axis", 0), len(axes))
            return axes if picked == 1 or at is None else (*axes[:at], *axes[at + 1 :])
        if node.op in ("Squeeze", "Unsqueeze"):
            return self._axes_after_squeeze(node, axes)
        return axes

    def _rank_of_index(self, name: str, left: int = 8) -> int | None:
        """The rank of an index that is a constant, or follows from the number of an iteration; None for any other."""
        tensor, node = self.flow.constant(name), self.flow.producers.get(name)
        if tensor is not None:
            return len(tensor.dims)
        if name in self.flow.iterations:
            return self.flow.iterations[name].rank
        if node is None or name not in self.flow.fixed or left == 0:
            return None
        if node.op == "Reshape":
            shape = self.flow.constant(node.input(1))
            return shape.dims[0] if shape is not None and len(shape.dims) == 1 else None
        if node.op in ("Squeeze", "Unsqueeze"):
            rank, axes = self._rank_of_index(node.input(0), left - 1), self._squeezed_axes(node)
            if rank is None or axes is None:
                return 0 if node.op == "Squeeze" and axes is None and len(node.inputs) < 2 else None
            return rank + len(axes) * (1 if node.op == "Unsqueeze" else -1)
        if node.op not in ("Identity", "Cast", "Add", "Sub"):
            return None
        ranks = [self._rank_of_index(one, left - 1) for one in node.inputs]
        return max((rank for rank in ranks if rank is not None), default=None) if None not in ranks else None

    def _axes_after_squeeze(self, node: FlatNode, axes: tuple[int, ...]) -> tuple[int, ...] | None:
        given = self._squeezed_axes(node)
        if not given:
            return None
        rank = len(axes) + (len(given) if node.op == "Unsqueeze" else 0)
        positions = {normalize_axis(axis, rank) for axis in given}
        if node.op == "Squeeze":
            return tuple(axis for at, axis in enumerate(axes) if at not in positions)
        kept = iter(axes)
        return tuple(NEW if at in positions else next(kept, NEW) for at in range(rank))

    def _squeezed_axes(self, node: FlatNode) -> Sequence[int] | None:
        """The axes that a Squeeze or Unsqueeze names."""
        given = node.numbers("axes")
        if given is None and len(node.inputs) > 1:
            tensor = self.flow.constant(node.inputs[1])
            given = integers(tensor) if tensor is not None else None
        return given

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
                moved = self.axes_after(node, axes) if index == 0 and (at is not None or node.op in _VIEWS) else None
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
        if node.op == "Split" or (node.op == "Gather" and node.input(1) in self.flow.fixed):
            return normalize_axis(node.number("axis", 0), rank)
        if node.op == "Slice" and all(name in self.flow.fixed for name in node.inputs[1:] if name):
            tensor = self.flow.constant(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else None
            axes = integers(tensor) if tensor is not None else node.numbers("axes")
            return normalize_axis(axes[0], rank) if axes is not None and len(axes) == 1 else None
        return None

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


def join_axis(node: FlatNode, axes: tuple[int, ...] | None) -> int | None:
    """The input's axis along which a node adds new entries, as far as the node says."""
    if axes is None:
        return None
    at: int | None = None
    if node.op in ("Concat", "ScatterElements", "TensorScatter"):
        at = node.number("axis", {"TensorScatter": -2}.get(node.op, 0))
    elif (ports := ports_of(node.domain, node.op)) is not None and ports.growth in ("grow", "shared", "static"):
        at = len(axes) - 2
    if at is None or not -len(axes) <= at < len(axes):
        return None
    return axes[at] if axes[at] != NEW else None


def normalize_axis(axis: int, rank: int) -> int | None:
    """An axis counted from the front; None where a tensor of that rank has no such axis."""
    return axis % rank if -rank <= axis < rank else None
