"""What a graph does with its inputs, whatever they are called: which output carries a past on, and what it is used for.

A past is followed forward through operators that keep its content. Where new entries join it, it grows; where they are
written into it, it is a buffer; what reaches an attention's Softmax is a key, what meets its result is a value.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Literal

from kvdoctor.cache_operators import ports_of
from kvdoctor.contract import Growth
from kvdoctor.flow import Flow, FlowNode
from kvdoctor.graph import integers

KEEPS = {
    "Identity": (0,),
    "Cast": (0,),
    "CastLike": (0,),
    "Transpose": (0,),
    "Reshape": (0,),
    "Squeeze": (0,),
    "Unsqueeze": (0,),
    "Flatten": (0,),
    "Expand": (0,),
    "Tile": (0,),
    "Slice": (0,),
    "Gather": (0,),
    "GatherND": (0,),
    "GatherElements": (0,),
    "Split": (0,),
    "Compress": (0,),
    "QuantizeLinear": (0,),
    "DequantizeLinear": (0,),
    "DynamicQuantizeLinear": (0,),
}
"""Operators that pass the content of an input on: which inputs."""

PASSES_OUT = {"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze"}
"""Operators that may stand between a state as it was made and the output that returns it."""

WRITES = {"ScatterND": (0,), "ScatterElements": (0,), "Scatter": (0,), "Where": (1, 2)}
"""Operators that write new entries into a buffer: which inputs may be the buffer."""

MIXES = {
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Neg",
    "Pow",
    "Sqrt",
    "Reciprocal",
    "Where",
    "Concat",
    "Pad",
    "Clip",
    "Max",
    "Min",
    "Tanh",
    "ReduceMean",
    "LayerNormalization",
    "SimplifiedLayerNormalization",
    "RMSNormalization",
    "RotaryEmbedding",
    "ScatterND",
    "ScatterElements",
    "TensorScatter",
    "MaskedFill",
}
"""Operators between a past and its attention (rotation, scaling, normalisation), or between scores and the Softmax."""

PRODUCTS = {
    "MatMul": (0, 1),
    "FusedMatMul": (0, 1),
    "TransposeMatMul": (0, 1),
    "Gemm": (0, 1),
    "MatMulInteger": (0, 1),
    "MatMulIntegerToFloat": (0, 1),
    "QLinearMatMul": (0, 3),
    "DynamicQuantizeMatMul": (0, 1),
    "MatMulNBits": (0,),
    "Einsum": (0, 1, 2, 3),
}
"""Matrix products: which inputs are operands."""

COUNTS_ON = {"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Add"}
"""Operators between a counter and the output that returns it, larger by the new tokens."""

TRIMS = {"Slice", "Gather", "Split", "GatherND"}
"""Operators that cut entries off."""

SOFTMAX = {"Softmax", "BiasSoftmax", "LogSoftmax"}
CONVOLUTIONS = {"Conv", "ConvInteger", "QLinearConv", "NhwcConv", "FusedConv"}
SHAPES = {"Shape", "Size", "ConstantOfShape", "Range"}
MOST_VISITED = 4000
"""Values that one walk looks at before it gives up: the attention of a state is near to it."""

NEAR = 64
"""Values that are looked at where an answer, if there is one, is next door."""

MOST_LOOKS = 300_000
"""Values that all walks over one graph look at together, where a layer takes 30: thousands of inputs on one long chain
would take minutes.
"""

NEW = -1
"""An axis that is none of the input's."""

How = Literal["append", "write", "operator", "unchanged", "update"]
Part = Literal["key", "value", "key-value", "memory", "conv"]


