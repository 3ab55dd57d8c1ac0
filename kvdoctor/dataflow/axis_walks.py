"""Where the axes of an input are after operators that turn, cut and take apart what it holds."""

from collections import deque
from dataclasses import dataclass

from kvdoctor.cache_operators import ports_of
from kvdoctor.dataflow.effort import Effort
from kvdoctor.dataflow.uses import Uses
from kvdoctor.flow import Flow, FlowNode
from kvdoctor.graph import integers

NEW = -1
"""An axis that is none of the input's."""


@dataclass
class AxisWalks:
    """Follows the axes of the inputs of one flow."""

    flow: Flow
    effort: Effort
    uses: Uses

    def moved(self, node: FlowNode, axes: tuple[int, ...] | None) -> tuple[int, ...] | None:
        """Where the input's axes are after a node, NEW where it put one in; None once that cannot be told."""
        if axes is None or node.op in ("Reshape", "Flatten", "Expand", "Compress"):
            return None
        if node.op == "Transpose":
            order = node.numbers("perm") or tuple(reversed(range(len(axes))))
            return tuple(axes[i] for i in order) if sorted(order) == list(range(len(axes))) else None
        if node.op == "Gather":
            picked = self.flow.constant(node.input(1))
            if picked is None or len(picked.dims) > 1:
                return None
            at = within(node.number("axis", 0), len(axes))
            return axes if picked.dims or at is None else (*axes[:at], *axes[at + 1 :])
        if node.op in ("Squeeze", "Unsqueeze"):
            return self._squeezed(node, axes)
        return axes

    def _squeezed(self, node: FlowNode, axes: tuple[int, ...]) -> tuple[int, ...] | None:
        given = node.numbers("axes")
        if given is None and len(node.inputs) > 1:
            tensor = self.flow.constant(node.inputs[1])
            given = integers(tensor) if tensor is not None else None
        if not given:
            return None
        rank = len(axes) + (len(given) if node.op == "Unsqueeze" else 0)
        places = {within(axis, rank) for axis in given}
        if node.op == "Squeeze":
            return tuple(axis for at, axis in enumerate(axes) if at not in places)
        kept = iter(axes)
        return tuple(NEW if at in places else next(kept, NEW) for at in range(rank))

    def layers(self, name: str, rank: int) -> int | None:
        """The axis along which an input is taken apart into what one attention after the other uses."""
        waiting: deque[tuple[str, tuple[int, ...]]] = deque([(name, tuple(range(rank)))])
        seen, sites = {name}, set[tuple[int, str, int]]()
        while waiting and self.effort.goes_on():
            value, axes = waiting.popleft()
            for node, index in self.flow.consumers.get(value, ()):
                moved = self.moved(node, axes)
                passed = node.output() if node.op in ("Identity", "Cast", "Transpose") else ""
                if index == 0 and passed and moved and passed not in seen:
                    seen.add(passed)
                    waiting.append((passed, moved))
                elif index == 0 and (at := self._taken_along(node, len(axes))) is not None:
                    uses = (self.uses.of(output) for output in node.outputs if output)
                    sites |= {(axes[at], use.part, use.site) for use in uses if use is not None}
        several = [(axis, part) for axis, part, _ in sites]
        return next((axis for axis, part in several if several.count((axis, part)) > 1), None)

    def _taken_along(self, node: FlowNode, rank: int) -> int | None:
        """The axis along which a node takes out entries that the graph names: no others at another length."""
        if node.op == "Split" or (node.op == "Gather" and node.input(1) in self.flow.fixed):
            return within(node.number("axis", 0), rank)
        if node.op == "Slice" and all(name in self.flow.fixed for name in node.inputs[1:] if name):
            tensor = self.flow.constant(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else None
            axes = integers(tensor) if tensor is not None else node.numbers("axes")
            return within(axes[0], rank) if axes is not None and len(axes) == 1 else None
        return None


def joined_along(node: FlowNode, axes: tuple[int, ...] | None) -> int | None:
    """The input's axis along which a crossing brings new entries, as far as the node tells."""
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


def within(axis: int, rank: int) -> int | None:
    """An axis counted from the front; None where a tensor of that rank has none such."""
    return axis % rank if -rank <= axis < rank else None
