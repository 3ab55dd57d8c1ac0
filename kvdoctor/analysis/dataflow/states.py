"""Follows a past through the graph: which output carries it on, and along which axis new entries join it.

A past is followed forward through operators that keep its content. Where new entries are concatenated to it, it grows;
where they are written into it, it is a buffer.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from kvdoctor.analysis.dataflow import walks
from kvdoctor.analysis.dataflow.axis_walks import NEW, AxisWalks, DeclaredSizes, Known, Place, PlaceUnknown, join_axis
from kvdoctor.analysis.dataflow.uses import ATTENTION_PARTS, StateUse, UseFinder
from kvdoctor.contract import Growth
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import operator_of, ports_of
from kvdoctor.records import record

How = Literal["append", "write", "operator", "unchanged", "update", "computed"]
"""How a past reaches its present: new entries are concatenated, or written into it; an operator holds the cache; it
comes back as it was; it is computed anew; entries are concatenated, and old ones changed by arithmetic."""


@record
class StateFlow:
    """What a graph does with one input that may be a state.

    `output` carries its content on, `how` it gets there, `axis` is the input's axis along which new entries come, or
    None where it cannot be followed. `joined` says that new entries meet it before its use, `trimmed` that some entries
    are cut off afterwards, `prepended` that the new ones are concatenated in front of it, `window` how many tokens the
    operator that holds the cache looks back over. `delta` is an output of the new entries alone. `cut` says that the
    graph slices the input before new entries join, up to a computed end; `at_end` that the write position is computed
    from the input's own length. `batch` is the batch axis where an operator holds the state, `layers` the axis along
    which the input is taken apart for one attention after the other, `parts` that into keys and values.
    """

    input: str
    use: StateUse | None = None
    output: str | None = None
    how: How | None = None
    growth: Growth | None = None
    axis: int | None = None
    joined: bool = False
    trimmed: bool = False
    prepended: bool = False
    delta: str | None = None
    window: int | None = None
    cut: bool = False
    at_end: bool = False
    batch: int = 0
    layers: int | None = None
    parts: int | None = None


@record
class _Path:
    """How a walk came to a value: its axes, the node where new entries joined, and cuts before and after that node.

    `changed` are the nodes that compute other numbers, or cut entries off after the join. `last` says that the walked
    input is the last one of the Concat. `place` is that in a stack with other inputs.
    """

    axes: tuple[int, ...] | None
    join: FlatNode | None = None
    axis: int | None = None
    last: bool = False
    trimmed: bool = False
    cut: bool = False
    changed: tuple[FlatNode, ...] = ()
    place: Place | None = None


@dataclass(eq=False, repr=False)
class Dataflow:
    """Follows the states of one flow; answers are cached.

    `shapes` are the sizes of its inputs, where they are numbers. `uses` says what values are used for, `descent`
    which values depend on which.
    """

    flow: Flow
    shapes: Mapping[str, Known] = field(default_factory=dict)
    budget: walks.WalkBudget = field(default_factory=walks.WalkBudget)
    _states: dict[tuple[str, int], StateFlow] = field(default_factory=dict)
    _reached: dict[str, set[str]] = field(default_factory=dict)

    @cached_property
    def uses(self) -> UseFinder:
        """What values are used for."""
        return UseFinder(self.flow, self.budget)

    @cached_property
    def descent(self) -> walks.Descent:
        """Which values depend on which."""
        return walks.Descent(self.flow, self.budget)

    @cached_property
    def axes(self) -> AxisWalks:
        """Where the axes of inputs are, and inputs in stacks of several."""
        return AxisWalks(self.flow, self.budget, self.uses)

    def state(self, name: str, rank: int) -> StateFlow:
        """Follow one graph input forward."""
        if (name, rank) not in self._states:
            layers, parts = self.axes.find_stacked_axes(name, rank)
            self._states[name, rank] = replace(self._follow(name, rank), layers=layers, parts=parts)
        return self._states[name, rank]

    def find_joined(self, name: str, rank: int) -> tuple[str, tuple[int, ...]] | None:
        """The entries that are concatenated to an input, and which of the input's axes each of theirs is."""
        for _, path in self.walk(name, rank):
            if path.join is not None and path.join.has("join") and path.axes is not None and NEW not in path.axes:
                own = self.descent.reached_from({name}, path.join)
                new = next((value for value in path.join.inputs if value not in own), None)
                return (new, path.axes) if new is not None else None
        return None

    def find_entry_sizes(self, past: str, rank: int) -> tuple[int | None, ...]:
        """The sizes of the entries that are concatenated to a past, by its axes; None for each that is not known."""
        found = self.find_joined(past, rank)
        value, axes = found if found is not None else ("", ())
        sizes = DeclaredSizes(self.flow).shape(value, rank=len(axes)) or ()
        known = dict(zip(axes, sizes, strict=True)) if len(sizes) == len(axes) else {}
        return tuple(known.get(axis) for axis in range(rank))

    def find_changes(self, name: str, rank: int, output: str) -> tuple[FlatNode, ...]:
        """The nodes between an input and an output that returns it which change its entries or cut some off."""
        reached = self.outputs_reached(name, rank, computed=True)
        return next((path.changed for found, path in reached if found == output and path.join is not None), ())

    def computed_state(self, name: str, rank: int) -> StateFlow | None:
        """The state of an input that arithmetic changes, before or after new entries join, on its way to an output.

        None where an output returns its content as it is, and where no attention uses it or the new entries.
        """
        state = self.state(name, rank)
        if state.output is not None or state.delta is not None:
            return None
        for output, path in self.outputs_reached(name, rank, computed=True):
            if path.join is not None and path.join.has("join"):
                found = self._describe_join(name, output, path, path.join)
                in_attention = found.use is not None and found.use.part in ATTENTION_PARTS
                return replace(found, how="computed", layers=state.layers, parts=state.parts) if in_attention else None
        return None

    def _follow(self, name: str, rank: int) -> StateFlow:
        use, unchanged = self.uses.use_of(name), None
        for output, path in self.outputs_reached(name, rank):
            if path.join is not None:
                return self._describe_join(name, output, path, path.join)
            unchanged = unchanged or output
        for _, path in self.walk(name, rank):
            if path.join is not None and not path.join.has("select"):
                return self._describe_join(name, None, path, path.join)
        if unchanged is not None:
            return StateFlow(name, use, unchanged, "unchanged", "constant")
        return StateFlow(name, use)

    def outputs_reached(self, name: str, rank: int, *, computed: bool = False) -> Iterator[tuple[str, _Path]]:
        """Graph outputs that hold the content of an input, alone or joined once by new entries."""
        for value, path in self.walk(name, rank, computed=computed):
            for output in self.flow.outputs_of.get(value, ()) if path.place is None else ():
                yield output, path

    def walk(self, name: str, rank: int, *, computed: bool = False) -> Iterator[tuple[str, _Path]]:
        """Values that hold the content of an input, nearest first; also what is `computed` of it, entry by entry."""
        waiting = deque([(name, _Path(tuple(range(rank))))])
        seen = {(name, False)}
        while waiting and len(seen) < walks.MOST_VISITED and self.budget.goes_on():
            value, path = waiting.popleft()
            yield value, path
            for node, index in self.flow.consumers.get(value, ()):
                steps = self._steps(node, index, name, path)
                if computed and node.op in walks.COMPUTES:
                    steps = iter([(node.output(), replace(path, changed=(*path.changed, node)))])
                for output, onward in steps:
                    if output and (output, onward.join is not None) not in seen:
                        seen.add((output, onward.join is not None))
                        waiting.append((output, onward))

    def _steps(self, node: FlatNode, index: int, name: str, path: _Path) -> Iterator[tuple[str, _Path]]:
        """The outputs of a node that hold the content of the walked input, with the path to each."""
        for output, adds_entries in walks.outputs_with_content(node, index):
            joins, other = adds_entries, node.input(3 - index) if node.has("select") else ""
            if joins and other:  # masking with a constant adds no entries
                joins = other not in self.flow.fixed and other not in self._reached_from(name)
            # A second Concat stacks keys and values, or all layers, again: no entries join there.
            joins = joins and not (path.join is not None and node.has("join"))
            joins = joins and not (node.has("join") and self._is_made_of(node, name))
            stacks = joins and self.axes.stacks(node, path.axes)
            if joins and path.join is not None:
                continue
            try:
                place = self.axes.place_after(node, output, path.axes, path.place) if path.place else None
            except PlaceUnknown:
                continue
            if stacks:
                joins, place = False, Place(index, len(node.inputs))
            axes = self.axes.axes_after(node, index, path.axes)
            if joins:
                at = self._join_axis(node, path.axes)
                last = node.op == "Concat" and index == len(node.inputs) - 1
                yield output, replace(path, axes=axes, join=node, axis=at, last=last, place=place)
                continue
            trims = path.join is not None and node.has("pick") and place == path.place
            cut = path.cut or (path.join is None and self._slices_to_computed_end(node))
            changed = (*path.changed, node) if trims or node.has("select") else path.changed
            trimmed = path.trimmed or trims
            yield output, replace(path, axes=axes, trimmed=trimmed, cut=cut, changed=changed, place=place)

    def _join_axis(self, node: FlatNode, axes: tuple[int, ...] | None) -> int | None:
        """The input's axis along which a node adds new entries, where the graph says so.

        The index of a ScatterND has an entry for each axis of the buffer that it counts in. Where it has one, that is
        the first axis; where it is put together from columns, one for each of these axes, the one that rests on an
        input alone, or else the last one, counts the tokens.
        """
        if node.op != "ScatterND" or axes is None:
            return join_axis(node, axes)
        if (DeclaredSizes(self.flow, {**self.shapes}).shape(node.input(1)) or (None,))[-1] == 1:
            return axes[0] if axes[0] != NEW else None
        made = self.flow.producers.get(node.input(1))
        if made is None or not made.has("join") or made.number("axis", 0) == 0 or len(made.inputs) > len(axes):
            return None
        columns = [self.flow.producers.get(name) for name in made.inputs]
        if not all(column is not None and (column.has("view") or column.has("repeat")) for column in columns):
            return None
        fed = [
            at for at, name in enumerate(made.inputs) if not self.shapes.keys().isdisjoint(self.descent.ancestors(name))
        ]
        at = axes[fed[0] if len(fed) == 1 else len(columns) - 1]
        return at if at != NEW else None

    def _slices_to_computed_end(self, node: FlatNode) -> bool:
        """Whether a node takes a part of its input whose end depends on the feeds."""
        if not node.has("pick"):
            return False
        bounds = (node.input(at) for at in operator_of(node.op).bounds)
        return any(name and name not in self.flow.fixed for name in bounds)

    def _is_made_of(self, node: FlatNode, name: str) -> bool:
        """Whether all that a node puts together is made of parts of one input, in another order or rotated.

        What joins the whole of a state is new, although it may be computed with that state.
        """
        whole = {one for value in node.inputs for one in self.descent.views(value)}
        return name not in whole and all(value in self._reached_from(name) for value in node.inputs)

    def _reached_from(self, name: str) -> set[str]:
        if name not in self._reached:
            self._reached[name] = self.descent.reached_from({name})
        return self._reached[name]

    def _describe_join(self, name: str, output: str | None, path: _Path, join: FlatNode) -> StateFlow:
        """A state that new entries join, with the output, if any, that returns them without the state."""
        how, growth = _growth_at(join)
        ports = ports_of(join.domain, join.op)
        window = join.number("local_window_size", -1) if ports else -1
        return StateFlow(
            name,
            self.uses.use_of(name) or self._use_of_new(name, join),
            output,
            how if output is not None else None,
            growth,
            axis=path.axis,
            joined=True,
            trimmed=path.trimmed,
            prepended=path.last and output is not None,
            delta=self._find_delta(name, output, join),
            window=window if window > 0 else None,
            cut=path.cut,
            batch=ports.batch if ports is not None else 0,
            at_end=any(self._is_own_length(join.input(at), name) for at in operator_of(join.op).places),
        )

    def _use_of_new(self, name: str, join: FlatNode) -> StateUse | None:
        """What an attention uses the entries for that join a state which it does not read itself: a likely use."""
        uses = (self.uses.use_of(value) for value in self._new_entries(name, join))
        found = next((use for use in uses if use is not None and use.proven and use.part in ATTENTION_PARTS), None)
        return replace(found, proven=False) if found is not None else None

    def _new_entries(self, name: str, join: FlatNode) -> Iterator[str]:
        new = join.inputs if join.has("join") else join.inputs[1:]
        return (value for value in new if value and value != name and value not in self.flow.fixed)

    def _find_delta(self, name: str, output: str | None, join: FlatNode) -> str | None:
        """The graph output, other than `output`, that returns the entries which join a state."""
        if not join.has("write") and ports_of(join.domain, join.op) is not None:
            return None
        views = map(self._find_view, self._new_entries(name, join))
        return next((view for view in views if view is not None and view != output), None)

    def _is_own_length(self, value: str, name: str) -> bool:
        """Whether a value is computed from the length of an input, with another length subtracted."""
        subtracted, walk = False, walks.Walk([value], self.budget, walks.NEAR)
        for current in walk:
            node = self.flow.producers.get(current)
            if node is None:
                continue
            if node.has("measure"):
                if subtracted and node.input(0) == name:
                    return True
                continue
            subtracted = subtracted or node.has("subtract")
            walk.add(node.inputs)
        return False

    def _find_view(self, value: str) -> str | None:
        """A graph output that is a view of a value, or of the value that it is itself a view of."""
        walk = walks.Walk([value], most=walks.NEAR)
        for current in walk:
            if current in self.flow.outputs_of:
                return self.flow.outputs_of[current][0]
            takers = self.flow.consumers.get(current, ())[: walks.NEAR]
            node = self.flow.producers.get(current)
            near = [out for taker, index in takers for out in walks.views_of(taker, index)]
            if node is not None and node.has("view"):  # then a Concat stacks parts or layers
                near += [taker.output() for taker, _ in takers if taker.has("join")]
            if node is not None and (node.has("loop") or current == node.output()):
                near.append(walks.viewed_by(node, current))
            walk.add(near)
        return None


def _growth_at(node: FlatNode) -> tuple[How, Growth]:
    """How new entries join at a node, and what that does to the length."""
    ports = ports_of(node.domain, node.op)
    if node.has("join"):
        return "append", "grow"
    if ports is None or node.has("write"):
        return "write", "static"
    if node.number("sliding_window_cache", 0):
        return "operator", "ring"
    if ports.fixed_with is not None and len(node.inputs) > ports.fixed_with and node.inputs[ports.fixed_with]:
        return "operator", "static"
    return "operator", ports.growth
