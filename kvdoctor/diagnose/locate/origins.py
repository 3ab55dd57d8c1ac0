"""Where an axis or a number in a graph comes from: fed lengths, or constants that froze it.

The walk goes back over the sizes and short integer tensors of one real run, so that a `-1`, a broadcast or a `Gather`
of a shape needs no algebra. Each step follows the rule of the operator where it is known, else equal sizes. A claim
about a fed length is proved afterwards by feeding another one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvdoctor.diagnose.locate.graph_runner import ObservedValues
from kvdoctor.diagnose.locate.runnable import RunnableGraph, RunnableNode
from kvdoctor.model.node_sizes import AxisOf, Computed, NodeSizes, NumberOf, Size, Sizes
from kvdoctor.model.operator_axes import axes_of, numbers_of
from kvdoctor.model.operators import operator_of
from kvdoctor.model.view import integers
from kvdoctor.records import record
from kvdoctor.report.wording import join_some

MOST_STEPS = 4000
MOST_THROUGH = 2
"""Nodes on the way that a report names."""


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


@dataclass
class Origins:
    """Walks a graph back. `known` holds what the run showed, `fed` the shapes of the inputs."""

    flat: RunnableGraph
    known: ObservedValues
    fed: dict[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        self.steps = 0

    def of(self, value: str, at: int, is_number: bool) -> list[SizeSource]:
        """The sources of the size of an axis, or of a number in a short tensor of integers; each end once."""
        self.steps = 0
        found: dict[tuple[str, str, int], SizeSource] = {}
        for source in (self._number if is_number else self._axis)(value, at, frozenset()):
            key = (source.kind, source.name, source.axis)
            if key not in found or len(source.through) < len(found[key].through):  # of two ways the shorter
                found[key] = source
        return list(found.values())

    def shape(self, value: str) -> tuple[int, ...] | None:
        """The sizes of a value, where they are known."""
        tensor = self.flat.constants.get(value)
        constant = tuple(tensor.dims) if tensor is not None else None
        return self.known.shapes.get(value, self.fed.get(value, constant))

    def numbers(self, value: str) -> tuple[int, ...] | None:
        """The numbers of a short tensor of integers, where they are known."""
        known, tensor = self.known.numbers.get(value), self.flat.constants.get(value)
        return integers(tensor) if known is None and tensor is not None else known

    def node_sizes(self, node: RunnableNode) -> NodeSizes:
        """A node with what is known of its inputs."""
        return NodeSizes(
            node.op,
            node.inputs,
            len(node.outputs),
            node.attribute,
            lambda index: self.shape(node.input(index)),
            lambda index: self.numbers(node.input(index)),
        )

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
        known = self.node_sizes(node)
        sizes = dict(zip(node.outputs, axes_of(known) or [], strict=False)).get(value, ())
        part = sizes[axis] if len(sizes) == len(shape) else None
        part = part.parts[1] if isinstance(part, Computed) and part.how == "part" else part
        if isinstance(part, int) and not node.has("measure"):
            return [_by(SizeSource("constant", f"{node.op} {node.proto.name}", axis, size), node)]
        parts = [part] if part is not None else self._alike(known, len(shape) - axis, size)
        return [_by(source, node) for one in parts for source in self._back(known, one, size, seen | {key})]

    @staticmethod
    def _alike(node: NodeSizes, back: int, size: int) -> Sizes:
        """Where an axis may come from in a node without a rule: by its place from the last, or by its size alone."""
        shapes = [(index, node.shape(index) or ()) for index in range(len(node.inputs))]
        column = tuple(AxisOf(index, len(shape) - back) for index, shape in shapes if len(shape) >= back)
        if any(node.value(axis) == size for axis in column):
            return (Computed("broadcast", column),)
        return tuple(AxisOf(index, at) for index, shape in shapes for at, other in enumerate(shape) if other == size)

    def _back(
        self, node: NodeSizes, part: Size, size: int | None, seen: frozenset[tuple[str, int]]
    ) -> list[SizeSource]:
        if isinstance(part, Computed):
            chosen = self._chosen(node, part, size)
            return [source for one in chosen for source in self._back(node, one, None, seen)]
        if isinstance(part, AxisOf | NumberOf):
            way = self._axis if isinstance(part, AxisOf) else self._number
            return way(node.inputs[part.input], part.at, seen)
        return []

    def _chosen(self, node: NodeSizes, made: Computed, size: int | None) -> Sequence[Size]:
        """The parts that a size was computed from in this run, those that settle it."""
        how, parts = made.how, made.parts[1:] if made.how == "choice" else made.parts
        sizes = [None if isinstance(part, Computed | None) else node.value(part) for part in parts]
        alike = [part for part, known in zip(parts, sizes, strict=True) if known == size]
        axes = [part for part in alike if isinstance(part, AxisOf)]
        fed = [part for part in axes if node.inputs[part.input] not in self.flat.constants]
        if how in ("broadcast", "letter"):
            target = [part for part in parts if isinstance(part, NumberOf)]  # of an Expand: it decides about a 1
            return target if target and size == 1 else fed or alike[:1]
        if how in ("equal", "min", "max", "choice"):
            return (fed or alike)[:1]
        if how == "cut":
            return self._cut(parts, sizes, size)
        if how == "range":
            return parts[1:2] if sizes[0] == 0 else (parts[1], parts[0])
        if how == "quotient" and isinstance(parts[0], Computed):
            return [axis for axis in parts[0].parts if isinstance(axis, AxisOf) and node.value(axis) != 1]
        return parts

    @staticmethod
    def _cut(parts: Sizes, sizes: Sequence[int | None], size: int | None) -> Sequence[Size]:
        axis, start, end, _ = parts
        length, first, last, _ = sizes
        if length is None or size == length:
            return [axis]
        return [end if last is not None and -length < last < length else axis, *([start] if first else [])]

    def _number(self, value: str, index: int, seen: frozenset[tuple[str, int]]) -> list[SizeSource]:
        numbers, key = self.numbers(value), (value, -1 - index)
        self.steps += 1
        if numbers is None or not 0 <= index < len(numbers) or key in seen or self.steps > MOST_STEPS:
            return []
        if value in self.fed:
            return [SizeSource("fed value", value, index, numbers[index])]
        node = self.flat.producers.get(value)
        if node is None or node.has("constant", "fill"):
            return [SizeSource("constant", self.flat.label(value), index, numbers[index], text=str(list(numbers)))]
        known = self.node_sizes(node)
        made = numbers_of(known) or ()
        parts = [made[index]] if len(made) == len(numbers) else self._operands(known, index, len(numbers))
        return [_by(s, node) for part in parts for s in self._back(known, part, numbers[index], seen | {key})]

    @staticmethod
    def _operands(node: NodeSizes, index: int, count: int) -> Iterator[NumberOf]:
        """The numbers that another may come from in a node without a rule: those at its place in each input."""
        for at in (0,) if operator_of(node.op).keeps and node.numbers(0) else range(len(node.inputs)):
            known = len(node.numbers(at) or ())
            if known:
                yield NumberOf(at, index if known == count else 0)


def _by(source: SizeSource, node: RunnableNode) -> SizeSource:
    return replace(source, through=(*source.through, str(node.proto.name) or node.op))


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
    way = f", through {join_some(through, MOST_THROUGH, ' and ')}" if through else ""
    return f"because {' and '.join(words)}{way}"


def _alike(sources: Sequence[SizeSource]) -> dict[tuple[int, ...], list[str]]:
    """The inputs by the lengths or numbers that they were fed."""
    numbers = dict[str, list[int]]()
    for source in sources:
        numbers.setdefault(source.name, []).append(source.size)
    found = dict[tuple[int, ...], list[str]]()
    for name, fed in numbers.items():
        found.setdefault(tuple(dict.fromkeys(fed)), []).append(name)
    return found
