"""Operators that move, repeat and join elements, in an abstract run."""

from collections.abc import Sequence
from functools import lru_cache
from math import isfinite

import numpy as np

from kvdoctor.analysis.abstract_run.indexing import cut_axis
from kvdoctor.analysis.abstract_run.values import (
    MOST_ELEMENTS,
    PLANS,
    RELATIVE_ROUNDING,
    ROUNDING,
    UNKNOWN,
    Abstract,
    CannotRun,
    Reading,
    Rule,
    exactly,
    fold_axis,
    known,
    number_for,
    read_tensor,
    size_of,
    unknown,
)
from kvdoctor.decode.calls import Array
from kvdoctor.model.node_sizes import AxisOf

MOST_AXES = 64
"""Axes that a tensor may have, at most: shapes of unequal numbers of elements have no parts that agree."""


def reshape_value(value: Abstract, target: tuple[int, ...]) -> Abstract:
    """The value in another shape of as many elements; collapsed axes stay collapsed where that is possible."""
    shape, data = value.shape, value.data
    if data is None or shape is None:
        return Abstract(target, key=value.key)
    if 0 in shape:
        return Abstract(target, np.zeros(target, data.dtype), value.exact)
    spread, sizes = _plan_reshape(shape, data.shape, target)
    if size_of(spread) > MOST_ELEMENTS:
        return Abstract(target)
    found = (data if data.shape == spread else np.broadcast_to(data, spread)).reshape(sizes)
    return Abstract(target, found if value.exact or target == shape else _fold(found), value.exact, value.key)


