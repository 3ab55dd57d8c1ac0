"""What a rule for the sizes of an operator's outputs gets and says, whatever the sizes are computed with.

A rule says of a size which axis, or which number, of an input has it, or how it is computed from several. It knows
nothing of lengths, runs or graphs: who follows sizes computes the answer with what it has, observed integers, declared
sizes or terms over the lengths of a step. The rules are in `operator_axes`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal, TypeVar

from kvdoctor.model.proto import AttributeProto
from kvdoctor.records import record

S = TypeVar("S")

MOST_NUMBERS = 64
"""Elements of an integer tensor up to which its numbers are followed."""
VARIES = -1
"""The size of an axis that is a length, and no number."""

How = Literal[
    "broadcast", "equal", "letter", "part", "sum", "product", "difference", "quotient", "cut", "range", "choice",
    "same", "min", "max",
]  # fmt: skip
"""How a size is computed.

`broadcast`: the one that is not 1. `equal`: all are it. `letter`: all are it, of an Einsum, which repeats a 1. `part`:
the second; these are entries along the first. `cut`: the entries along an axis between a start and an end, by a step.
`range`: how many numbers from a start to an end, by a step. `choice`: the second if the first holds, else the third.
`same`: 1 or 0.
"""


@record
class AxisOf:
    """The size of an axis of an input."""

    input: int
    at: int


@record
class NumberOf:
    """A number in a short tensor of integers."""

    input: int
    at: int


@record
class Computed:
    """A size that is computed from others."""

    how: How
    parts: "tuple[Size, ...]"


Size = int | AxisOf | NumberOf | Computed | None
"""A size as a rule gives it; None where the node does not tell."""
Sizes = tuple[Size, ...]


class SizesUnknown(Exception):
    """A rule needs a rank or numbers that are not known."""


@dataclass(eq=False, slots=True)
class NodeSizes:
    """One node with what is known of its inputs.

    `inputs` are names, empty where an input is left out; `outputs` is how many outputs there are. `shape` and `numbers`
    give the sizes of an input and the numbers of a short tensor of integers: None for each that is not known, or at all
    where not even their count is; VARIES for a size that is a length. A rule appends to `required` what must agree for
    the node to run at all, next to what its answer says.
    """

    op: str
    inputs: Sequence[str]
    outputs: int
    attribute: Callable[[str], AttributeProto | None]
    shape: Callable[[int], Sequence[int | None] | None]
    numbers: Callable[[int], Sequence[int | None] | None]
    required: list[Computed] = field(default_factory=list)

    def has(self, index: int) -> bool:
        """Whether an input is present."""
        return index < len(self.inputs) and bool(self.inputs[index])

    def axes(self, index: int) -> tuple[AxisOf, ...]:
        """The axes of an input.

        Raises:
            SizesUnknown: its rank is not known.
        """
        shape = self.shape(index) if self.has(index) else None
        if shape is None:
            raise SizesUnknown
        return tuple(AxisOf(index, at) for at in range(len(shape)))

    def elements(self, index: int) -> tuple[NumberOf, ...]:
        """The numbers of an input, of which at least the count is known.

        Raises:
            SizesUnknown: it is not.
        """
        numbers = self.numbers(index) if self.has(index) else None
        if numbers is None:
            raise SizesUnknown
        return tuple(NumberOf(index, at) for at in range(len(numbers)))

    def target(self, index: int) -> tuple[NumberOf, ...]:
        """The numbers of an input that is a shape, which may be unknown.

        Raises:
            SizesUnknown: not even their count is known, or no tensor has so many axes.
        """
        shape = self.shape(index) if self.has(index) else None
        if shape is not None and len(shape) == 1 and shape[0] is not None and shape[0] != VARIES:
            if shape[0] > MOST_NUMBERS:  # a declared size costs no bytes
                raise SizesUnknown
            return tuple(NumberOf(index, at) for at in range(shape[0]))
        return self.elements(index)

    def known(self, index: int, attribute: str = "") -> tuple[int, ...] | None:
        """Numbers of an attribute, or of the input that newer opsets have in its place; None where there is neither.

        Raises:
            SizesUnknown: there is such an input, and its numbers are not all known.
        """
        found = self.attribute(attribute) if attribute else None
        if found is not None:
            return tuple(found.ints)
        if not self.has(index):
            return None
        numbers = self.numbers(index)
        if numbers is None or None in numbers:
            raise SizesUnknown
        return tuple(number for number in numbers if number is not None)

    def value(self, size: "int | AxisOf | NumberOf") -> int | None:
        """The size of an axis of an input, or a number in it, where it is known."""
        if isinstance(size, int):
            return size
        known = (self.shape if isinstance(size, AxisOf) else self.numbers)(size.input)
        return known[size.at] if known is not None and size.at < len(known) else None

    def number(self, name: str, default: int) -> int:
        """An integer attribute."""
        found = self.attribute(name)
        return int(found.i) if found is not None else default

    def axis(self, default: int, rank: int) -> int:
        """The axis that the attribute `axis` names, counted from the front."""
        return self.number("axis", default) % max(rank, 1)


def compute(
    size: Size,
    given: "Callable[[int | AxisOf | NumberOf], S | None]",
    combine: "Callable[[How, list[S | None]], S | None]",
) -> S | None:
    """A size, from the values of what it names and a way to combine them."""
    if not isinstance(size, Computed):
        return None if size is None else given(size)
    return combine(size.how, [compute(part, given, combine) for part in size.parts])


def axis_within(size: Size, index: int) -> int | None:
    """The axis of an input along which the entries lie that a size counts; None where that is no single one."""
    parts = size.parts if isinstance(size, Computed) else (size,)
    found = [part.at for part in parts if isinstance(part, AxisOf) and part.input == index]
    return found[0] if len(found) == 1 else None


def find_unequal(node: NodeSizes, made: Iterable[Sizes]) -> "tuple[How, list[tuple[AxisOf | NumberOf, int]]] | None":
    """Two sizes that must be equal, or broadcast to each other, and are not: first what `required` holds, then `made`.

    `made` are the axes of the outputs, of which the last comes first.
    """
    for group in (*node.required, *(size for sizes in made for size in reversed(sizes))):
        if not isinstance(group, Computed) or group.how not in ("equal", "broadcast", "letter"):
            continue
        parts = [part for part in group.parts if isinstance(part, AxisOf | NumberOf)]
        sizes = [(part, size) for part in parts if (size := node.value(part)) is not None]
        sizes = [(part, size) for part, size in sizes if size != 1 or group.how == "equal"]
        unlike = next(((part, size) for part, size in sizes if size != sizes[0][1]), None)
        if unlike is not None:
            return group.how, [sizes[0], unlike]
    return None


def shape_from(node: NodeSizes, sizes: Sizes) -> tuple[int | None, ...]:
    """Sizes or numbers that a rule gave for a node, as integers; None for each that is not known."""
    return tuple(compute(size, node.value, _count) for size in sizes)


def _count(how: How, parts: "list[int | None]") -> int | None:
    """A size that is computed from integers."""
    if how in ("broadcast", "equal", "letter"):
        known = [part for part in parts if part is not None]
        alone = len(known) == len(parts) or how != "broadcast"  # an unknown size may be that of the others, or more
        return next((part for part in known if part != 1), 1 if alone and known else None)
    if how == "part":
        return parts[1]
    rule, known = _COUNTED.get(how), [part for part in parts if part is not None]
    return rule(known) if rule is not None and len(known) == len(parts) else None


_COUNTED: dict[How, Callable[[list[int]], int | None]] = {
    "sum": sum,
    "product": prod,
    "difference": lambda known: known[0] - known[1],
    "quotient": lambda known: known[0] // prod(known[1:]) if prod(known[1:]) else None,
    "cut": lambda known: len(range(known[0])[slice(*known[1:])]) if known[3] else None,
    "range": lambda known: len(range(*known)) if known[2] else None,
    "choice": lambda known: known[1] if known[0] else known[2],
    "same": lambda known: int(known[0] == known[1]),
    "min": min,
    "max": max,
}


def ask(rule: Callable[[NodeSizes], S] | None, node: NodeSizes) -> S | None:
    """What a rule says of a node; None without a rule, and where it needs a rank or numbers that are not known."""
    try:
        return rule(node) if rule is not None else None
    except SizesUnknown:
        return None
