"""The lengths of a graph's inputs that a caller may choose, and its axes as terms of them, such as `past + 2*new`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from kvdoctor.analysis.proof.types import Term, symbol
from kvdoctor.analysis.proof.types import number as whole
from kvdoctor.contract import Axis, Dim, Graph, Port
from kvdoctor.repair.workspace import CannotRepair

EXPORT_AGAIN = "export again with dynamic axes, and with sample inputs of different sizes, all 2 or more"


class CannotFree(CannotRepair):
    """The graph does not tell what it has to compute at another length; the message says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, EXPORT_AGAIN)


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
    """The axes of the inputs of a graph, that of `file`, as terms; and the size of each symbol in the file as it is.

    `where` gives the input and axis from which each symbol can be read. `freed` are symbols that were numbers, `fixed`
    the values of those that stay numbers, `mixed` those with a number in one input and a name in another.
    """

    file: str
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
    found, primes = Lengths(graph.file), iter(PRIMES)
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
