"""The lengths that a caller may choose, and the axes of a graph's inputs in terms of them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

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
    wanted, primes = set(free), iter(PRIMES)
    graph = replace(
        graph, inputs=tuple(replace(port, shape=declared.get(port.name, port.shape)) for port in graph.inputs)
    )
    traced, where, freed, fixed = dict[str, int](), dict[str, tuple[str, int]](), set[str](), dict[str, int]()
    mixed = set[str]()
    for kind in CHOSEN:
        dims = [(port, at, dim) for port in graph.inputs for at, dim in _of_kind(port, kind)]
        numbers = {int(dim) for _, _, dim in dims if _is_number(dim)}
        if not dims:
            continue
        where[kind] = _first(graph, kind)
        if not numbers:
            traced[kind] = (supposed or {}).get(kind) or next(primes)
            freed |= {kind} & set(supposed or ())
            continue
        if len(numbers) > 1 and kind in wanted:
            raise MixedSizes(f"{kind} is declared as {' and '.join(map(str, sorted(numbers)))}")
        traced[kind] = min(numbers)
        if kind in wanted:
            freed.add(kind)
        elif all(_is_number(dim) for _, _, dim in dims):
            fixed[kind] = traced[kind]
        else:
            mixed.add(kind)
    inputs = dict[str, tuple[Term, ...]]()
    for port in graph.inputs:
        if port.shape is None:
            continue
        terms = []
        for at, dim in enumerate(port.shape):
            kind = port.axes[at] if at < len(port.axes) else "fixed"
            term = _term(kind, traced)
            if term is None and _is_number(dim):
                term = whole(int(dim))  # type: ignore[arg-type]
            if term is None:
                name = str(dim) if dim is not None else f"{port.name}.{at}"
                traced.setdefault(name, next(primes, 10141 + len(traced)))
                where.setdefault(name, (port.name, at))
                term = symbol(name)
            terms.append(term)
        inputs[port.name] = tuple(terms)
    return Lengths(inputs, traced, where, frozenset(freed), fixed, frozenset(mixed))


def _term(kind: Axis, traced: dict[str, int]) -> Term | None:
    if kind == "total" and "new" in traced:
        return symbol("past") + symbol("new") if "past" in traced else symbol("new")
    return symbol(kind) if kind in CHOSEN and kind in traced else None


def _first(graph: Graph, kind: Axis) -> tuple[str, int]:
    """The input that tells a length: token ids before others."""
    ports = sorted(graph.inputs, key=lambda port: port.role != "token_ids")
    return next((port.name, at) for port in ports for at, _ in _of_kind(port, kind))


def _of_kind(port: Port, kind: Axis) -> list[tuple[int, object]]:
    if port.shape is None or len(port.axes) != len(port.shape):
        return []
    return [(at, dim) for at, (axis, dim) in enumerate(zip(port.axes, port.shape, strict=True)) if axis == kind]


def _is_number(dim: object) -> bool:
    """Whether a declared size is a number; the exporter of transformers writes some of them as names."""
    return isinstance(dim, int) or (isinstance(dim, str) and dim.isdecimal() and dim.isascii())


def readable(term: Term, names: Mapping[str, str] | None = None) -> str:
    """A size as it is declared: `past_sequence_length + sequence_length`, by the names that the file uses already."""
    known = {**READABLE, **(names or {})}
    renamed = {name: symbol(known.get(name, name)) for name in term.symbols}
    return str(term.replaced(renamed))
