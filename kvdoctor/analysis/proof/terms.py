"""Whole numbers that a graph computes from lengths: polynomials over batch, past, new tokens and encoder states."""

from collections.abc import Mapping
from math import prod
from typing import ClassVar

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
        key = tuple(sorted((monomial, factor) for monomial, factor in parts.items() if factor))
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
        found: dict[Monomial, int] = {}
        for one, factor in self.parts:
            for two, by in other.parts:
                monomial = tuple(sorted(one + two))
                found[monomial] = found.get(monomial, 0) + factor * by
        return Term.of(found)

    def __sub__(self, other: "Term") -> "Term":
        return self + other.times(-1)

    def times(self, factor: int) -> "Term":
        """The product with a number."""
        return Term.of({monomial: one * factor for monomial, one in self.parts})

    def divided(self, other: "Term") -> "Term | None":
        """The quotient by another one that is not 0, where it is a product of symbols and a number."""
        if len(other.parts) != 1:
            lead = Term.of(dict(other.parts[:1])) if other.parts else ZERO
            guesses = (Term.of({part: factor}).divided(lead) for part, factor in self.parts) if other.parts else ()
            return next((guess for guess in guesses if guess is not None and guess * other is self), None)
        (by, number), found = other.parts[0], dict[Monomial, int]()
        for monomial, factor in self.parts:
            rest = list(monomial)
            for symbol in by:
                if symbol not in rest:
                    return None
                rest.remove(symbol)
            if factor % number:
                return None
            found[tuple(rest)] = factor // number
        return Term.of(found)

    def replaced(self, symbol: str, value: "Term") -> "Term":
        """The polynomial with a value in place of a symbol."""
        if symbol not in self.symbols:
            return self
        found = number(0)
        for monomial, factor in self.parts:
            one = number(factor)
            for name in monomial:
                one = one * (value if name == symbol else Term.of({(name,): 1}))
            found = found + one
        return found

    def at(self, values: Mapping[str, int]) -> int | None:
        """Its value where each symbol has one; None where one has none."""
        if not self.symbols <= values.keys():
            return None
        return sum(factor * prod(values[name] for name in monomial) for monomial, factor in self.parts)

    def least(self) -> int | None:
        """The smallest value: the past may be empty, all else is at least 1. None where there is none."""
        lowest = 0
        for monomial, factor in self.parts:
            if monomial and factor < 0:
                return None
            lowest += 0 if PAST in monomial else factor
        return lowest


MOST_KNOWN = 200_000


def number(value: int) -> Term:
    """A number as a polynomial."""
    return Term.of({(): value})


def symbol(name: str) -> Term:
    """A symbol as a polynomial."""
    return Term.of({(name,): 1})


ZERO, ONE = number(0), number(1)
