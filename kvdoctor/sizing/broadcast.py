"""Operands that are broadcast against one another: what of their sizes must agree, and what stands beside."""

from collections.abc import Sequence

from kvdoctor.sizing.known import Known
from kvdoctor.sizing.terms import Term, symbol, whole
from kvdoctor.sizing.walk import Beside, Reading


def elementwise(r: Reading) -> list[Known]:
    """An operator that takes its operands element by element (ONNX, multidirectional broadcasting)."""
    given = [known for known in r.inputs if known is not None]
    shapes = [known.shape for known in given]
    if any(shape is None for shape in shapes):
        return []
    dims = broadcast(r, [shape for shape in shapes if shape is not None])
    _look_beside(r, given, dims)
    return [Known(tuple(dims))]


def broadcast(r: Reading, shapes: "Sequence[Sequence[Term | None]]") -> list[Term | None]:
    """The axes that come out of a broadcast, from the last one on; numbers that must be a length are bound to it."""
    rank = max((len(shape) for shape in shapes), default=0)
    found: list[Term | None] = []
    for back in range(rank, 0, -1):
        column = [shape[-back] for shape in shapes if len(shape) >= back]
        found.append(_one(r, column))
    return found


def _one(r: Reading, column: "list[Term | None]") -> Term | None:
    told = [term for term in column if term is not None]
    if len(told) != len(column):
        # What is not known may be 1 or the size of the others.
        return next((term for term in told if r.ledger.real(term).number not in (None, 1)), None)
    moving = [term for term in told if r.ledger.real(term).symbols]
    kept = moving[0] if moving else next((term for term in told if r.ledger.real(term).number != 1), told[0])
    for term in told:
        if r.ledger.real(term).number == 1 and not _stands_for(r, term, kept):
            continue
        joined_with(r, kept, term)
    return r.ledger.real(kept) if moving else kept


def _stands_for(r: Reading, term: Term, kept: Term) -> bool:
    """Whether a 1 may be a length that was 1 when the graph was traced: a number that a size was computed from.

    The axes of a constant are left out: a row for all is what most of them are.
    """
    opened = r.ledger.open(term)
    free = [r.ledger.held[name] for name in opened.symbols if name in r.ledger.held]
    return bool(free) and all(one.kind == "number" for one in free) and r.ledger.size(r.ledger.real(kept)) == 1


def joined_with(r: Reading, one: Term | None, other: Term | None) -> None:
    """Two sizes that must be the same."""
    if one is None or other is None:
        return
    if r.ledger.agree(one, other) is None:
        left, right = r.ledger.real(one), r.ledger.real(other)
        r.clash(f"{left} and {right} must be the same", left, right)


def _look_beside(r: Reading, given: list[Known], dims: "list[Term | None]") -> None:
    """Note constants that hold one row where there is one for each new token: it may be that of the traced place."""
    rows = r.walk.rows
    if rows is None or not any(known.fed for known in given):
        return
    for known in given:
        if known.fed or known.even or known.shape is None or _by_sequence(r, known):
            continue
        for axis, dim in enumerate(known.shape):
            whole_dim = dims[len(dims) - len(known.shape) + axis]
            if whole_dim is None or dim is None or r.ledger.real(whole_dim) != rows:
                continue
            if r.ledger.real(dim) == whole(1) and r.ledger.size(rows) == 1:
                r.walk.beside.append(Beside(known.table, r.node, r.inside.path, axis))


def _by_sequence(r: Reading, known: Known) -> bool:
    """Whether it has an entry for each sequence, and nothing more: the same for all places."""
    sizes = [None if dim is None else r.ledger.real(dim) for dim in known.shape or ()]
    return all(size is not None and size in (whole(1), symbol("batch")) for size in sizes)
