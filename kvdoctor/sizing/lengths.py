"""The lengths that a caller may choose, and the axes of a graph's inputs in terms of them."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvdoctor.contract import Axis, Dim, Graph, Port
from kvdoctor.sizing.terms import Term, symbol, whole

CHOSEN: tuple[Axis, ...] = ("batch", "past", "new", "encoder")
"""What a caller chooses: sequences, tokens in the cache, new tokens, encoder states."""

READABLE = {
    "batch": "batch_size",
    "past": "past_sequence_length",
    "new": "sequence_length",
    "encoder": "encoder_sequence_length",
}
"""The names that freed axes are declared by: those of Optimum, which most loops know."""

PRIMES = (10007, 10009, 10037, 10039, 10061, 10067, 10069, 10079, 10091, 10093, 10099, 10103, 10111, 10133, 10139)
"""Made-up sizes for axes of any length: no product of them stands in a graph."""


class MixedSizes(Exception):
    """Two inputs declare another number each for one length."""


@dataclass(frozen=True)
class Lengths:
    """The axes of a graph's inputs as terms, and the size of each symbol in the file as it is.

    `where` says from which axis of which input each symbol can be read. `freed` are those that were numbers, `fixed`
    the numbers of those that stay one, `mixed` those that have a number in one input and a name in another.
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


def lengths_of(
    graph: Graph,
    declared: Mapping[str, tuple[Dim, ...]],
    free: Iterable[Axis] = (),
    supposed: Mapping[Axis, int] | None = None,
) -> Lengths:
    """Read the lengths of a graph off its inputs; `free` are the kinds of axes that are to take any length.

    `graph` says what the axes count, `declared` which sizes its inputs have now; `supposed` are sizes that lengths of
    any number are supposed to have been traced at.

    Raises:
        MixedSizes: a length that is to be freed has two numbers.
    """
    graph = replace(
        graph, inputs=tuple(replace(port, shape=declared.get(port.name, port.shape)) for port in graph.inputs)
    )
    found = _Found(iter(PRIMES))
    for kind in CHOSEN:
        found.kind(graph, kind, kind in set(free), (supposed or {}).get(kind))
    inputs = {port.name: found.axes(port) for port in graph.inputs if port.shape is not None}
    return Lengths(inputs, found.traced, found.where, frozenset(found.freed), found.fixed, frozenset(found.mixed))


@dataclass
class _Found:
    """What the inputs say, one kind of axis after the other."""

    primes: Iterator[int]
    traced: dict[str, int] = field(default_factory=dict)
    where: dict[str, tuple[str, int]] = field(default_factory=dict)
    freed: set[str] = field(default_factory=set)
    fixed: dict[str, int] = field(default_factory=dict)
    mixed: set[str] = field(default_factory=set)

    def kind(self, graph: Graph, kind: Axis, wanted: bool, supposed: int | None) -> None:
        """Read one kind; it is freed where it is a number, or supposed to have been one."""
        # Token ids tell a length before others do.
        ports = sorted(graph.inputs, key=lambda port: port.role != "token_ids")
        dims = [(port.name, at, dim) for port in ports for at, dim in _of_kind(port, kind)]
        numbers = sorted({number for _, _, dim in dims if (number := _number(dim)) is not None})
        if not dims:
            return
        self.where[kind] = dims[0][:2]
        if not numbers:
            self.traced[kind] = supposed or next(self.primes)
            self.freed |= {kind} if supposed else set()
            return
        if len(numbers) > 1 and wanted:
            raise MixedSizes(f"{kind} is declared as {' and '.join(map(str, numbers))}")
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


def _of_kind(port: Port, kind: Axis) -> list[tuple[int, Dim]]:
    if port.shape is None or len(port.axes) != len(port.shape):
        return []
    return [(at, dim) for at, (axis, dim) in enumerate(zip(port.axes, port.shape, strict=True)) if axis == kind]


def _number(dim: Dim) -> int | None:
    """A declared size that is a number; the exporter of transformers writes some of them as names."""
    if isinstance(dim, int) or (isinstance(dim, str) and dim.isdecimal() and dim.isascii()):
        return int(dim)
    return None


def readable(term: Term, names: Mapping[str, str] | None = None) -> str:
    """A size as it is declared: `past_sequence_length + sequence_length`, by the names that the file uses already."""
    known = {**READABLE, **(names or {})}
    return re.sub(rf"\b({'|'.join(CHOSEN)})\b", lambda found: known[found[0]], str(term))