@dataclass(frozen=True, slots=True)
class Use:
    """What a state is used for. `site` is the place of the attention in the flow, which orders the layers.

    `proven` says that the Softmax of the attention was seen: before it is a key, what meets its result is a value. An
    operand of a product without one near it is taken for a value, unproven.
    """

    part: Part
    site: int
    proven: bool = True


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
    """Questions to one flow; answers are kept."""

    flow: Flow
    looked: int = 0
    _states: dict[tuple[str, int], StateFlow] = field(default_factory=dict)
    _uses: dict[str, Use | None] = field(default_factory=dict)
    _scores: dict[int, bool] = field(default_factory=dict)
    _reached: dict[str, set[str]] = field(default_factory=dict)

    def goes_on(self) -> bool:
        """Count one value that a walk looks at; False once all walks together have looked at MOST_LOOKS."""
        self.looked += 1
        return not self.gave_up

    @property
    def gave_up(self) -> bool:
        """Whether walks were ended because they looked at too many values."""
        return self.looked > MOST_LOOKS

    def state(self, name: str, rank: int) -> StateFlow:
        """Follow one graph input forward."""
        if (name, rank) not in self._states:
            self._states[name, rank] = replace(self._followed(name, rank), layers=self._layers(name, rank))
        return self._states[name, rank]

    def _followed(self, name: str, rank: int) -> StateFlow:
        use, reached = self.use(name), None
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

    def use(self, name: str) -> Use | None:
        """What the nearest attention, projection or convolution behind a value takes it for."""
        if name not in self._uses:
            self._uses[name] = self._used(name)
        return self._uses[name]

    def _used(self, name: str) -> Use | None:
        waiting, seen = deque([name]), {name}
        found: dict[str, tuple[FlowNode, int]] = {}
        while waiting and len(seen) < MOST_VISITED and self.goes_on():
            value = waiting.popleft()
            for node, index in self.flow.consumers.get(value, ()):
                part = self._part(node, index)
                if part is not None:
                    found.setdefault(part, (node, index))
                elif index in KEEPS.get(node.op, ()) or node.op in MIXES or _is_past(node, index):
                    for output in node.outputs[:3]:
                        if output and output not in seen:
                            seen.add(output)
                            waiting.append(output)
        if {"key", "value"} <= set(found) or "key-value" in found:
            return Use("key-value", min(node.index for node, _ in found.values()))
        part = next((part for part in ("key", "value", "conv", "memory") if part in found), None)
        if part is None:
            return None
        node, index = found[part]
        return Use(part, node.index, part != "value" or self._is_weighted(node, index))

    def made(self, output: str) -> Use | None:
        """What a graph output is used for in the graph that makes it: the value itself, or one it is a view of."""
        value: str | None = self.flow.results.get(output, output)
        for _ in range(12):
            if value is None:
                return None
            use = self.use(value)
            if use is not None and use.part in ("key", "value", "key-value"):
                return use
            node = self.flow.producers.get(value)
            if node is None or not node.inputs:
                return None
            ports = ports_of(node.domain, node.op)
            for part, out in (ports.pasts if ports else {}).values():
                if out < len(node.outputs) and node.outputs[out] == value and part in ("key", "value", "key-value"):
                    return Use(part, node.index)
            value = node.inputs[0] if node.op in KEEPS else None
        return None

    def updated(self, name: str, fitting: "set[str]") -> str | None:
        """The nearest of some outputs that depends on an input: how a replaced state is carried on.

        `fitting` are the outputs of the same element type and shape that nothing else claims.
        """
        wanted: dict[str, str] = {}
        for output in sorted(fitting):
            value: str | None = self.flow.results[output]
            while value and value not in wanted:  # as it was before it was only passed out: that may come late
                wanted[value] = output
                node = self.flow.producers.get(value)
                value = node.input(0) if node is not None and node.op in PASSES_OUT else None
        waiting: list[tuple[int, str]] = [(-1, name)]
        seen = {name}
        while waiting and self.goes_on():
            _, value = heappop(waiting)
            if value in wanted:
                return wanted[value]
            for node, _ in self.flow.consumers.get(value, ()):
                if node.op in SHAPES:
                    continue
                for output in node.outputs:
                    if output and output not in seen:
                        seen.add(output)
                        heappush(waiting, (node.index, output))
        return None

    def used_first(self, name: str) -> int:
        """The place of the first node that takes a value."""
        return min((node.index for node, _ in self.flow.consumers.get(name, ())), default=-1)

    def made_last(self, output: str) -> int:
        """The place of the node that makes an output, before it is only turned and passed out."""
        value = self.flow.results.get(output, output)
        node, passed = self.flow.producers.get(value), set[int]()
        while node is not None and node.op in PASSES_OUT and node.index not in passed:
            passed.add(node.index)
            node = self.flow.producers.get(node.input(0))
        return node.index if node is not None else -1

    def counted(self, name: str, fitting: "set[str]", tokens: "set[str]") -> str | None:
        """The output that returns a counter: the input with a number added that only `tokens` have a part in."""
        waiting, seen = deque([(name, False)]), {(name, False)}
        while waiting and len(seen) < MOST_VISITED and self.goes_on():
            value, added = waiting.popleft()
            output = next((output for output in self.flow.outputs_of.get(value, ()) if output in fitting), None)
            if output is not None and added:
                return output
            for node, index in self.flow.consumers.get(value, ()):
                step = (node.output(), added or node.op == "Add")
                if node.op not in COUNTS_ON or not step[0] or step in seen:
                    continue
                if node.op != "Add" or self._made_of(node.input(1 - index), tokens):
                    seen.add(step)
                    waiting.append(step)
        return None

    def _made_of(self, value: str, names: "set[str]") -> bool:
        """Whether no other inputs of the graph than some have a part in a value, not even by their shape."""
        waiting, seen = deque([value]), {value}
        while waiting and self.goes_on():
            current = waiting.popleft()
            node = self.flow.producers.get(current)
            if node is None and current not in names and current not in self.flow.constants:
                return False
            fresh = [name for name in (node.inputs if node is not None else ()) if name and name not in seen]
            seen.update(fresh)
            waiting.extend(fresh)
            if len(seen) > NEAR:
                return False
        return True

    def meets(self, name: str, values: "set[str]") -> bool:
        """Whether an input is multiplied with or added to one of some values before it comes to an attention.

        What is reckoned with new tokens so is no past: it is a table of rotations, or a mask.
        """
        waiting, seen = deque([name]), {name}
        while waiting and len(seen) < MOST_VISITED and self.goes_on():
            for node, index in self.flow.consumers.get(waiting.popleft(), ()):
                if node.op in MIXES and any(other in values for i, other in enumerate(node.inputs) if i != index):
                    return True
                if (index in KEEPS.get(node.op, ()) or node.op in MIXES) and node.output() not in seen:
                    seen.add(node.output())
                    waiting.append(node.output())
        return False

    def reached_from(self, names: "set[str]") -> set[str]:
        """All values that the content of some inputs has a part in; shapes alone do not count."""
        reached = set(names)
        for node in self.flow.nodes:
            if node.op not in SHAPES and any(name in reached for name in node.inputs):
                reached.update(node.outputs)
        return reached

    @cached_property
    def sites(self) -> list[FlowNode]:
        """The attentions of the graph, in order: each Softmax over scores, each fused operator."""
        return [
            node
            for node in self.flow.nodes
            if node.op in SOFTMAX or ((ports := ports_of(node.domain, node.op)) is not None and ports.keys)
        ]

    def _part(self, node: FlowNode, index: int) -> str | None:
        """What a node takes its input for, where that ends the walk."""
        ports = ports_of(node.domain, node.op)
        if ports is not None:
            if index in ports.pasts and ports.pasts[index][0] in ("key", "value", "key-value"):
                return ports.pasts[index][0]
            if index in ports.pasts and ports.pasts[index][0] in ("conv",):
                return "conv"
            if index in ports.keys:
                return "key"
            if index in ports.values:
                return "value"
        if node.op in CONVOLUTIONS and index == 0:
            return "conv"
        if index in PRODUCTS.get(node.op, ()):
            others = [node.inputs[i] for i in PRODUCTS[node.op] if i != index and i < len(node.inputs)]
            if all(name in self.flow.fixed for name in others):
                return "memory"
            return "key" if self._gives_scores(node) else "value"
        return None

    def _gives_scores(self, node: FlowNode) -> bool:
        """Whether a product runs into a Softmax before it meets another product."""
        if node.index not in self._scores:
            waiting, seen = deque(node.outputs), set(node.outputs)
            found = False
            while waiting and not found and len(seen) < MOST_VISITED and self.goes_on():
                for taker, index in self.flow.consumers.get(waiting.popleft(), ()):
                    found = found or self.is_softmax(taker)
                    if index in KEEPS.get(taker.op, ()) or taker.op in MIXES:
                        for output in taker.outputs:
                            if output and output not in seen:
                                seen.add(output)
                                waiting.append(output)
            self._scores[node.index] = found
        return self._scores[node.index]

    def is_softmax(self, node: FlowNode) -> bool:
        """A Softmax, or the Exp of one that is spelled out: divided by its sum."""
        if node.op != "Exp":
            return node.op in SOFTMAX
        takers = {taker.op for output in node.outputs for taker, _ in self.flow.consumers.get(output, ())}
        return {"ReduceSum", "Div"} <= takers

    def _is_weighted(self, node: FlowNode, index: int) -> bool:
        """Whether what a product multiplies an operand with comes from a Softmax, or a fused operator says it."""
        if ports_of(node.domain, node.op) is not None:
            return True
        waiting = deque(node.inputs[i] for i in PRODUCTS[node.op] if i != index and i < len(node.inputs))
        seen = set(waiting)
        while waiting and len(seen) < MOST_VISITED and self.goes_on():
            maker = self.flow.producers.get(waiting.popleft())
            if maker is None:
                continue
            if self.is_softmax(maker):
                return True
            if maker.op in KEEPS or maker.op in MIXES or maker.op == "Dropout":
                fresh = [value for value in maker.inputs if value and value not in seen]
                seen.update(fresh)
                waiting.extend(fresh)
        return False

    def _carried_on(self, name: str, rank: int) -> Iterator[tuple[str, _Way]]:
        """Graph outputs that hold the content of an input, after no or one crossing."""
        for value, way in self._walk(name, rank):
            for output in self.flow.outputs_of.get(value, ()):
                yield output, way

    def _walk(self, name: str, rank: int) -> Iterator[tuple[str, _Way]]:
        """Values that hold the content of an input, nearest first."""
        waiting = deque([(name, _Way(tuple(range(rank))))])
        seen = {(name, False)}
        while waiting and len(seen) < MOST_VISITED and self.goes_on():
            value, way = waiting.popleft()
            yield value, way
            for node, index in self.flow.consumers.get(value, ()):
                for output, brings in _onward(node, index):
                    joins = brings and (node.op != "Where" or self._chooses_new(node, index, name))
                    # A second Concat puts keys and values, or all layers, together again.
                    crosses = joins and not (way.crossing is not None and node.op == "Concat")
                    crossed = crosses or way.crossing is not None
                    if (crosses and way.crossing is not None) or not output or (output, crossed) in seen:
                        continue
                    seen.add((output, crossed))
                    axes = self._moved(node, way.axes)
                    if crosses:
                        waiting.append((output, _Way(axes, node, _axis(node, way.axes), cut=way.cut)))
                    else:
                        trimmed = way.trimmed or (way.crossing is not None and node.op in TRIMS)
                        cut = way.cut or (way.crossing is None and self._cuts(node))
                        waiting.append((output, _Way(axes, way.crossing, way.axis, trimmed, cut)))

    def _cuts(self, node: FlowNode) -> bool:
        """Whether a node takes a part of its input whose end depends on what the graph is fed."""
        return node.op == "Slice" and any(name and name not in self.flow.fixed for name in node.inputs[1:3])

    def _moved(self, node: FlowNode, axes: tuple[int, ...] | None) -> tuple[int, ...] | None:
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
            at = _within(node.number("axis", 0), len(axes))
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
        places = {_within(axis, rank) for axis in given}
        if node.op == "Squeeze":
            return tuple(axis for at, axis in enumerate(axes) if at not in places)
        kept = iter(axes)
        return tuple(NEW if at in places else next(kept, NEW) for at in range(rank))

    def _layers(self, name: str, rank: int) -> int | None:
        """The axis along which an input is taken apart into what one attention after the other uses."""
        waiting: deque[tuple[str, tuple[int, ...]]] = deque([(name, tuple(range(rank)))])
        seen, sites = {name}, set[tuple[int, str, int]]()
        while waiting and self.goes_on():
            value, axes = waiting.popleft()
            for node, index in self.flow.consumers.get(value, ()):
                moved = self._moved(node, axes)
                passed = node.output() if node.op in ("Identity", "Cast", "Transpose") else ""
                if index == 0 and passed and moved and passed not in seen:
                    seen.add(passed)
                    waiting.append((passed, moved))
                elif index == 0 and (at := self._taken_along(node, len(axes))) is not None:
                    uses = (self.use(output) for output in node.outputs if output)
                    sites |= {(axes[at], use.part, use.site) for use in uses if use is not None}
        several = [(axis, part) for axis, part, _ in sites]
        return next((axis for axis, part in several if several.count((axis, part)) > 1), None)

    def _taken_along(self, node: FlowNode, rank: int) -> int | None:
        """The axis along which a node takes out entries that the graph names: no others at another length."""
        if node.op == "Split" or (node.op == "Gather" and node.input(1) in self.flow.fixed):
            return _within(node.number("axis", 0), rank)
        if node.op == "Slice" and all(name in self.flow.fixed for name in node.inputs[1:] if name):
            tensor = self.flow.constant(node.inputs[3]) if len(node.inputs) > 3 and node.inputs[3] else None
            axes = integers(tensor) if tensor is not None else node.numbers("axes")
            return _within(axes[0], rank) if axes is not None and len(axes) == 1 else None
        return None

    def _chooses_new(self, node: FlowNode, index: int, name: str) -> bool:
        """Whether a Where has new entries beside the content of an input: padding put to zero brings none."""
        other = node.input(3 - index)
        if other in self.flow.fixed:
            return False
        if name not in self._reached:
            self._reached[name] = self.reached_from({name})
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
        while waiting and len(seen) < NEAR and self.goes_on():
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


def _is_past(node: FlowNode, index: int) -> bool:
    ports = ports_of(node.domain, node.op)
    return ports is not None and index in ports.pasts


def _onward(node: FlowNode, index: int) -> Iterator[tuple[str, bool]]:
    """Where the content of an input leaves a node, and whether new entries joined it there."""
    ports = ports_of(node.domain, node.op)
    if ports is not None and index in ports.pasts:
        out = ports.pasts[index][1]
        if out < len(node.outputs):
            yield node.outputs[out], True
    elif index in KEEPS.get(node.op, ()):
        for output in node.outputs:
            yield output, False
    elif node.op == "Identity":
        yield node.outputs[0], False
    elif (node.op == "Concat" or index in WRITES.get(node.op, ())) and node.outputs:
        # Nothing joins in a Concat of one input, which an exporter leaves where it stacked a list.
        yield node.outputs[0], len(node.inputs) > 1


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


def _axis(node: FlowNode, axes: tuple[int, ...] | None) -> int | None:
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


def _within(axis: int, rank: int) -> int | None:
    """An axis counted from the front; None where a tensor of that rank has none such."""
    return axis % rank if -rank <= axis < rank else None
