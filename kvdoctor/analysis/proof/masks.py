"""Masks: what is known of their elements, and of masked scores, above, on and below the diagonal of two positions."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence

from kvdoctor.analysis.proof.call import Reading, is_calm
from kvdoctor.analysis.proof.types import HIDDEN, MODERATE, UNKNOWN, Mark, Region, Term, Type, constant_of, plain_number
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import has, operators_with

BURY, HIDE, PLAIN, FINITE = "bury", "hide", "plain", "finite"
"""At most -1e30, and at most -10,000, whatever was added to it; an ordinary number that a model computes; any number
but an infinite one."""
BURIED, SMALLEST = -1e30, 1e-6
"""A number that still hides a score after a product with one that is not smaller than the second."""
NUMERIC: dict[str, Callable[..., float]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mul": operator.mul,
    "Div": operator.truediv,
    "Min": min,
    "Max": max,
    "Neg": operator.neg,
    "Abs": abs,
    "And": lambda one, other: one and other,
    "Or": lambda one, other: one or other,
    "Xor": lambda one, other: bool(one) != bool(other),
    "Not": lambda one: not one,
    "IsNaN": math.isnan,
    "Sqrt": math.sqrt,
    "Exp": math.exp,
    "Equal": operator.eq,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Where": lambda chosen, one, other: one if chosen else other,
    "Pow": operator.pow,
    "Floor": math.floor,
    "Ceil": math.ceil,
    "Identity": lambda one: one,
    "Cast": lambda one: one,
}
"""What operators compute of numbers."""


HALF, LARGEST_HALF, LARGEST = 10, 65504.0, 3.4028235e38


COMPARED: dict[str, tuple[str, int]] = {
    "Less": ("more", 1),
    "LessOrEqual": ("more", 0),
    "Greater": ("less", -1),
    "GreaterOrEqual": ("less", 0),
    "Equal": ("equal", 0),
}
"""What the second number minus the first must be: so much or more, so much or less, exactly so much."""


def compute(op: str, values: Sequence[float]) -> float | None:
    """What an operator computes of numbers; None where it is not known here."""
    if op not in NUMERIC or (has(op, "divide") and not values[-1]):
        return None
    try:
        if has(op, "clamp") and len(values) == 1:
            return values[0]
        found = float(NUMERIC[op](*values))
        if abs(found) > LARGEST:
            return math.copysign(math.inf, found)
        return None if math.isnan(found) else found
    except (ValueError, OverflowError, TypeError, ZeroDivisionError):
        return None


def find_regions(op: str, start: Term, factors: tuple[tuple[int, int], ...]) -> list[Region]:
    """Where a comparison of positions holds, by the second minus the first."""
    value = start.number
    if value is None or len(factors) != 2 or factors[0][1] != -factors[1][1]:
        return []
    found: list[Region] = []
    for (row, _), (column, by) in (factors, factors[::-1]):
        above, below = (float(value + by), math.inf), (-math.inf, float(value - by))
        if by < 0:
            above, below = (-math.inf, float(value + by)), (float(value - by), math.inf)
        marks = tuple(_holds(op, *limits) for limits in (above, (value, value), below))
        found.append(((row, column), (marks[0], marks[1], marks[2])))
    return found


def _holds(op: str, least: float, most: float) -> Mark:
    how, limit = COMPARED[op][0], float(COMPARED[op][1])
    if how == "less":
        least, most, limit = -most, -least, -limit
    if how == "equal":
        return 1.0 if least == most == limit else 0.0 if not least <= limit <= most else None
    return 1.0 if least >= limit else 0.0 if most < limit else None


def _mark_of(one: Type, pair: tuple[int, int], part: int) -> Mark:
    """What is known of the elements of a value in a region."""
    for axes, marks in one.regions:
        if axes == pair:
            return marks[part]
    value = plain_number(constant_of(one))
    if value is not None:
        return value
    return PLAIN if one.kind == "f" and is_calm(one) else None


def combine_regions(call: Reading, taken: Sequence[Type], kind: str) -> tuple[Region, ...]:
    """What is known of the regions of a result."""
    pairs = sorted({pair for one in taken for pair, _ in one.regions})
    found = []
    for pair in pairs:
        marks = [_combined(call.node.op, [_mark_of(one, pair, part) for one in taken], kind) for part in range(3)]
        if any(mark is not None for mark in marks):
            found.append((pair, (marks[0], marks[1], marks[2])))
    return tuple(found)


ABSORBING = {"And": True, "Mul": False}
"""Operators that return 0 where one input is 0: whatever the others are, or where they are finite."""
FILLING, VANISHING = ("Or",), ("Exp",)
"""Operators that return 1 where one input is 1, and 0 of what is far below 0."""
UNBOUNDED = operators_with("power", "exponential")
POLES = {*operators_with("divide"), *UNBOUNDED} - {"Sqrt", "Exp"}


def _combined(op: str, marks: Sequence[Mark], kind: str) -> Mark:
    """What is known of a region of a result, by what is known of it in the inputs."""
    numbers = [mark for mark in marks if isinstance(mark, float)]
    if has(op, "cast"):
        if kind == "f" or not numbers:
            return marks[0]
        return float(bool(numbers[0])) if kind == "b" else float(int(numbers[0])) if math.isfinite(numbers[0]) else None
    if has(op, "select"):
        chosen = marks[0]
        return _either(marks[1], marks[2]) if not isinstance(chosen, float) else marks[1] if chosen else marks[2]
    if op in ABSORBING and 0.0 in numbers and (ABSORBING[op] or not {None, HIDE, BURY} & set(marks)):
        return 0.0 if all(math.isfinite(value) for value in numbers) else None
    if op in FILLING and any(numbers):
        return 1.0
    if len(numbers) == len(marks):
        return compute(op, numbers)
    return _combine_scores(op, marks, kind)


def _combine_scores(op: str, marks: Sequence[Mark], kind: str) -> Mark:
    """The same where some are no numbers: scores that are hidden, or plain."""
    hidden, plain = [is_hiding(mark) for mark in marks], [is_plain(mark) for mark in marks]
    hides = {
        "Add": any(hidden) and all(h or p for h, p in zip(hidden, plain, strict=True)),
        "Sub": hidden[0] and plain[-1],
        "Mul": _still_hides(marks[0], marks[-1] if isinstance(marks[-1], float) else 0.0),
        "Div": _still_hides(marks[0], 1 / marks[-1] if isinstance(marks[-1], float) and marks[-1] else 0.0),
        "Max": all(hidden),
        "Min": any(hidden),
    }
    if hides.get(op, False):
        return BURY if has(op, "add") and any(_is_buried(mark) for mark in marks) else HIDE
    if op in VANISHING and hidden[0]:
        return 0.0
    return PLAIN if all(plain) and kind == "f" and op not in UNBOUNDED else None


def _still_hides(mark: Mark, times: float) -> bool:
    return is_hiding(mark) and times >= (SMALLEST if _is_buried(mark) else 1)


def _is_buried(mark: Mark) -> bool:
    return mark == BURY or (isinstance(mark, float) and mark <= BURIED)


def _either(one: Mark, other: Mark) -> Mark:
    if one is not None and one == other:
        return one
    if is_hiding(one) and is_hiding(other):
        return HIDE
    return PLAIN if is_plain(one) and is_plain(other) else None


def is_hiding(mark: Mark) -> bool:
    """Whether it hides a score that it is added to."""
    return mark in (HIDE, BURY) or (isinstance(mark, float) and mark <= HIDDEN)


def is_plain(mark: Mark) -> bool:
    """Whether it is an ordinary number, which hides no score."""
    return mark == PLAIN or (isinstance(mark, float) and abs(mark) <= MODERATE)


def is_weak(one: Type) -> bool:
    """Whether scores of later tokens are hidden by a number of moderate size, which no score must come near."""
    return any(is_hiding(marks[0]) and not _is_buried(marks[0]) for _, marks in one.regions)


def hides_later(one: Type, row: int, column: int, single: bool = False, padded: bool = False) -> bool:
    """Whether scores of later tokens are hidden, if there may be any, and that of a token that is no padding is not."""
    marks = dict(one.regions).get((row, column))
    return marks is not None and (single or is_hiding(marks[0])) and (padded or is_plain(marks[1]))


def stays_finite(kinds: Mapping[str, Type], flow: Flow, one_float: bool) -> bool:
    """Whether padding, which may see nothing, has numbers: 0 times another one is none.

    No masked score is infinite, and what is divided by, or a logarithm taken of, is a number or the root of a sum.
    """
    for node in (one for one in flow.nodes if one.op in POLES):
        name = node.inputs[-1]
        root = flow.producers.get(name)
        value, summed = plain_number(constant_of(kinds.get(name, UNKNOWN))), root and flow.producers.get(root.input(0))
        rooted = root is not None and summed is not None and root.has("power") and summed.has("add")
        if not (value > 0 if value is not None else name in flow.fixed or rooted):
            return False
    marked = {name: {mark for _, marks in one.regions for mark in marks} for name, one in kinds.items()}
    lowest = min((mark for marks in marked.values() for mark in marks if isinstance(mark, float)), default=0.0)
    taken = (name for node in flow.nodes if node.has("elementwise") for name in node.inputs)
    bent = any({HIDE, BURY} & marked.get(name, set()) for name in taken)  # masked scores are computed with once more
    if one_float:
        return lowest >= (BURIED if bent else -LARGEST)
    return lowest >= MODERATE - LARGEST_HALF and not bent
