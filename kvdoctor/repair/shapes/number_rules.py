"""The elements of short integer tensors as terms: shapes, positions and ends are computed from them."""

from collections.abc import Callable
from math import prod

from kvdoctor.model.view import integers
from kvdoctor.repair.shapes.facts import MOST_NUMBERS, Dims, NodeInputs
from kvdoctor.repair.shapes.terms import Term, product, whole

Numbers = tuple[Dims | None, tuple[Dims, ...]]
NOTHING: Numbers = (None, ())


def _shape(r: NodeInputs) -> Numbers:
    shape = r.at(0).shape
    if shape is None:
        return NOTHING
    return shape[slice(r.number("start", 0), r.number("end", len(shape)))], ()


def _size(r: NodeInputs) -> Numbers:
    shape = r.at(0).shape
    if shape is None or None in shape:
        return NOTHING
    return (product([r.facts.real(term) for term in shape if term is not None]),), ()


def _same(r: NodeInputs) -> Numbers:
    return r.at(0).numbers, r.at(0).others


def _concat(r: NodeInputs) -> Numbers:
    found: list[Term | None] = []
    for known in r.inputs:
        numbers = known.numbers if known is not None else None
        if numbers is None or known is None or len(known.shape or ()) != 1:
            return NOTHING
        found += numbers
    return (tuple(found), ()) if len(found) <= MOST_NUMBERS else NOTHING


def _gather(r: NodeInputs) -> Numbers:
    data, picks = r.at(0), r.facts.known_numbers(r.at(1))
    if data.numbers is None or picks is None or len(data.shape or ()) != 1:
        return NOTHING
    count = len(data.numbers)
    return (tuple(data.numbers[i] if -count <= i < count else None for i in picks), ()) if count else NOTHING


def _slice(r: NodeInputs) -> Numbers:
    data = r.at(0)
    starts, ends = r.facts.known_numbers(r.at(1)), r.facts.known_numbers(r.at(2))
    steps = r.facts.known_numbers(r.at(4)) if r.has(4) else (1,)
    if data.numbers is None or len(data.shape or ()) != 1 or starts is None or ends is None or steps is None:
        return NOTHING
    return data.numbers[slice(starts[0], ends[0], steps[0])], ()


def _where(r: NodeInputs) -> Numbers:
    """The chosen numbers if the condition is known (as exporters write `expand`), otherwise both choices."""
    chosen = [r.at(1).numbers, r.at(2).numbers]
    if chosen[0] is None or chosen[1] is None:
        return NOTHING
    decided = r.at(0).numbers
    count = max(len(numbers) for numbers in (*chosen, decided) if numbers is not None)
    wide = [numbers * count if numbers is not None and len(numbers) == 1 else numbers for numbers in chosen]
    kept = [numbers for numbers in wide if numbers is not None]
    if any(len(numbers) != count for numbers in kept):
        return NOTHING
    if decided is None or None in decided:
        return kept[0], (kept[1],)
    holds = decided * count if len(decided) == 1 else decided
    return tuple(a if flag is not None and flag.parts else b for flag, a, b in zip(holds, *kept, strict=True)), ()


def _equal(r: NodeInputs, left: Term, right: Term) -> Term | None:
    """1 or 0 if the result is the same at every length; no length is below 0."""
    difference = r.facts.real(left) - r.facts.real(right)
    if difference.number is not None:
        return whole(int(difference.number == 0))
    signs = {number > 0 for _, number in difference.parts}
    return whole(0) if len(signs) == 1 and () in [monomial for monomial, _ in difference.parts] else None


def _filled(r: NodeInputs) -> Numbers:
    """A short tensor of one number throughout."""
    counts = r.facts.known_numbers(r.at(0))
    value = r.attribute("value")
    number = (0,) if value is None else integers(value.t)
    if counts is None or number is None or len(number) != 1 or prod(counts) > MOST_NUMBERS:
        return NOTHING
    return (whole(number[0]),) * prod(counts), ()


def _both(compute: Callable[[NodeInputs, Term, Term], Term | None]) -> Callable[[NodeInputs], Numbers]:
    def computed(r: NodeInputs) -> Numbers:
        left, right = r.at(0).numbers, r.at(1).numbers
        if left is None or right is None or (len(left) != len(right) and 1 not in (len(left), len(right))):
            return NOTHING
        count = max(len(left), len(right))
        pairs = zip(left * (count // len(left)), right * (count // len(right)), strict=True)
        return tuple(None if a is None or b is None else compute(r, a, b) for a, b in pairs), ()

    return computed


def _divided(r: NodeInputs, left: Term, right: Term) -> Term | None:
    return r.facts.real(left).divided(r.facts.real(right))


def _negated(r: NodeInputs) -> Numbers:
    numbers = r.at(0).numbers
    if numbers is None:
        return NOTHING
    return tuple(None if term is None else term * whole(-1) for term in numbers), ()


def _multiplied(r: NodeInputs) -> Numbers:
    numbers = r.at(0).numbers
    if numbers is None or None in numbers:
        return NOTHING
    return (product([term for term in numbers if term is not None]),), ()


def _reshaped(r: NodeInputs) -> Numbers:
    """A Reshape keeps the order of the elements."""
    return r.at(0).numbers, ()


NUMBERS: dict[str, Callable[[NodeInputs], Numbers]] = {
    "Shape": _shape,
    "Size": _size,
    "Identity": _same,
    "Cast": _same,
    "Squeeze": _same,
    "Unsqueeze": _same,
    "Reshape": _reshaped,
    "Concat": _concat,
    "Gather": _gather,
    "Slice": _slice,
    "Where": _where,
    "Add": _both(lambda _r, a, b: a + b),
    "Sub": _both(lambda _r, a, b: a - b),
    "Mul": _both(lambda _r, a, b: a * b),
    "Div": _both(_divided),
    "Neg": _negated,
    "ReduceProd": _multiplied,
    "Equal": _both(_equal),
    "ConstantOfShape": _filled,
}
