"""Terms: sums of products of symbols with whole coefficients, such as `past + 2*new`. Immutable, compared by value."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

Monomial = tuple[str, ...]


@dataclass(frozen=True)
class Term:
    """A polynomial: its coefficients by sorted symbols, none of them 0."""

    parts: tuple[tuple[Monomial, int], ...]

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The symbols that it holds."""
        return frozenset(symbol for monomial, _ in self.parts for symbol in monomial)

    @property
    def number(self) -> int | None:
        """The number that it is, if it holds no symbol."""
        if not self.parts:
            return 0
        return self.parts[0][1] if len(self.parts) == 1 and not self.parts[0][0] else None

    def __add__(self, other: "Term") -> "Term":
        return _collected([*self.parts, *other.parts])

    def __sub__(self, other: "Term") -> "Term":
        return self + other * whole(-1)

    def __mul__(self, other: "Term") -> "Term":
        return _collected(
            [(tuple(sorted(a + b)), m * n) for a, m in self.parts for b, n in other.parts],
        )

    def divided(self, by: "Term") -> "Term | None":
        """The quotient, or None where there is none without a remainder."""
        if not by.parts:
            return None
        left, quotient = self, whole(0)
        lead, factor = by.parts[-1]
        for _ in range(64):
            if not left.parts:
                return quotient
            monomial, number = left.parts[-1]
            rest = _without(monomial, lead)
            if rest is None or number % factor:
                return None
            piece = Term(((rest, number // factor),))
            quotient, left = quotient + piece, left - piece * by
        return None

    def replaced(self, by: "Mapping[str, Term]") -> "Term":
        """The term with other terms in the place of some symbols."""
        if self.symbols.isdisjoint(by):
            return self
        found = whole(0)
        for monomial, number in self.parts:
            piece = whole(number)
            for name in monomial:
                piece = piece * by.get(name, symbol(name))
            found = found + piece
        return found

    def at(self, sizes: Mapping[str, int]) -> int:
        """Its number where every symbol has a size."""
        total = 0
        for monomial, number in self.parts:
            product = number
            for name in monomial:
                product *= sizes[name]
            total += product
        return total

    def __str__(self) -> str:
        words = []
        for monomial, number in reversed(self.parts):
            sign = "- " if number < 0 else "+ "
            factors = [str(abs(number))] if abs(number) != 1 or not monomial else []
            words.append(sign + "*".join([*factors, *monomial]))
        text = " ".join(words) or "0"
        return f"-{text[2:]}" if text.startswith("- ") else text.removeprefix("+ ")


def whole(number: int) -> Term:
    """A term that is a number."""
    return Term((((), number),) if number else ())


def symbol(name: str) -> Term:
    """A term that is one symbol."""
    return Term((((name,), 1),))


def product(terms: "list[Term] | tuple[Term, ...]") -> Term:
    """All of them multiplied."""
    found = whole(1)
    for term in terms:
        found = found * term
    return found


def _collected(parts: "list[tuple[Monomial, int]]") -> Term:
    sums = dict[Monomial, int]()
    for monomial, number in parts:
        sums[monomial] = sums.get(monomial, 0) + number
    # Longest first within one order, so that the last part leads a division.
    kept = [(monomial, number) for monomial, number in sums.items() if number]
    return Term(tuple(sorted(kept, key=lambda part: (len(part[0]), part[0]))))


def _without(monomial: Monomial, lead: Monomial) -> Monomial | None:
    left = list(monomial)
    for name in lead:
        if name not in left:
            return None
        left.remove(name)
    return tuple(left)
