"""Ways to make a value wrong, each as a function of the graph in the making, the right value and the layer."""

from typing import Any

import numpy as np

from .decoders import Body
from .sheet import FAR, FLOAT
from .strikes import Wrong

BFLOAT16 = 16


def times(factor: float) -> Wrong:
    return lambda b, v, _: b.op("Mul", v, float(factor))


def clipped(limit: float) -> Wrong:
    return lambda b, v, _: b.op("Max", b.op("Min", v, limit), -limit)


def turned_around(axis: int) -> Wrong:
    """The entries of an axis in reverse."""
    return lambda b, v, _: b.op("Slice", v, [-1], [-FAR], [axis], [-1])


def rolled(axis: int, by: int = 1) -> Wrong:
    """The last `by` entries of an axis come first."""
    return lambda b, v, _: b.op("Concat", b.part(v, [-by], [FAR], axis), b.part(v, [0], [-by], axis), axis=axis)


def first_row(b: Body, v: str, _: int) -> str:
    """Row 0 of the batch in each row."""
    return b.op("Expand", b.part(v, [0], [1], 0), b.op("Shape", v))


def rounded(kind: int) -> Wrong:
    return lambda b, v, _: b.cast(b.cast(v, kind), FLOAT)


def quantized(levels: int) -> Wrong:
    """One scale for the whole tensor, and so many levels."""

    def wrong(b: Body, v: str, _: int) -> str:
        scale = b.op("Div", b.op("Max", b.op("ReduceMax", b.op("Abs", v)), 1e-6), float(levels))
        return b.op("Mul", b.op("Round", b.op("Div", v, scale)), scale)

    return wrong


def of_layer(point: str, offset: int) -> Wrong:
    """The same value of another layer; the layer before it must exist."""
    return lambda b, _, layer: b.record[point, layer + offset]


def recorded(point: str) -> Wrong:
    """Another value of the same layer."""
    return lambda b, _, layer: b.record[point, layer]


def only(index: int, axis: int, then: Wrong) -> Wrong:
    """The other way to one entry of an axis alone, counted from its end if negative."""

    def wrong(b: Body, v: str, layer: int) -> str:
        row = b.count(b.size(v, axis))
        at = np.int64(index) if index >= 0 else b.op("Squeeze", b.op("Add", b.size(v, axis), [index]), [0])
        hit = (
            b.op("Unsqueeze", b.op("Equal", row, at), list(range(1, 4 - axis))) if axis < 3 else b.op("Equal", row, at)
        )
        return b.op("Where", hit, then(b, v, layer), v)

    return wrong


def columns(b: Body) -> str:
    """The position of each key: int64[1, 1, 1, t]."""
    return b.op("Unsqueeze", b.key_at, [0, 1, 2])


def queries(b: Body) -> str:
    """The position of each query: int64[1, 1, s, 1]."""
    return b.op("Unsqueeze", b.query_at, [0, 1, 3])


def new_columns(b: Body) -> str:
    """Which keys are those of the new tokens: bool[1, 1, 1, t]."""
    inside = b.op("GreaterOrEqual", columns(b), b.past)
    return b.all_of(inside, b.op("Less", columns(b), b.total))


def hides(which: Any) -> Wrong:
    """Keys that may no longer be seen, by a function of the graph in the making."""
    return lambda b, v, _: b.op("And", v, b.op("Not", which(b)))


def shows(which: Any) -> Wrong:
    """Keys that may be seen although they must not."""
    return lambda b, v, _: b.op("Or", v, which(b))


def swapped_halves(axis: int) -> Wrong:
    """The two halves of an axis exchanged."""

    def wrong(b: Body, v: str, _: int) -> str:
        middle = b.op("Div", b.size(v, axis), [2])
        return b.op("Concat", b.part(v, middle, [FAR], axis), b.part(v, [0], middle, axis), axis=axis)

    return wrong


def noise(b: Body, v: str, _: int) -> str:
    return b.op("Add", v, b.op("RandomNormalLike", v, scale=0.3))


def not_a_number(b: Body, v: str, _: int) -> str:
    return b.op("Log", b.op("Sub", b.op("Mul", v, 0.0), 1.0))


def ones(b: Body, v: str, _: int) -> str:
    return b.op("Add", b.op("Mul", v, [0]), [1])
