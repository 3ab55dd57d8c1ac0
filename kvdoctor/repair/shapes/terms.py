"""Sizes as terms, such as `past + 2*new`, and the lengths of a graph's inputs that a caller may choose."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from kvdoctor.contract import Axis, Dim, Graph, Port
from kvdoctor.records import record

Monomial = tuple[str, ...]

MOST_PARTS, MOST_FACTORS = 4096, 64
"""Parts of a polynomial and symbols of a part: those of real graphs have a few; others double with each product."""


class CannotFree(Exception):
    """The graph does not tell what it has to compute at another length; the message says why."""


@record(slots=False)
class Term:
    """A polynomial: its coefficients by sorted symbols, none of them 0."""

    parts: tuple[tuple[Monomial, int], ...]

    @cached_property
    def symbols(self) -> frozenset[str]:
        """The symbols in the term."""
        return frozenset(symbol for monomial, _ in self.parts for symbol in monomial)

    @property
    def number(self) -> int | None:
        """Its value if it holds no symbol."""
        if not self.parts:
            return 0
        return self.parts[0][1] if len(self.parts) == 1 and not self.parts[0][0] else None

    def __add__(self, other: "Term") -> "Term":
        return _collect([*self.parts, *other.parts])

    def __sub__(self, other: "Term") -> "Term":
        return self + other * whole(-1)

    def __mul__(self, other: "Term") -> "Term":
        factors = [max((len(monomial) for monomial, _ in term.parts), default=0) for term in (self, other)]
        if len(self.parts) * len(other.parts) > MOST_PARTS or sum(factors) > MOST_FACTORS:
            raise CannotFree("a size in the graph is a product of too many lengths")
        return _collect(
            [(tuple(sorted(a + b)), m * n) for a, m in self.parts for b, n in other.parts],
        )

    def divided(self, by: "Term") -> "Term | None":
        """The quotient, or None if the division leaves a remainder."""
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
        """The term with some symbols replaced by terms."""
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
        """Its value for given sizes of all symbols."""
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


def _collect(parts: "list[tuple[Monomial, int]]") -> Term:
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


CHOSEN: tuple[Axis, ...] = ("batch", "past", "new", "encoder")
"""The lengths that a caller chooses: sequences, tokens in the cache, new tokens, encoder states."""

READABLE = {
    "batch": "batch_size",
    "past": "past_sequence_length",
    "new": "sequence_length",
    "encoder": "encoder_sequence_length",
}
"""The names of freed axes: those of Optimum, which most loops know."""

PRIMES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093, 10099, 10103, 10111, 10133, 10139)
"""Synthetic sizes for open axes; no product of them occurs in a graph."""


class ConflictingSizes(Exception):
    """Two inputs declare different numbers for one length."""


@record(slots=False)
class Lengths:
    """The axes of a graph's inputs as terms, and the size of each symbol in the file as it is.

    `where` gives the input and axis from which each symbol can be read. `freed` are symbols that were numbers, `fixed`
    the values of those that stay numbers, `mixed` those with a number in one input and a name in another.
    """

    inputs: dict[str, tuple[Term, ...]]
    traced: dict[str, int]
    where: dict[str, tuple[str, int]]
    freed: frozenset[str]
    fixed: dict[str, int]
    mixed: frozenset[str]

    def settled(self, term: Term) -> Term:
        """The term with numbers for the lengths that stay fixed."""
        return term.replaced({name: whole(number) for name, number in self.fixed.items()})


def read_lengths(
    graph: Graph,
    declared: Mapping[str, tuple[Dim, ...]],
    free: Iterable[Axis] = (),
    supposed: Mapping[Axis, int] | None = None,
) -> Lengths:
    """Read the lengths of a graph from its inputs; `free` are the kinds of axes to free.

    `graph` gives the kinds of the axes, `declared` the present sizes of its inputs; `supposed` are assumed traced sizes
    of open lengths.

    Raises:
        ConflictingSizes: a length to free has two numbers.
    """
    graph = replace(
        graph, inputs=tuple(replace(port, shape=declared.get(port.name, port.shape)) for port in graph.inputs)
    )
    found = _LengthReader(iter(PRIMES))
    for kind in CHOSEN:
        found.kind(graph, kind, kind in set(free), (supposed or {}).get(kind))
    inputs = {port.name: found.axes(port) for port in graph.inputs if port.shape is not None}
    return Lengths(inputs, found.traced, found.where, frozenset(found.freed), found.fixed, frozenset(found.mixed))


@dataclass
class _LengthReader:
    """Reads the inputs, one kind of axis after the other."""

    primes: Iterator[int]
    traced: dict[str, int] = field(default_factory=dict)
    where: dict[str, tuple[str, int]] = field(default_factory=dict)
    freed: set[str] = field(default_factory=set)
    fixed: dict[str, int] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)

    def kind(self, graph: Graph, kind: Axis, wanted: bool, supposed: int | None) -> None:
        """Read one kind; it is freed if it is a number or assumed to have been one."""
        # Token ids are read before other inputs.
        ports = sorted(graph.inputs, key=lambda port: port.role != "token_ids")
        dims = [(port.name, at, dim) for port in ports for at, dim in _axes_of_kind(port, kind)]
        numbers = sorted({number for _, _, dim in dims if (number := _number(dim)) is not None})
        if not dims:
            return
        self.where[kind] = dims[0][:2]
        if not numbers:
            self.traced[kind] = supposed or next(self.primes)
            self.freed |= {kind} if supposed else set()
            return
        if len(numbers) > 1 and wanted:
            raise ConflictingSizes(f"{kind} is declared as {' and '.join(map(str, numbers))}")
        self.traced[kind] = numbers[0]
        if wanted:
            self.freed.add(kind)
        elif all(_number(dim) is not None for _, _, dim in dims):
            self.fixed[kind] = numbers[0]
        else:
            self.mixed.add(kind)

    def axes(self, port: Port) -> tuple[Term, ...]:
        """The axes of one input."""
        terms = []
        for at, dim in enumerate(port.shape or ()):
            term = _term(port.axes[at] if at < len(port.axes) else "fixed", self.traced)
            number = _number(dim)
            if term is None and number is not None:
                term = whole(number)
            if term is None:
                name = str(dim) if dim is not None else f"{port.name}.{at}"
                self.traced.setdefault(name, next(self.primes, PRIMES[-1] + len(self.traced)))
                self.where.setdefault(name, (port.name, at))
                term = symbol(name)
            terms.append(term)
        return tuple(terms)


def _term(kind: Axis, traced: dict[str, int]) -> Term | None:
    if kind == "total" and "new" in traced:
        return symbol("past") + symbol("new") if "past" in traced else symbol("new")
    return symbol(kind) if kind in CHOSEN and kind in traced else None


def _axes_of_kind(port: Port, kind: Axis) -> list[tuple[int, Dim]]:
    if port.shape is None or len(port.axes) != len(port.shape):
        return []
    return [(at, dim) for at, (axis, dim) in enumerate(zip(port.axes, port.shape, strict=True)) if axis == kind]


def _number(dim: Dim) -> int | None:
    """A declared size that is a number; the exporter of transformers writes some numbers as names."""
    if isinstance(dim, int) or (isinstance(dim, str) and dim.isdecimal() and dim.isascii()):
        return int(dim)
    return None


def declare_size(term: Term, names: Mapping[str, str] | None = None) -> str:
    """A size as it is declared, such as `past_sequence_length + sequence_length`; names of the file are reused."""
    known = {**READABLE, **(names or {})}
    return re.sub(rf"\b({'|'.join(CHOSEN)})\b", lambda found: known[found[0]], str(term))