@lru_cache(PLANS)
def _plan_reshape(
    shape: tuple[int, ...], held: tuple[int, ...], target: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape that numbers of the shape `held` are repeated to, and the one that they then have in the target."""
    spread, sizes, i, j = list(held), list[int](), 0, 0
    while i < len(shape) or j < len(target):
        first, start = i, j
        i, j = min(i + 1, len(shape)), min(j + 1, len(target))
        while (left := size_of(shape[first:i])) != (right := size_of(target[start:j])) and max(i, j) < MOST_AXES:
            i, j = (i + 1, j) if left < right else (i, j + 1)
        if all(held[k] == 1 for k in range(first, i)):
            sizes += [1] * (j - start)
        else:
            spread[first:i] = shape[first:i]
            sizes += target[start:j]
    return tuple(spread), tuple(sizes)


def _fold(data: Array) -> Array:
    """Numbers with the axes collapsed again along which all are equal, as those of heads that were joined to rows."""
    for axis, size in enumerate(data.shape):
        # Most differ in the first two numbers already, which is found out faster than whether all are equal.
        if size > 1:
            one, other = data.item(0), data.item(size_of(data.shape[axis + 1 :]))
            near = abs(one - other) <= ROUNDING + RELATIVE_ROUNDING * abs(other)
            if near or not (isfinite(one) and isfinite(other)):
                data = fold_axis(data, axis)
    return data


def _reshape(r: Reading) -> Abstract:
    target, shape, plan = r.ints(1), r.at(0).shape, r.plan()
    if target is None and r.kind == "Reshape":
        return UNKNOWN
    if shape is None:
        return unknown(target) if target is not None and min(target, default=1) > 0 else UNKNOWN
    if plan is None or size_of(plan[0][1]) != size_of(shape):
        raise CannotRun(f"{list(shape)} cannot be reshaped to {list(target or ())}")
    return reshape_value(r.at(0), plan[0][1])


def _move(r: Reading) -> Abstract:
    """The axes of a value in another order, without some of size 1, or with more of these."""
    value, (sizes, shape) = r.at(0), known(r.plan())[0]
    before = known(value.shape)
    order = [size.at for size in sizes if isinstance(size, AxisOf)]
    gone = [at for at in range(len(before)) if at not in order]
    if any(before[at] != 1 for at in gone):
        raise CannotRun(f"axes {gone} of {list(before)} cannot be removed: they are not all 1")
    if value.data is None:
        return Abstract(shape, key=value.key)
    key = f"{value.key} transposed" if value.key and order != sorted(order) else value.key
    data = value.data.transpose(order + gone)
    held = iter(data.shape)
    axes = [next(held) if isinstance(size, AxisOf) else 1 for size in sizes]
    return Abstract(shape, data.reshape(axes), value.exact, key)


@lru_cache(PLANS)
def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a broadcast.

    Raises:
        CannotRun: two sizes do not agree.
    """
    found: list[int] = []
    for back in range(max(map(len, shapes), default=0), 0, -1):
        sizes = {shape[-back] for shape in shapes if len(shape) >= back} - {1}
        if len(sizes) > 1:
            raise CannotRun(f"{' and '.join(str(list(shape)) for shape in shapes)} cannot be combined")
        found.append(sizes.pop() if sizes else 1)
    return tuple(found)


def _expand(r: Reading) -> Abstract:
    value = r.at(0)
    shape = broadcast_shapes(known(value.shape), tuple(known(r.ints(1))))
    data = known(value.data, shape)
    data = data.reshape((1,) * (len(shape) - data.ndim) + data.shape)
    return Abstract(shape, np.zeros(shape, data.dtype) if 0 in shape else data, value.exact)


def _tile(r: Reading) -> Abstract:
    _, shape = known(r.plan())[0]
    data = known(r.at(0).data, shape)
    if size_of(shape) > MOST_ELEMENTS:
        return Abstract(shape)
    here = [1 if held == 1 else size // max(held, 1) for held, size in zip(data.shape, shape, strict=True)]
    return Abstract(shape, np.tile(data, here), r.at(0).exact)


@lru_cache(PLANS)
def _join_shapes(shapes: tuple[tuple[int, ...], ...], axis: int) -> tuple[tuple[int, ...], int]:
    """The shape of concatenated values, and the axis counted from the front.

    Raises:
        CannotRun: another axis differs.
    """
    listed = " and ".join(str(list(shape)) for shape in shapes)
    if len(set(map(len, shapes))) != 1:
        raise CannotRun(f"{listed} cannot be joined")
    axis %= len(shapes[0])
    for at in range(len(shapes[0])):
        if at != axis and len({shape[at] for shape in shapes}) > 1:
            raise CannotRun(f"{listed} cannot be joined on axis {axis}")
    return tuple(sum(s[axis] for s in shapes) if at == axis else size for at, size in enumerate(shapes[0])), axis


def join(values: Sequence[Abstract], axis: int, apart: bool = False) -> Abstract:
    """Concatenate values along an axis.

    One number stands for what is joined on a collapsed axis. With `apart` each value has its own there, repeated over
    the true size, as in a cache: what a later step cuts out of it is the value that was joined.

    Raises:
        CannotRun: another axis differs.
    """
    shapes = tuple([value.shape for value in values if value.shape is not None])
    if len(shapes) < len(values):
        return UNKNOWN
    total, axis = _join_shapes(shapes, axis)
    known = [(v, v.data) for v in values if v.data is not None and v.shape is not None and v.shape[axis]]
    if len(known) < sum([1 for shape in shapes if shape[axis]]):
        return Abstract(total)
    if 0 in total or not known:
        return Abstract(total, np.zeros(total), all(value.exact for value in values))
    exact = all(value.exact for value, _ in known)
    if len(known) == 1:
        return Abstract(total, known[0][1], exact)
    sizes = tuple(map(max, zip(*[data.shape for _, data in known], strict=True)))
    apart = apart and size_of((*sizes[:axis], total[axis], *sizes[axis + 1 :])) <= MOST_ELEMENTS
    if not exact and not apart and all(data.shape[axis] == 1 and (v.shape or ())[axis] > 1 for v, data in known):
        parts = [data * number_for(f"part {at} of {len(known)}") for at, (_, data) in enumerate(known)]
        return Abstract(total, sum(parts[1:], parts[0]))
    pieces = []
    for value, data in known:
        wide = (*sizes[:axis], (value.shape or ())[axis], *sizes[axis + 1 :])
        if size_of(wide) > MOST_ELEMENTS:
            return Abstract(total)
        pieces.append(data if data.shape == wide else np.broadcast_to(data, wide))
    return Abstract(total, np.concatenate(pieces, axis=axis), exact)


def _shape(r: Reading) -> Abstract:
    shape = known(r.at(0).shape)
    return exactly(np.array(shape[slice(r.number("start", 0), r.number("end", len(shape)))], np.int64))


def _constant_of_shape(r: Reading) -> Abstract:
    shape, value = tuple(known(r.ints(0))), r.attributes.get("value")
    if min(shape, default=0) < 0:
        raise CannotRun(f"a shape of {list(shape)}")
    read = read_tensor(value.t, "").data if value is not None else None
    number = read if read is not None else np.zeros(1, np.float32)
    data = np.zeros(shape, number.dtype) if 0 in shape else number.reshape((1,) * len(shape))
    return Abstract(shape, data, exact=True)


def _range(r: Reading) -> Abstract:
    start, end, step = (known(r.at(index).numbers).ravel() for index in range(3))
    if {start.size, end.size, step.size} != {1}:
        return UNKNOWN
    start, end, step = start[0], end[0], step[0]
    if step == 0 or abs((end - start) / step) > MOST_ELEMENTS:
        return UNKNOWN
    return exactly(np.arange(start, end, step))


def _pad(r: Reading) -> Abstract:
    value, amounts = r.at(0), known(r.ints(1, "pads"))
    rank = known(value.data).ndim
    if r.text("mode", "constant") != "constant":
        return UNKNOWN
    axes = [axis % rank for axis in (r.ints(3) or ())] if r.has(3) else list(range(rank))
    for number, axis in enumerate(axes):
        before, after = amounts[number], amounts[number + len(axes)]
        if value.shape is None:
            return UNKNOWN
        if min(before, after) < 0:
            value = cut_axis(value, axis, slice(max(-before, 0), value.shape[axis] - max(-after, 0), 1))
        for amount, first in ((before, True), (after, False)):
            if amount > 0 and value.shape is not None:
                fill = r.at(2).data if r.has(2) else None
                number_ = float(fill.ravel()[0]) if fill is not None and fill.size else 0.0
                shape = tuple(amount if at == axis else size for at, size in enumerate(value.shape))
                kind = value.data.dtype if value.data is not None else np.float64
                data = np.full([amount if at == axis else 1 for at in range(rank)], number_, kind)
                piece = Abstract(shape, np.zeros(shape, kind) if 0 in shape else data, value.exact)
                value = join([piece, value] if first else [value, piece], axis)
    return value


SHAPING: dict[str, Rule] = {
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Squeeze": _move,
    "Unsqueeze": _move,
    "Transpose": _move,
    "Expand": _expand,
    "Tile": _tile,
    "Concat": lambda r: join(r.all(), r.number("axis", 0), r.returned),
    "Shape": _shape,
    "Size": lambda r: exactly(np.array(size_of(known(r.at(0).shape)), np.int64)),
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "Pad": _pad,
}
