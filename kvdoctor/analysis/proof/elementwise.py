"""Values that are computed element by element: linear functions of indexes, masks, and all else."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvdoctor.analysis.proof.call import Made, Reading, Rule, is_calm, refuse
from kvdoctor.analysis.proof.masks import (
    COMPARED,
    HALF,
    LARGEST_HALF,
    NUMERIC,
    combine_regions,
    compute,
    find_regions,
    is_plain,
)
from kvdoctor.analysis.proof.types import (
    ONE,
    PAST,
    Axis,
    Lengths,
    Linear,
    Term,
    Type,
    constant_of,
    linear_of,
    number,
    plain_number,
    size_of,
)
from kvdoctor.model.operators import has, operators_with

EXACT = (1, 6, 7, 11)
"""Element types that hold every position."""
WHOLE = (6, 7)
"""Those of them that are whole numbers."""
FLOATS = {1, 10, 11, 16}
INTEGERS = {2, 3, 4, 5, 6, 7, 12, 13}
KINDS = {**dict.fromkeys(FLOATS, "f"), **dict.fromkeys(INTEGERS, "i"), 9: "b"}
"""The kinds of element types (TensorProto.DataType)."""


ENDLESS = (1 << 31) - 1
"""A bound that no position reaches."""
TESTS = ("IsNaN", "IsInf")
COMPUTED = (*NUMERIC, "Mod")
Counting = tuple[Term, tuple[tuple[int, int], ...]]
"""A linear function whose values are whole numbers."""
LARGEST_OF = {"Min": False, "Max": True}
"""Whether the larger one of two numbers is taken."""


def _kind(call: Reading) -> str:
    if has(call.node.op, "compare", "logic") or call.node.op in TESTS:
        return "b"
    if has(call.node.op, "cast") and call.node.attribute("to") is not None:
        return KINDS.get(call.node.number("to", 0), "f")
    return call.input(1 if has(call.node.op, "select", "cast") else 0).kind


def elementwise(call: Reading) -> Made:
    """An operator that computes each element from those at the same place."""
    taken, kind = call.given, _kind(call)
    if has(call.node.op, "cast") and kind == "f" == call.input(0).kind and call.lengths.one_float:
        return Made(call.input(0), 0)
    if has(call.node.op, "cast"):
        taken = taken[:1]
    shape = call.broadcast(taken)
    if any(one.scale for one in taken):
        return _rescaled(call, taken, shape)
    if _wraps(call, kind):
        return Made(Type(kind, shape))
    items = _compute_items(call, taken, kind) if kind != "f" and all(one.kind != "f" for one in taken) else None
    if items is not None:
        return Made(Type(kind, shape, items=items))
    linear = _compute_linear(call, taken, kind)
    if linear is not None:
        same = next((at for at, one in enumerate(call.inputs) if one and one.linear == linear), None)
        return Made(Type(kind, shape, linear=linear), same)
    compared = _compare(call, taken[0], taken[1], shape) if has(call.node.op, "compare") and len(taken) == 2 else None
    if compared is not None:
        return compared
    how = _neutral(call)
    if has(call.node.op, "select") and how is not None and constant_of(call.input(0)) is not None:
        chosen = call.input(how)
        return Made(call.opaque(shape, [chosen], kind, is_calm(chosen), chosen.regions), how)
    regions = combine_regions(call, taken, kind)
    calm = kind != "f" or (all(is_calm(one) for one in taken) and not has(call.node.op, "exponential"))
    step = next((one for one in regions if all(isinstance(mark, float) for mark in one[1])), None)
    if step is not None and all(map(call.lengths.is_proper, shape)):
        # Two positions decide it, whatever it was computed from.
        calm = kind != "f" or all(is_plain(mark) for mark in step[1])
        return Made(Type(kind, shape, uniform=True, calm=calm, regions=regions), ("step", *step))
    return Made(call.opaque(shape, taken, kind, calm, regions), how)


def _rescaled(call: Reading, taken: Sequence[Type], shape: tuple[Axis, ...]) -> Made:
    """Values with a factor of this call: as floats, or multiplied; where the factor goes, what is left is uniform."""
    scales, plain = [one.scale for one in taken if one.scale], [one for one in taken if not one.scale]
    refuse(len({node for node, _ in scales}) > 1 or not has(call.node.op, "cast", "multiply") or _kind(call) != "f")
    power = sum(power for _, power in scales)
    refuse(any(scale[1] not in (-1, 1) for scale in scales) or power not in (-1, 0, 1))
    made = call.opaque(
        shape, [*plain, *(replace(one, scale=None, uniform=True) for one in taken if one.scale)], "f", True
    )
    return Made(replace(made, uniform=False, scale=(scales[0][0], power)) if power and made.uniform else made)


def _wraps(call: Reading, kind: str) -> bool:
    """Whether large numbers come out as others: in few bits, or with the sign of the first input of a Mod."""
    if has(call.node.op, "modulo") and call.node.number("fmod", 0):
        return True
    if not has(call.node.op, "cast") or kind != "i" or call.node.number("to", 0) in WHOLE:
        return False
    return plain_number(constant_of(call.input(0))) is None


def _compute_items(call: Reading, taken: Sequence[Type], kind: str) -> tuple[Term, ...] | None:
    if any(one.items is None or one.shape is None for one in taken) or call.node.op not in COMPUTED:
        return None
    count = max((len(one.items or ()) for one in taken), default=0)
    if any(len(one.items or ()) not in (1, count) or len(one.shape or ()) > 1 for one in taken) and count > 1:
        return None
    rows = zip(*((one.items or ()) * (count if len(one.items or ()) == 1 else 1) for one in taken), strict=True)
    found = [_compute_item(call.node.op, row, call.lengths, kind) for row in rows]
    return tuple(one for one in found if one is not None) if None not in found else None


TERMS: dict[str, Callable[..., Term]] = {
    "Add": lambda *terms: sum(terms[1:], terms[0]),
    "Sub": lambda one, other: one - other,
    "Mul": lambda one, other: one * other,
    "Neg": lambda one: one.times(-1),
}
"""What operators compute of numbers with symbols."""


def _compute_item(op: str, row: tuple[Term, ...], lengths: Lengths, kind: str) -> Term | None:
    """One number of numbers; None where it is unknown, or depends on the call in a way that has no name here."""
    first, second = row[0], row[-1]
    if op in TERMS:
        return TERMS[op](*row)
    if has(op, "copy", "cast"):
        return first if kind != "b" else _truth(lengths.equal(first, number(0)), negated=True)
    if has(op, "select"):
        return None if first.number is None else row[1] if first.number else row[2]
    if op in COMPARED:
        return _truth(_decide(op, second - first, lengths))
    if op in LARGEST_OF and len(row) == 2:
        found = _extreme((first, ()), (second, ()), LARGEST_OF[op], (), lengths)
        return None if found is None else found[0]
    if has(op, "divide"):
        exact = first.divided(second) if second.parts else None
        return exact if exact is not None else _compute_numbers(op, row)
    return _compute_numbers(op, row)


def _compute_numbers(op: str, row: tuple[Term, ...]) -> Term | None:
    """The same of numbers without symbols."""
    values = [term.number for term in row]
    known = [value for value in values if value is not None]
    if len(known) != len(values):
        return None
    if has(op, "modulo"):
        return number(known[0] % known[1]) if known[1] else None
    found = compute(op, known)
    return number(int(found)) if found is not None and math.isfinite(found) else None


def _truth(value: bool | None, negated: bool = False) -> Term | None:
    return None if value is None else number(int(value != negated))


def _extreme(
    one: Counting, other: Counting, largest: bool, shape: tuple[Axis, ...], lengths: Lengths
) -> Counting | None:
    """The larger or smaller one of numbers that count, where it is that at every index; None where neither is."""
    least, most = _ends(added(one, _scaled(other, -1)), shape)
    if lengths.at_least(least, 0):
        return one if largest else other
    if lengths.at_least(most.times(-1), 0):
        return other if largest else one
    return None


def _decide(op: str, apart: Term, lengths: Lengths) -> bool | None:
    """Whether a comparison holds for two numbers, by the second minus the first; None where the call decides."""
    how, limit = COMPARED[op]
    if how == "equal":
        return lengths.equal(apart, number(0))
    if how == "less":
        apart, limit = apart.times(-1), -limit
    if lengths.at_least(apart, limit):
        return True
    return False if lengths.at_least(apart.times(-1), 1 - limit) else None


def _as_term(value: Term | float) -> Term | None:
    if isinstance(value, Term):
        return value
    return number(int(value)) if math.isfinite(value) and value == int(value) and abs(value) < 1 << 53 else None


def _compute_linear(call: Reading, taken: Sequence[Type], kind: str) -> Linear | None:
    parts = [linear_of(one) for one in taken]
    if has(call.node.op, "select"):
        return _choose(call, parts)
    known = [part for part in parts if part is not None]
    if len(known) != len(parts) or not known:
        return None
    if all(not factors for _, factors in known):
        return _compute_constant(call, [value for value, _ in known], kind)
    if has(call.node.op, "clamp") and not call.node.proto.attribute:
        return _clamp(call, known)
    return _compute_sum(call.node.op, known, kind, call.node.number("to", 0) in EXACT)


def _choose(call: Reading, parts: Sequence[Linear | None]) -> Linear | None:
    chosen = plain_number(constant_of(call.input(0)))
    if chosen is not None:
        return parts[1] if chosen else parts[2]
    same = parts[1] is not None and parts[1] == parts[2]
    return parts[1] if same and call.is_uniform(0) else None


def _compute_constant(call: Reading, values: Sequence[Term | float], kind: str) -> Linear | None:
    plain = [plain_number(value) for value in values]
    if all(value is not None for value in plain) and call.node.op in NUMERIC:
        found = compute(call.node.op, [value for value in plain if value is not None])
        halved = has(call.node.op, "cast") and call.node.number("to", 0) == HALF
        if found is not None and halved and abs(found) > LARGEST_HALF:
            found = math.copysign(math.inf, found)
        if found is None or kind == "f":
            return None if found is None else (found, ())
        if kind == "b":
            return number(int(bool(found))), ()
        return (number(int(found)), ()) if math.isfinite(found) else None
    if has(call.node.op, "cast") and call.node.number("to", 0) not in EXACT:
        return None
    terms = [_as_term(value) for value in values]
    whole = [term for term in terms if term is not None]
    item = _compute_item(call.node.op, tuple(whole), call.lengths, kind) if len(whole) == len(terms) else None
    return None if item is None else (item, ())


def _compute_sum(op: str, parts: Sequence[Linear], kind: str, rounds_nothing: bool) -> Linear | None:
    if has(op, "cast"):
        return parts[0] if kind != "b" and rounds_nothing else None
    counted = [one for one in map(_counting, parts) if one is not None]
    if len(counted) != len(parts) or op not in TERMS or len(parts) > 2:
        return None
    if has(op, "multiply"):
        by = next((at for at, (_, factors) in enumerate(counted) if not factors), None)
        times = counted[by][0].number if by is not None else None
        return None if by is None or times is None else _scaled(counted[1 - by], times)
    if has(op, "sign"):
        return _scaled(counted[0], -1)
    return added(counted[0], _scaled(counted[1], -1 if has(op, "subtract") else 1))


def _clamp(call: Reading, parts: Sequence[Linear]) -> Counting | None:
    """The extreme of numbers that count, where one of them is it at every index."""
    found, shape = _counting(parts[0]), call.broadcast(call.given)
    for at, part in enumerate(parts[1:], 1):
        largest, end = LARGEST_OF.get(call.node.op, at == 1 and call.has(1)), plain_number(part[0])
        if part[1] or end is None or (-end if largest else end) < ENDLESS:
            bound = _counting(part)
            found = _extreme(found, bound, largest, shape, call.lengths) if found and bound else None
    return found


def _counting(part: Linear | None) -> Counting | None:
    start = _as_term(part[0]) if part is not None else None
    return (start, part[1]) if start is not None and part is not None else None


def _scaled(one: Counting, by: int) -> Counting:
    return one[0].times(by), tuple((at, factor * by) for at, factor in one[1] if by)


def added(one: Counting, other: Counting) -> Counting:
    """The sum of two linear functions."""
    factors = dict(one[1])
    for at, factor in other[1]:
        factors[at] = factors.get(at, 0) + factor
    return one[0] + other[0], tuple(sorted((at, factor) for at, factor in factors.items() if factor))


def _compare(call: Reading, one: Type, other: Type, shape: tuple[Axis, ...]) -> Made | None:
    """A comparison of two linear functions: a mask."""
    first, second = (_counting(linear_of(side)) for side in (one, other))
    if first is None or second is None:
        return None
    apart = added(second, _scaled(first, -1))
    with_row = _with_row(call, apart, shape)
    holds = {_decide(call.node.op, end, call.lengths) for end in _ends(apart, shape)}
    # What holds at both ends does so between them; numbers between two that are not equal may be.
    decided = len(holds) == 1 and None not in holds and (not apart[1] or COMPARED[call.node.op][0] != "equal")
    if decided and with_row is None:
        return Made(Type("b", shape, linear=(number(int(True in holds)), ())))
    apart, shape = with_row or (apart, shape)
    if not apart[1]:
        return None
    absolute = call.lengths.absolute(Type("i", shape, linear=apart))
    if absolute is None or isinstance(absolute[0], float):
        return Made(Type("b", shape))
    regions = tuple(find_regions(call.node.op, absolute[0], absolute[1]))
    return Made(call.opaque(shape, [], "b", True, regions), ("compare", call.node.op, absolute))


def _with_row(call: Reading, apart: Counting, shape: tuple[Axis, ...]) -> tuple[Counting, tuple[Axis, ...]] | None:
    """A comparison with the past, of a graph for one new token: the axis of one element before the tokens counts it."""
    (start, factors), lengths = apart, call.lengths
    by = dict(start.parts).get((PAST,), 0)
    row_is_open = len(shape) > 1 and shape[-2] == () and shape[-1] == (lengths.total,)
    if not lengths.single or not row_is_open or not by or not factors:
        return None
    return (start, tuple(sorted((*factors, (-2, by))))), (*shape[:-2], (lengths.new,), shape[-1])


def _ends(linear: Counting, shape: tuple[Axis, ...]) -> tuple[Term, Term]:
    """The smallest and the largest number of a linear function over the indexes of a shape."""
    least = most = linear[0]
    for at, factor in linear[1]:
        step = (size_of(shape[at]) - ONE).times(factor)
        least, most = (least, most + step) if factor > 0 else (least + step, most)
    return least, most


def _neutral(call: Reading) -> int | None:
    """The input that a result equals, but for what a mask hides; None where there is none."""
    if has(call.node.op, "select"):
        chosen = _seen_as(call.input(0), call.lengths)
        return None if chosen is None else 1 if chosen else 2
    neutral = {"Add": 0.0, "Mul": 1.0, "And": 1.0, "Or": 0.0, "Sub": 0.0, "Div": 1.0}.get(call.node.op)
    if neutral is None or len(call.given) != 2:
        return None
    for at, one in enumerate(call.given):
        if _seen_as(one, call.lengths) == neutral and (at or not has(call.node.op, "subtract", "divide")):
            return 1 - at
    return None


def _seen_as(one: Type, lengths: Lengths) -> float | None:
    """The number that a value has for each token and all earlier ones: wherever a mask may hide nothing."""
    value = plain_number(constant_of(one))
    if value is not None:
        return value
    for (row, column), marks in one.regions:
        shape = one.shape or ()
        # Scores have the queries before the keys.
        if row < column and shape[row] == (lengths.new,) and shape[column] == (lengths.total,) and marks[1] == marks[2]:
            return marks[1] if isinstance(marks[1], float) else None
    return None


RULES: dict[str, Rule] = dict.fromkeys(operators_with("elementwise", "copy", "cast"), elementwise)
