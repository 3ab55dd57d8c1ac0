"""What a graph does with its inputs, whatever they are called: which output carries a past on, and what it is used for.

A past is followed forward through operators that keep its content. Where new entries join it, it grows; where they are
written into it, it is a buffer.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from kvdoctor.cache_operators import ports_of
from kvdoctor.contract import Growth
from kvdoctor.dataflow.axis_walks import AxisWalks, joined_along
from kvdoctor.dataflow.descent import Descent
from kvdoctor.dataflow.effort import MOST_VISITED, NEAR, Effort
from kvdoctor.dataflow.operators import KEEPS, TRIMS, WRITES, onward
from kvdoctor.dataflow.uses import Use, Uses
from kvdoctor.flow import Flow, FlowNode

__all__ = ("Dataflow", "StateFlow", "Use")

How = Literal["append", "write", "operator", "unchanged", "update"]


@dataclass(frozen=True, slots=True)
class StateFlow:
    """What a graph does with one input that may be a state.

    `output` carries its content on, `how` it gets there, `axis` is the input's axis along which new entries come, or
    None where it cannot be followed. `joined` says that new entries meet it before its use, `trimmed` that some are cut
    off afterwards, `window` how many tokens the operator that holds the cache looks back over. `delta` is an output
    that holds the new entries alone. `cut` says that the graph takes a part of the input before they join, whose end
    is computed; `at_end` that the place to write at is reckoned from the input's own length; `batch` is the axis that
    counts the batch where an operator holds the state, `layers` that along which it is taken apart for one attention
    after the other.
    """

    input: str
    use: Use | None = None
    output: str | None = None
    how: How | None = None
    growth: Growth | None = None
    axis: int | None = None
    joined: bool = False
    trimmed: bool = False
    delta: str | None = None
    window: int | None = None
    cut: bool = False
    at_end: bool = False
    batch: int = 0
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class _Way:
    """How a walk came to a value: where its axes are, what became of it before the crossing it passed and since."""

    axes: tuple[int, ...] | None
    crossing: FlowNode | None = None
    axis: int | None = None
    trimmed: bool = False
    cut: bool = False


@dataclass
class Dataflow:
    """Questions to one flow; answers are kept.

    `uses` tells what values are used for, `descent` which values others have a part in; this class follows states.
    """

    flow: Flow
    effort: Effort = field(default_factory=Effort)
    _states: dict[tuple[str, int], StateFlow] = field(default_factory=dict)
    _reached: dict[str, set[str]] = field(default_factory=dict)

    @cached_property
    def uses(self) -> Uses:
        """What values are used for."""
        return Uses(self.flow, self.effort)

    @cached_property
    def descent(self) -> Descent:
        """Which values others have a part in."""
        return Descent(self.flow, self.effort)

    @cached_property
    def axes(self) -> AxisWalks:
        """Where the axes of inputs are."""
        return AxisWalks(self.flow, self.effort, self.uses)

    def state(self, name: str, rank: int) -> StateFlow:
        """Follow one graph input forward."""
        if (name, rank) not in self._states:
            self._states[name, rank] = replace(self._followed(name, rank), layers=self.axes.layers(name, rank))
        return self._states[name, rank]

    def _followed(self, name: str, rank: int) -> StateFlow:
        use, reached = self.uses.of(name), None
        for output, way in self._carried_on(name, rank):
            if way.crossing is not None:
                return self._joined(name, use, output, way)
            reached = reached or output
        crossed = (way for _, way in self._walk(name, rank) if way.crossing and way.crossing.op != "Where")
        if (first := next(crossed, None)) is not None:
            return self._joined(name, use, None, first)
        if reached is not None:
            return StateFlow(name, use, reached, "unchanged", "constant")
        return StateFlow(name, use)

    def _carried_on(self, name: str, rank: int) -> Iterator[tuple[str, _Way]]:
        """Graph outputs that hold the content of an input, after no or one crossing."""
        for value, way in self._walk(name, rank):
            for output in self.flow.outputs_of.get(value, ()):
                yield output, way

    def _walk(self, name: str, rank: int) -> Iterator[tuple[str, _Way]]:
        """Values that hold the content of an input, nearest first."""
        waiting = deque([(name, _Way(tuple(range(rank))))])
        seen = {(name, False)}
        while waiting and len(seen) < MOST_VISITED and self.effort.goes_on():
            value, way = waiting.popleft()
            yield value, way
            for node, index in self.flow.consumers.get(value, ()):
                for output, brings in onward(node, index):
                    joins = brings and (node.op != "Where" or self._chooses_new(node, index, name))
                    # A second Concat puts keys and values, or all layers, together again.
                    crosses = joins and not (way.crossing is not None and node.op == "Concat")
                    crossed = crosses or way.crossing is not None
                    if (crosses and way.crossing is not None) or not output or (output, crossed) in seen:
                        continue
                    seen.add((output, crossed))
                    axes = self.axes.moved(node, way.axes)
                    if crosses:
                        waiting.append((output, _Way(axes, node, joined_along(node, way.axes), cut=way.cut)))
                    else:
                        trimmed = way.trimmed or (way.crossing is not None and node.op in TRIMS)
                        cut = way.cut or (way.crossing is None and self._cuts(node))
                        waiting.append((output, _Way(axes, way.crossing, way.axis, trimmed, cut)))

    def _cuts(self, node: FlowNode) -> bool:
        """Whether a node takes a part of its input whose end depends on what the graph is fed."""
        return node.op == "Slice" and any(name and name not in self.flow.fixed for name in node.inputs[1:3])

    def _chooses_new(self, node: FlowNode, index: int, name: str) -> bool:
        """Whether a Where has new entries beside the content of an input: padding put to zero brings none."""
        other = node.input(3 - index)
        if other in self.flow.fixed:
            return False
        if name not in self._reached:
            self._reached[name] = self.descent.reached_from({name})
        return other not in self._reached[name]

    def _joined(self, name: str, use: Use | None, output: str | None, way: _Way) -> StateFlow:
        """A state that new entries join, with the output, if any, that holds them and nothing of the state itself."""
        crossing = way.crossing
        assert crossing is not None  # noqa: S101 - asked of crossed ways only
        how, growth = _crossing(crossing)
        delta = None
        if crossing.op == "TensorScatter" or ports_of(crossing.domain, crossing.op) is None:
            new = crossing.inputs if crossing.op == "Concat" else crossing.inputs[1:]
            views = (self._view_of(v) for v in new if v and v != name and v not in self.flow.fixed)
            delta = next((view for view in views if view is not None and view != output), None)
        found = how if output is not None else None
        ports = ports_of(crossing.domain, crossing.op)
        window = crossing.number("local_window_size", -1) if ports else -1
        return StateFlow(
            name,
            use,
            output,
            found,
            growth,
            axis=way.axis,
            joined=True,
            trimmed=way.trimmed,
            delta=delta,
            window=window if window > 0 else None,
            cut=way.cut,
            batch=ports.batch if ports is not None else 0,
            at_end=crossing.op in WRITES and len(crossing.inputs) > 1 and self._measured(crossing.inputs[1], name),
        )

    def _measured(self, value: str, name: str) -> bool:
        """Whether a value is reckoned from the length of an input, which another length is taken from."""
        waiting, seen, less = deque([value]), {value}, False
        while waiting and len(seen) < NEAR and self.effort.goes_on():
            node = self.flow.producers.get(waiting.popleft())
            if node is None:
                continue
            if node.op == "Shape":
                if less and node.inputs[0] == name:
                    return True
                continue
            less = less or node.op == "Sub"
            fresh = [value for value in node.inputs if value and value not in seen]
            seen.update(fresh)
            waiting.extend(fresh)
        return False

    def _view_of(self, value: str) -> str | None:
        """A graph output that shows a value through operators that keep content, forward or on the way to it."""
        waiting, seen = deque([value]), {value}
        while waiting and len(seen) < NEAR:
            current = waiting.popleft()
            if current in self.flow.outputs_of:
                return self.flow.outputs_of[current][0]
            near = [
                o
                for node, index in self.flow.consumers.get(current, ())
                if index in KEEPS.get(node.op, ())
                for o in node.outputs
            ]
            node = self.flow.producers.get(current)
            if node is not None and node.op in KEEPS and node.inputs and current == node.outputs[0]:
                near.append(node.inputs[0])
            for value_near in near:
                if value_near and value_near not in seen:
                    seen.add(value_near)
                    waiting.append(value_near)
        return None


def _crossing(node: FlowNode) -> tuple[How, Growth]:
    """How new entries join at a node, and what becomes of the length."""
    ports = ports_of(node.domain, node.op)
    if node.op == "Concat":
        return "append", "grow"
    if ports is None:
        return "write", "static"
    if node.op == "TensorScatter":
        mode = node.attribute("mode")
        return "write", "ring" if mode is not None and mode.s == b"circular" else "static"
    if node.number("sliding_window_cache", 0):
        return "operator", "ring"
    if ports.fixed_with is not None and len(node.inputs) > ports.fixed_with and node.inputs[ports.fixed_with]:
        return "operator", "static"
    return "operator", ports.growth
