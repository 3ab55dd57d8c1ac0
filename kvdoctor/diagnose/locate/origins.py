"""Where an axis or a number in a graph comes from: fed lengths, or constants that froze it.

The walk goes back over the sizes and short integer tensors of one real run, so that a `-1`, a broadcast or a `Gather`
of a shape needs no algebra. Each step follows the rule of the operator where it is known, else equal sizes. A claim
about a fed length is proved afterwards by feeding another one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from kvdoctor.diagnose.locate.graph_runner import ObservedValues
from kvdoctor.diagnose.locate.runnable import RunnableGraph, RunnableNode
from kvdoctor.model.view import integers
from kvdoctor.records import record

MOST_STEPS = 4000
MOST_THROUGH = 2
"""Nodes on the way that a report names."""

SAME = {"Identity", "Cast", "Dropout", "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "CumSum"}

PASSES = {"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Flatten", "Neg", "Abs", "Expand", "Transpose"}
"""Operators whose numbers are those of their first input."""


@record(slots=False)
class SizeSource:
    """An end of the way back.

    kind: "fed length" or "fed value" (`name` is the input), "constant", a number that the graph holds (with all numbers
    of that tensor in `text`), or "weight", the size of one. `size` is that length or number, `through` the nodes on the
    way, nearest to the end first.
    """

    kind: str
    name: str
    axis: int
    size: int
    through: tuple[str, ...] = ()
    text: str = ""


@record(slots=False)
class _Back:
    """One step back: from an axis of a value over the node that makes it; `seen` are the axes already passed."""

    node: RunnableNode
    value: str
    axis: int
    seen: frozenset[tuple[str, int]]


@dataclass
class Origins:
    """Walks a graph back. `known` holds what the run showed, `fed` the shapes of the inputs."""

    flat: RunnableGraph
    known: ObservedValues
    fed: dict[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        self.steps = 0

    def of_axis(self, value: str, axis: int) -> list[SizeSource]:
        """The sources of the size of an axis."""
        self.steps = 0
        return _unique(self._axis(value, axis, frozenset()))

    def of_number(self, value: str, index: int) -> list[SizeSource]:
        """The sources of a number in a short tensor of integers."""
        self.steps = 0
        return _unique(self._number(value, index, frozenset()))

    def shape(self, value: str) -> tuple[int, ...] | None:
        """The sizes of a value, where they are known."""
        if value in self.known.shapes:
            return self.known.shapes[value]
        if value in self.fed:
            return self.fed[value]
        tensor = self.flat.constants.get(value)
        return tuple(tensor.dims) if tensor is not None else None

    def numbers(self, value: str) -> tuple[int, ...] | None:
        """The numbers of a short tensor of integers, where they are known."""
        if value in self.known.numbers:
            return self.known.numbers[value]
        tensor = self.flat.constants.get(value)
        return integers(tensor) if tensor is not None else None

    def _axis(self, value: str, axis: int, seen: frozenset[tuple[str, int]]) -> list[SizeSource]:
        shape, key = self.shape(value), (value, axis)
        self.steps += 1
        if shape is None or not 0 <= axis < len(shape) or key in seen or self.steps > MOST_STEPS:
            return []
        size = shape[axis]
        if value in self.fed:
            return [SizeSource("fed length", value, axis, size)]
        node = self.flat.producers.get(value)
        if node is None:
            return [SizeSource("weight", self.flat.label(value), axis, size)]
        found = self._back(_Back(node, value, axis, seen | {key}), size)
        return [_by(source, node) for source in found]

    def _back(self, back: _Back, size: int) -> list[SizeSource]:
        node = back.node
        rule = _RULES.get(node.op) if not node.domain else None
        found = rule(self, back) if rule is not None else None
        if found is not None:
            return found
        given = [(name, self.shape(name) or ()) for name in node.inputs if name]
        if node.op in SAME and given:
            return self._axis(given[0][0], back.axis, back.seen)
        # Broadcast, from the last axis on: the axis has its size from every input that has this size there.
        rank = len(self.shape(back.value) or ())
        places = [(name, back.axis - rank + len(shape), shape) for name, shape in given]
        alike = [(name, at) for name, at, shape in places if at >= 0 and shape[at] == size]
        if alike:
            alike = [(name, at) for name, at in alike if name not in self.flat.constants] or alike[:1]
        else:
            alike = [(name, at) for name, shape in given for at, other in enumerate(shape) if other == size]
        return [source for name, at in alike for source in self._axis(name, at, back.seen)]

    def _number(self, value: str, index: int, seen: frozenset[tuple[str, int]]) -> list[SizeSource]:
        numbers, key = self.numbers(value), (value, -1 - index)
        self.steps += 1
        if numbers is None or not 0 <= index < len(numbers) or key in seen or self.steps > MOST_STEPS:
            return []
        if value in self.fed:
            return [SizeSource("fed value", value, index, numbers[index])]
        node = self.flat.producers.get(value)
        if node is None:
            return [SizeSource("constant", self.flat.label(value), index, numbers[index], text=self._text(value))]
        if node.op in ("Constant", "ConstantOfShape"):
            return [SizeSource("constant", self.flat.label(value), index, numbers[index], text=str(list(numbers)))]
        return [_by(source, node) for source in self._number_back(node, index, numbers, seen | {key})]

    def _number_back(
        self, node: RunnableNode, index: int, numbers: tuple[int, ...], seen: frozenset[tuple[str, int]]
    ) -> list[SizeSource]:
        inputs = [name for name in node.inputs if name]
        if node.op == "Shape":
            return self._axis(inputs[0], _wrapped(node.number("start", 0), self.shape(inputs[0])) + index, seen)
        if node.op == "Size":
            return [s for at in range(len(self.shape(inputs[0]) or ())) for s in self._axis(inputs[0], at, seen)]
        if node.op == "Concat":
            for name in inputs:
                count = len(self.numbers(name) or ())
                if index < count:
                    return self._number(name, index, seen)
                index -= count
        if node.op in ("Gather", "Slice") and len(inputs) > 1:
            data, picks = self.numbers(inputs[0]), self.numbers(inputs[1])
            if data and picks:
                at = picks[index] if node.op == "Gather" and index < len(picks) else picks[0] + index
                return self._number(inputs[0], at % len(data), seen)
        found: list[SizeSource] = []
        for name in self._givers(node, numbers[index]):
            count = len(self.numbers(name) or ())
            if count:
                found += self._number(name, index if count == len(numbers) else 0, seen)
        return found

    def _givers(self, node: RunnableNode, number: int) -> list[str]:
        """The inputs of a node that a number which it makes can come from."""
        inputs = [name for name in node.inputs if name]
        if node.op in PASSES:
            return inputs[:1]
        if node.op in ("Where", "Min", "Max"):
            chosen = inputs[1:] if node.op == "Where" else inputs
            return [name for name in chosen if number in (self.numbers(name) or ())][:1]
        return inputs

    def _text(self, value: str) -> str:
        numbers = self.numbers(value)
        return str(list(numbers)) if numbers is not None else ""


def _concat(o: "Origins", back: "_Back") -> list[SizeSource]:
    inputs, rank = [name for name in back.node.inputs if name], len(o.shape(back.value) or ())
    if back.node.number("axis", 0) % max(rank, 1) != back.axis:
        inputs = [name for name in inputs if name not in o.flat.constants][:1] or inputs[:1]
    return [source for name in inputs for source in o._axis(name, back.axis, back.seen)]


def _transpose(o: "Origins", back: "_Back") -> list[SizeSource]:
    rank = len(o.shape(back.value) or ())
    order = back.node.numbers("perm") or tuple(reversed(range(rank)))
    return o._axis(back.node.inputs[0], order[back.axis], back.seen)


def _reshape(o: "Origins", back: "_Back") -> list[SizeSource] | None:
    data, target = back.node.inputs[0], back.node.inputs[1]
    numbers, into, out = o.numbers(target), o.shape(data), o.shape(back.value)
    if numbers is None or into is None or out is None or back.axis >= len(numbers):
        return None
    if numbers[back.axis] > 0 or (numbers[back.axis] == 0 and back.node.number("allowzero", 0)):
        return o._number(target, back.axis, back.seen)
    if numbers[back.axis] == 0:
        return o._axis(data, back.axis, back.seen)
    before = prod(out[: back.axis])
    for at, size in enumerate(into):
        if size == out[back.axis] and prod(into[:at]) == before:
            return o._axis(data, at, back.seen)
    return [source for at, size in enumerate(into) if size != 1 for source in o._axis(data, at, back.seen)]


def _expand(o: "Origins", back: "_Back") -> list[SizeSource] | None:
    data, target, out = o.shape(back.node.inputs[0]), o.numbers(back.node.inputs[1]), o.shape(back.value)
    if data is None or target is None or out is None:
        return None
    at = back.axis - len(out) + len(data)
    if at >= 0 and data[at] == out[back.axis] and data[at] != 1:
        return o._axis(back.node.inputs[0], at, back.seen)
    return o._number(back.node.inputs[1], back.axis - len(out) + len(target), back.seen)


def _matmul(o: "Origins", back: "_Back") -> list[SizeSource] | None:
    left, right, out = (o.shape(name) for name in (*back.node.inputs[:2], back.value))
    if left is None or right is None or out is None or min(len(left), len(right)) < 2:
        return None
    if back.axis == len(out) - 1:
        return o._axis(back.node.inputs[1], len(right) - 1, back.seen)
    if back.axis == len(out) - 2:
        return o._axis(back.node.inputs[0], len(left) - 2, back.seen)
    return None


def _gather(o: "Origins", back: "_Back") -> list[SizeSource] | None:
    data, picks = o.shape(back.node.inputs[0]), o.shape(back.node.inputs[1])
    if data is None or picks is None:
        return None
    at = back.node.number("axis", 0) % max(len(data), 1)
    if back.axis < at:
        return o._axis(back.node.inputs[0], back.axis, back.seen)
    if back.axis < at + len(picks):
        return o._axis(back.node.inputs[1], back.axis - at, back.seen)
    return o._axis(back.node.inputs[0], back.axis - len(picks) + 1, back.seen)


def _slice(o: "Origins", back: "_Back") -> list[SizeSource] | None:
    data, out, inputs = o.shape(back.node.inputs[0]), o.shape(back.value), list(back.node.inputs)
    if data is None or out is None:
        return None
    if data[back.axis] == out[back.axis] or len(inputs) < 3:
        return o._axis(inputs[0], back.axis, back.seen)
    axes = o.numbers(inputs[3]) if len(inputs) > 3 and inputs[3] else tuple(range(len(data)))
    starts, ends = o.numbers(inputs[1]) or (), o.numbers(inputs[2]) or ()
    for index, number in enumerate(axes or ()):
        if number % len(data) == back.axis and index < min(len(starts), len(ends)):
            cut = -data[back.axis] < ends[index] < data[back.axis]
            found = o._number(inputs[2], index, back.seen) if cut else o._axis(inputs[0], back.axis, back.seen)
            return found + (o._number(inputs[1], index, back.seen) if starts[index] else [])
    return None


def _squeezed(o: "Origins", back: "_Back") -> list[SizeSource] | None:
    """Squeeze and Unsqueeze keep the order of the axes that they do not name."""
    node, into, out = back.node, o.shape(back.node.inputs[0]), o.shape(back.value)
    if into is None or out is None:
        return None
    wide, grows = max(into, out, key=len), len(out) > len(into)
    named = node.numbers("axes") or (o.numbers(node.inputs[1]) if len(node.inputs) > 1 else None)
    if named is None:
        named = tuple(axis for axis, size in enumerate(wide) if size == 1)
    kept = [axis for axis in range(len(wide)) if axis not in {number % len(wide) for number in named}]
    if not grows:
        return o._axis(node.inputs[0], kept[back.axis], back.seen) if back.axis < len(kept) else None
    if back.axis not in kept:
        return [SizeSource("constant", f"{node.op} {node.proto.name}", back.axis, 1)]
    return o._axis(node.inputs[0], kept.index(back.axis), back.seen)


def _range(o: "Origins", back: "_Back") -> list[SizeSource]:
    found = o._number(back.node.inputs[1], 0, back.seen)
    start = o.numbers(back.node.inputs[0])
    return found if start == (0,) else found + o._number(back.node.inputs[0], 0, back.seen)


def _sized(o: "Origins", back: "_Back") -> list[SizeSource]:
    return o._number(back.node.inputs[0], back.axis, back.seen)


def _einsum(o: "Origins", back: "_Back") -> list[SizeSource] | None:
    equation = back.node.attribute("equation")
    text = equation.s.decode("utf-8", "replace").replace(" ", "") if equation is not None else ""
    terms, _, result = text.partition("->")
    if "." in text or back.axis >= len(result):
        return None
    letter = result[back.axis]
    given = zip(back.node.inputs, terms.split(","), strict=False)
    places = [(name, term.index(letter)) for name, term in given if letter in term]
    moving = [place for place in places if place[0] not in o.flat.constants] or places
    return [source for name, axis in moving for source in o._axis(name, axis, back.seen)]


_Rule = Callable[[Origins, _Back], "list[SizeSource] | None"]
_RULES: dict[str, _Rule] = {
    "Concat": _concat,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Expand": _expand,
    "MatMul": _matmul,
    "Einsum": _einsum,
    "Gather": _gather,
    "Slice": _slice,
    "Squeeze": _squeezed,
    "Unsqueeze": _squeezed,
    "Range": _range,
    "ConstantOfShape": _sized,
}


def _wrapped(start: int, shape: tuple[int, ...] | None) -> int:
    return start + len(shape or ()) if start < 0 else start


def _by(source: SizeSource, node: RunnableNode) -> SizeSource:
    name = str(node.proto.name) or node.op
    return replace(source, through=(*source.through, name))


def _unique(sources: list[SizeSource]) -> list[SizeSource]:
    """Each end once; of two ways the shorter."""
    found: dict[tuple[str, str, int], SizeSource] = {}
    for source in sources:
        key = (source.kind, source.name, source.axis)
        if key not in found or len(source.through) < len(found[key].through):
            found[key] = source
    return list(found.values())


def describe_origin(size: int, sources: Sequence[SizeSource]) -> str:
    """Why a size or number is what it is."""
    fed = [s for s in sources if s.kind in ("fed length", "fed value")]
    others = [s for s in sources if s not in fed]
    if not sources:
        return "of unknown origin"
    fed = [s for s in fed if s.size == size == 0] or fed
    words = []
    for kind, verb in (("fed length", "was fed length"), ("fed value", "was fed number")):
        for numbers, names in _alike([s for s in fed if s.kind == kind]).items():
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            words.append(f"{names[0]}{more} {verb}{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}")
    baked = [s for s in others if s.kind == "constant" and s.size > 1]
    for source in baked[:1] if fed else others[:2]:
        holds = f" {source.text}" if source.text and source.kind == "constant" else ""
        what = "the constant" if source.kind == "constant" else "the weight"
        words.append(f"{what} {source.name}{holds} has {source.size}")
    through = list(dict.fromkeys(name for name in max((s.through for s in sources), key=len)))
    way = f", through {' and '.join(through[:MOST_THROUGH])}" if through else ""
    more = f" and {len(through) - MOST_THROUGH} more" if len(through) > MOST_THROUGH else ""
    return f"because {' and '.join(words)}{way}{more}"


def _alike(sources: Sequence[SizeSource]) -> dict[tuple[int, ...], list[str]]:
    """The inputs by the lengths or numbers that they were fed."""
    numbers = dict[str, list[int]]()
    for source in sources:
        numbers.setdefault(source.name, []).append(source.size)
    found = dict[tuple[int, ...], list[str]]()
    for name, fed in numbers.items():
        found.setdefault(tuple(dict.fromkeys(fed)), []).append(name)
    return found
