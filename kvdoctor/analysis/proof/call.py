"""One node of a walk: what it takes, and helpers of the rules that say what it returns."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvdoctor.analysis.proof.types import (
    MODERATE,
    ONE,
    UNKNOWN,
    Axis,
    Lengths,
    Region,
    Term,
    Type,
    axis_of,
    constant_of,
    plain_number,
)
from kvdoctor.model.flatten import FlatNode
from kvdoctor.records import record

How = int | tuple[Any, ...] | None
"""How the key of an output is made: that of an input by its number, one that says what was done, or that of the node
and all its inputs."""


@record
class Made:
    """An output of a node: its type, and how its key is made."""

    type: Type
    how: How = None


Rule = Callable[["Reading"], "Made | list[Made]"]
T = TypeVar("T")


class NotKnown(Exception):
    """What a rule needs is not known; then neither is the result."""


def known(found: T | None) -> T:
    """What was found; raises `NotKnown` where that is None."""
    if found is None:
        raise NotKnown
    return found


def refuse(unfit: object) -> None:
    """Raise `NotKnown` where something holds of which no rule says anything."""
    if unfit:
        raise NotKnown


@dataclass(eq=False, repr=False)
class Reading:
    """A node with the types of its inputs; `limits` are totals up to which it is valid, each with an input."""

    node: FlatNode
    inputs: Sequence[Type | None]
    lengths: Lengths
    limits: list[tuple[int, int]] = field(default_factory=list)

    @property
    def given(self) -> list[Type]:
        """The inputs that are there."""
        return [one for one in self.inputs if one is not None]

    def input(self, index: int) -> Type:
        """An input; an unknown value where there is none."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return UNKNOWN if found is None else found

    def axes(self, index: int, least: int = 0) -> tuple[Axis, ...]:
        """The axes of an input; raises `NotKnown` where there are fewer than `least`, or none that are known."""
        shape = known(self.input(index).shape)
        return known(shape if len(shape) >= least else None)

    def has(self, index: int) -> bool:
        """Whether there is an input of that number."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def numbers(self, index: int, attribute: str = "") -> list[int] | None:
        """Numbers that an attribute lists, or an input; None where they are unknown or not there."""
        found = self.node.numbers(attribute) if attribute else None
        if found is not None:
            return list(found)
        items = self.input(index).items if self.has(index) else None
        numbers = [item.number for item in items] if items is not None else [None]
        return [one for one in numbers if one is not None] if None not in numbers else None

    def is_uniform(self, *inputs: int) -> bool:
        """Whether inputs are uniform; all where none is named."""
        taken = [self.input(one) for one in inputs] if inputs else self.given
        return all(self.lengths.is_uniform(one) for one in taken)

    def opaque(
        self,
        shape: "Iterable[Axis] | None",
        taken: Sequence[Type],
        kind: str = "f",
        calm: bool = False,
        regions: tuple[Region, ...] = (),
    ) -> Type:
        """A value of which nothing but its axes is known; it is uniform where all that it is computed from is."""
        axes = None if shape is None else tuple(shape)
        last = any(one.last for one in taken)
        proper = axes is not None and all(self.lengths.is_proper(axis) for axis in axes)
        uniform = proper and all(self.lengths.is_uniform(one) for one in taken)
        if last and axes is not None:
            uniform = uniform and all(one.last or not any(map(self.lengths.counts, one.shape or ())) for one in taken)
        return Type(kind, axes, uniform=uniform, calm=calm, regions=regions if uniform else (), last=last)

    def broadcast(self, taken: Sequence[Type]) -> tuple[Axis, ...]:
        """The axes of inputs, broadcast to each other; raises `NotKnown` where that is not known."""
        shapes = [known(one.shape) for one in taken]
        found: list[Axis] = []
        for at in range(-max(map(len, shapes), default=0), 0):
            # Factors in another order are other entries at each place, though the length is the same.
            long = {shape[at] for shape in shapes if -at <= len(shape)} - {()}
            found.append(known(next(iter(long), ()) if len(long) < 2 else None))
        return tuple(found)


def is_calm(one: Type) -> bool:
    """Whether no element of a value hides a score."""
    value = plain_number(constant_of(one))
    if value is not None:
        return abs(value) <= MODERATE
    return one.calm or one.kind != "f" or (one.linear is not None and not isinstance(one.linear[0], float))


def regroup(shape: Sequence[Axis], targets: Sequence[Term]) -> tuple[Axis, ...] | None:
    """The axes of a value under another shape: the same factors in other groups; None where they do not fit."""
    left = [factor for axis in shape for factor in axis]
    found: list[Axis] = []
    for target in targets:
        taken, wanted = list[Term](), target
        while wanted is not ONE:
            if not left:
                return None
            rest = wanted.divided(left[0])
            if rest is not None:
                taken.append(left.pop(0))
                wanted = rest
                continue
            size, by = left[0].number, wanted.number
            if not size or not by or size % by:
                return None
            taken.append(wanted)
            left[0] = Term.of({(): size // by})
            wanted = ONE
        found.append(axis_of(*taken))
    return tuple(found) if not left else None
