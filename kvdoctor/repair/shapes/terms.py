"""Sizes as terms, such as `past + 2*new`, and the lengths of a graph's inputs that a caller may choose."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from math import prod
from operator import mul

from kvdoctor.contract import Axis, Dim, Graph, Port
from kvdoctor.records import record
from kvdoctor.repair.workspace import CannotRepair

Monomial = tuple[str, ...]

MOST_PARTS, MOST_FACTORS = 4096, 64
"""Parts of a polynomial and symbols of a part: those of real graphs have a few; others double with each product."""


EXPORT_AGAIN = "export again with dynamic axes, and with sample sizes of 2 or more, all different"


class CannotFree(CannotRepair):
    """The graph does not tell what it has to compute at another length; the message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, EXPORT_AGAIN)


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
        return _collect([(tuple(sorted(a + b)), m * n) for a, m in self.parts for b, n in other.parts])

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
            rest = Counter(monomial)
            rest.subtract(lead)
            if min(rest.values(), default=0) < 0 or number % factor:
                return None
            piece = Term(((tuple(sorted(rest.elements())), number // factor),))
            quotient, left = quotient + piece, left - piece * by
        return None

    def replaced(self, by: "Mapping[str, Term]") -> "Term":
        """The term with some symbols replaced by terms."""
        if self.symbols.isdisjoint(by):
            return self
        found = whole(0)
        for monomial, number in self.parts:
            found = found + whole(number) * product([by.get(name, symbol(name)) for name in monomial])
        return found

    def at(self, sizes: Mapping[str, int]) -> int:
        """Its value for given sizes of all symbols."""
        return sum(number * prod(sizes[name] for name in monomial) for monomial, number in self.parts)

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
    return reduce(mul, terms, whole(1))


def _collect(parts: "list[tuple[Monomial, int]]") -> Term:
    sums = dict[Monomial, int]()
    for monomial, number in parts:
        sums[monomial] = sums.get(monomial, 0) + number
    # Longest first within one order, so that the last part leads a division.
    kept = [(monomial, number) for monomial, number in sums.items() if number]
    return Term(tuple(sorted(kept, key=lambda part: (len(part[0]), part[0]))))


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


@dataclass
class Lengths:
    """The axes of a graph's inputs as terms, and the size of each symbol in the file as it is.

    `where` gives the input and axis from which each symbol can be read. `freed` are symbols that were numbers, `fixed`
    the values of those that stay numbers, `mixed` those with a number in one input and a name in another.
    """

    inputs: dict[str, tuple[Term, ...]] = field(default_factory=dict)
    traced: dict[str, int] = field(default_factory=dict)
    where: dict[str, tuple[str, int]] = field(default_factory=dict)
    freed: set[str] = field(default_factory=set)
    fixed: dict[str, int] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)

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
    ports = [replace(port, shape=declared.get(port.name, port.shape)) for port in graph.inputs]
    found, primes = Lengths(), iter(PRIMES)
    for kind in CHOSEN:
        _read_kind(found, ports, kind, kind in set(free), (supposed or {}).get(kind) or primes)
    found.inputs = {port.name: tuple(_read_axes(found, port, primes)) for port in ports if port.shape is not None}
    return found


def _read_kind(found: Lengths, ports: list[Port], kind: Axis, wanted: bool, supposed: int | Iterator[int]) -> None:
    """Read one kind of axis; it is freed if it is a number or `supposed` to have been one."""
    # Token ids are read before other inputs.
    whole_ports = [port for port in ports if port.shape is not None and len(port.axes) == len(port.shape)]
    ordered = sorted(whole_ports, key=lambda port: port.role != "token_ids")
    sized = ((port.name, at, port.shape) for port in ordered for at, axis in enumerate(port.axes) if axis == kind)
    dims = [(name, at, size_of(shape[at])) for name, at, shape in sized if shape is not None]
    numbers = sorted({number for _, _, number in dims if number is not None})
    if not dims:
        return
    found.where[kind] = dims[0][:2]
    if not numbers:
        found.traced[kind] = supposed if isinstance(supposed, int) else next(supposed)
        found.freed |= {kind} if isinstance(supposed, int) else set()
        return
    if len(numbers) > 1 and wanted:
        raise ConflictingSizes(f"{kind} is declared as {' and '.join(map(str, numbers))}")
    found.traced[kind] = numbers[0]
    if wanted:
        found.freed.add(kind)
    elif all(number is not None for _, _, number in dims):
        found.fixed[kind] = numbers[0]
    else:
        found.mixed.add(kind)


def _read_axes(found: Lengths, port: Port, primes: Iterator[int]) -> Iterator[Term]:
    for at, dim in enumerate(port.shape or ()):
        kind = port.axes[at] if at < len(port.axes) else "fixed"
        if kind == "total" and "new" in found.traced:
            yield symbol("past") + symbol("new") if "past" in found.traced else symbol("new")
        elif kind in CHOSEN and kind in found.traced:
            yield symbol(kind)
        elif (number := size_of(dim)) is not None:
            yield whole(number)
        else:
            name = str(dim) if dim is not None else f"{port.name}.{at}"
            found.traced.setdefault(name, next(primes, PRIMES[-1] + len(found.traced)))
            found.where.setdefault(name, (port.name, at))
            yield symbol(name)


def size_of(dim: Dim) -> int | None:
    """A declared size that is a number; the exporter of transformers writes some numbers as names."""
    if isinstance(dim, int) or (isinstance(dim, str) and dim.isdecimal() and dim.isascii()):
        return int(dim)
    return None


def declare_size(term: Term, names: Mapping[str, str] | None = None) -> str:
    """A size as it is declared, such as `past_sequence_length + sequence_length`; names of the file are reused."""
    known = {**READABLE, **(names or {})}
    return re.sub(rf"\b({'|'.join(CHOSEN)})\b", lambda found: known[found[0]], str(term))
