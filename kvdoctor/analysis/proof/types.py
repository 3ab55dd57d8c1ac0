"""Position types: what a value of one call is, as a part of one function of absolute positions.

An axis as long as the new tokens has the absolute positions `past ... past + new - 1`, one as long as past or total has
those from 0 on; any other axis is the same in all calls, and rows of the batch stand for themselves. A value is
*uniform* if each element is a function of its absolute indexes, of tokens and entries of the cache: the same function
in every call of a sequence, whatever its past and its number of new tokens. Equal functions have equal keys.

A call is a part of the sequence, and it knows nothing of later tokens. So a uniform value depends on no later token.

Lengths are terms: whole numbers that a graph computes, polynomials over batch, past, new tokens and encoder states.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import reduce
from math import prod
from operator import mul
from typing import ClassVar

from kvdoctor.records import record

Monomial = tuple[str, ...]
"""The symbols of a product, sorted; empty for a number."""

BATCH, PAST, NEW, ENCODER = "batch", "past", "new", "encoder"
VARYING = frozenset({BATCH, PAST, NEW})
"""What differs between the calls of one sequence, or between the rows of one call."""


class Term:
    """A polynomial with whole coefficients. Equal ones are one object."""

    __slots__ = ("parts", "symbols")
    _known: ClassVar[dict[tuple[tuple[Monomial, int], ...], "Term"]] = {}

    def __init__(self, parts: tuple[tuple[Monomial, int], ...]) -> None:
        self.parts = parts
        self.symbols = frozenset(symbol for monomial, _ in parts for symbol in monomial)

    @classmethod
    def of(cls, parts: Mapping[Monomial, int]) -> "Term":
        """The polynomial with these coefficients."""
        left = [(monomial, factor) for monomial, factor in parts.items() if factor]
        # Longest first within one order, so that the last part leads a division.
        key = tuple(sorted(left, key=lambda part: (len(part[0]), part[0])) if len(left) > 1 else left)
        found = cls._known.get(key)
        if found is None:
            if len(cls._known) > MOST_KNOWN:
                raise OverflowError("a graph computes too many different lengths")
            found = cls._known[key] = Term(key)
        return found

    @property
    def number(self) -> int | None:
        """Its value where it has no symbol."""
        if not self.parts:
            return 0
        return self.parts[0][1] if not self.symbols else None

    def __add__(self, other: "Term") -> "Term":
        found = dict(self.parts)
        for monomial, factor in other.parts:
            found[monomial] = found.get(monomial, 0) + factor
        return Term.of(found)

    def __mul__(self, other: "Term") -> "Term":
        if self is ONE or other is ONE:
            return other if self is ONE else self
        found: dict[Monomial, int] = {}
        if len(self.parts) * len(other.parts) > MOST_PARTS:
            raise OverflowError(MANY_LENGTHS)
        for one, factor in self.parts:
            for two, by in other.parts:
                monomial = tuple(sorted(one + two))
                if len(monomial) > MOST_FACTORS:
                    raise OverflowError(MANY_LENGTHS)
                found[monomial] = found.get(monomial, 0) + factor * by
        return Term.of(found)

    def __sub__(self, other: "Term") -> "Term":
        return self + other.times(-1)

    def times(self, factor: int) -> "Term":
        """The product with a number."""
        return Term.of({monomial: one * factor for monomial, one in self.parts})

    def divided(self, by: "Term") -> "Term | None":
        """The quotient; None where the division leaves a remainder."""
        if not by.parts:
            return None
        left, quotient = self, ZERO
        lead, factor = by.parts[-1]
        for _ in range(MOST_DIVISIONS):
            if not left.parts:
                return quotient
            monomial, one = left.parts[-1]
            rest = list(monomial)
            for name in lead:
                if name not in rest:
                    return None
                rest.remove(name)
            if one % factor:
                return None
            piece = Term.of({tuple(rest): one // factor})
            quotient, left = quotient + piece, left - piece * by
        return None

    def replaced(self, by: "Mapping[str, Term]") -> "Term":
        """The polynomial with values in place of some symbols."""
        if self.symbols.isdisjoint(by):
            return self
        found = ZERO
        for monomial, factor in self.parts:
            found = found + number(factor) * product([by[name] if name in by else symbol(name) for name in monomial])
        return found

    def at(self, values: Mapping[str, int]) -> int:
        """Its value for given values of all symbols."""
        return sum(factor * prod(values[name] for name in monomial) for monomial, factor in self.parts)

    def least(self) -> int | None:
        """The smallest value: the past may be empty, all else is at least 1. None where there is none."""
        lowest = 0
        for monomial, factor in self.parts:
            if monomial and factor < 0:
                return None
            lowest += 0 if PAST in monomial else factor
        return lowest

    def __str__(self) -> str:
        words = []
        for monomial, factor in reversed(self.parts):
            sign = "- " if factor < 0 else "+ "
            factors = [str(abs(factor))] if abs(factor) != 1 or not monomial else []
            words.append(sign + "*".join([*factors, *monomial]))
        text = " ".join(words) or "0"
        return f"-{text[2:]}" if text.startswith("- ") else text.removeprefix("+ ")


MOST_KNOWN, MOST_PARTS, MOST_FACTORS, MOST_DIVISIONS = 200_000, 4096, 64, 64
"""Polynomials, parts of one, symbols of a part, parts of a quotient: real graphs have a few; others double with each
product."""
MANY_LENGTHS = "a size in the graph is a product of too many lengths"


def number(value: int) -> Term:
    """A number as a polynomial."""
    return Term.of({(): value})


def symbol(name: str) -> Term:
    """A symbol as a polynomial."""
    return Term.of({(name,): 1})


ZERO, ONE = number(0), number(1)


def product(terms: Iterable[Term]) -> Term:
    """All of them multiplied."""
    return reduce(mul, terms, ONE)


Axis = tuple[Term, ...]
"""The factors of a length in their order, from the outermost; empty for a length of 1."""

HIDDEN, MODERATE = -1e4, 1e3
Mark = float | str | None
"""What is known of the elements of a region: a number, BURY, HIDE, PLAIN, FINITE, or nothing."""

Region = tuple[tuple[int, int], tuple[Mark, Mark, Mark]]
"""Two axes counted from the end, rows and columns, and what is known where the absolute position of the column is
greater than that of the row, the same, and smaller."""

Linear = tuple[Term | float, tuple[tuple[int, int], ...]]
"""A number, and the factors of the indexes along some axes, counted from the end: the value at each index."""


@record
class Type:
    """The position type of a value.

    Attributes:
        kind: `f`, `i` or `b`: floats, integers or booleans.
        shape: its axes; None where they are unknown.
        items: the elements of a small tensor of integers, row by row.
        linear: its elements as a linear function of their indexes.
        uniform: whether it is uniform, where it has neither items nor a linear function.
        calm: whether no element is so far below zero that it hides a score.
        regions: what is known of the elements of a mask, or of masked scores.
        last: whether it is that of the last token alone, of a uniform value.
        past: whether it is the past of a slot, at most in another order of its axes.
        grid: of places that are listed along the last axis, the linear function of each.
        scale: of what is no function of absolute positions but for a factor that each call has of its own: the node
            that measured the factor, and the power in which it is in the value; `MEASURED` for integers that still
            have their zero point, `ZEROS` for that.
    """

    kind: str
    shape: tuple[Axis, ...] | None
    items: tuple[Term, ...] | None = None
    linear: Linear | None = None
    uniform: bool = False
    calm: bool = False
    regions: tuple[Region, ...] = ()
    last: bool = False
    past: bool = False
    grid: tuple[Linear, ...] = ()
    scale: tuple[int, int] | None = None


MEASURED, ZEROS = 2, 3
UNKNOWN = Type("f", None)


ROWS = symbol(BATCH)


class Lengths:
    """How the lengths of one walk read: the first call of a sequence, one new token a call, or any.

    `opset` is that of the graph; `one_float` says that all its floats are of one type. `padded` are the symbols that
    count padding: along such axes, entries are combined only where a mask excludes it, and an index is no position.
    """

    padded: frozenset[str] = frozenset()

    def __init__(self, first: bool = False, single: bool = False, opset: int = 0, one_float: bool = False) -> None:
        self.opset, self.one_float = opset, one_float
        self.past = number(0) if first else symbol(PAST)
        self.new, self.first, self.single = symbol(NEW), first, single
        self.total = self.past + self.new

    def reduced(self, term: Term) -> Term:
        """A number as it is in this walk, where one new token is a number."""
        return term.replaced({NEW: ONE}) if self.single else term

    def named(self, length: Term) -> Term:
        """A length, as that of all tokens where it is that: a graph for one new token may add 1 to the past."""
        return self.total if self.single and self.reduced(self.total - length).number == 0 else length

    def at_least(self, term: Term, least: int) -> bool:
        """Whether a number is never smaller."""
        lowest = self.reduced(term).least()
        return lowest is not None and lowest >= least

    def equal(self, one: Term, other: Term) -> bool | None:
        """Whether two numbers are equal; None where that depends on the call."""
        if one is other or self.reduced(one - other).number == 0:
            return True
        apart = self.at_least(one - other, 1) or self.at_least(other - one, 1)
        return False if apart else None

    def offset(self, axis: Axis) -> Term | None:
        """The absolute position of the first index along an axis; None where the axis has none."""
        if len(axis) > 1 or any(symbol in (BATCH,) for factor in axis for symbol in factor.symbols):
            return None
        if self.is_even(axis):
            return number(0)
        if axis[0] is self.new:
            return self.past
        return number(0) if axis[0] in (self.past, self.total) else None

    def counts(self, axis: Axis) -> bool:
        """Whether an axis counts tokens."""
        return any(one in (self.new, self.past, self.total) for one in axis)

    def is_padded(self, axis: Axis) -> bool:
        """Whether an axis counts padding: where encoder states have some, a length of another name may be theirs."""
        names = {name if name in VARYING else ENCODER for one in axis for name in one.symbols}
        return not self.padded.isdisjoint(names)

    def is_even(self, axis: Axis) -> bool:
        """Whether an axis has the same length in every call, without padding."""
        return is_fixed(axis) and not self.is_padded(axis)

    def is_proper(self, axis: Axis) -> bool:
        """Whether each index along an axis has an absolute position in every call."""
        return all(self.counts((one,)) or one is ROWS or not one.symbols & VARYING for one in axis)

    def canonical(self, shape: tuple[Axis, ...]) -> tuple[object, ...]:
        """A shape that is the same in every call: past, new and total lengths are the length of the sequence."""
        return tuple(tuple("tokens" if self.counts((one,)) else one for one in axis) for axis in shape)

    def absolute(self, kind: Type) -> Linear | None:
        """The linear function of a type over absolute positions, where it is the same in every call."""
        if kind.linear is None or kind.shape is None:
            return None
        start, factors = kind.linear
        if isinstance(start, float):
            return kind.linear
        shift = 0
        for at, factor in factors:
            first = self.offset(kind.shape[at])
            if first is None:
                return None
            start = start - first.times(factor)
            shift += factor * self.is_padded(kind.shape[at])
        # Padding moves all positions of a row: no more than the distance of two stays.
        return (start, factors) if self.is_even((start,)) and not shift else None

    def is_uniform(self, kind: Type) -> bool:
        """Whether a value is uniform."""
        if kind.linear is not None:
            return self.absolute(kind) is not None
        if kind.items is not None:
            return self.is_even(kind.items)
        return kind.uniform and kind.shape is not None


def is_fixed(axis: Axis) -> bool:
    """Whether an axis has the same length in every call."""
    return not any(factor.symbols & VARYING for factor in axis)


def size_of(axis: Axis) -> Term:
    """The length of an axis."""
    return axis[0] if len(axis) == 1 else product(axis)


def axis_of(*lengths: Term) -> Axis:
    """An axis whose length is a product, with neighboring numbers multiplied."""
    found: list[Term] = []
    for length in lengths:
        if length is ONE:
            continue
        if found and length.number is not None and found[-1].number is not None:
            found[-1] = found[-1] * length
        else:
            found.append(length)
    return tuple(found)


def constant_of(kind: Type) -> Term | float | None:
    """The number that all elements of a value have."""
    if kind.linear is not None and not kind.linear[1]:
        return kind.linear[0]
    if kind.items and all(one is kind.items[0] for one in kind.items):
        return kind.items[0]
    return None


def plain_number(value: Term | float | None) -> float | None:
    """A number without symbols, as a float."""
    if isinstance(value, Term):
        value = value.number
    return None if value is None else float(value)


def linear_of(kind: Type) -> Linear | None:
    """The linear function of a value, also of one number."""
    if kind.linear is not None:
        return kind.linear
    value = constant_of(kind)
    return None if value is None else (value, ())


MOST_ITEMS = 64


def settled(kind: Type) -> Type:
    """A type without indexes along axes of one element, and with the elements of a short list of equal integers."""
    if kind.linear is None or kind.shape is None:
        return kind
    (start, factors), shape = kind.linear, kind.shape
    if any(not shape[at] for at, _ in factors):
        factors = tuple((at, factor) for at, factor in factors if shape[at])
        kind = replace(kind, linear=(start, factors))
    if kind.items is not None or factors or len(shape) > 1 or not isinstance(start, Term) or kind.kind == "f":
        return kind
    count = size_of(shape[0]).number if shape else 1
    return replace(kind, items=(start,) * count) if count is not None and count <= MOST_ITEMS else kind
