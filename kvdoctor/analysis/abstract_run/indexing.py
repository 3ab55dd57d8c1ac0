"""Operators that cut, pick and write elements by their place, in an abstract run."""

from collections.abc import Callable
from itertools import accumulate

import numpy as np

from kvdoctor.analysis.abstract_run.reading import Reading
from kvdoctor.analysis.abstract_run.values import (
    MOST_ELEMENTS,
    UNKNOWN,
    Abstract,
    CannotRun,
    exactly,
    fold_axis,
    number_for,
    numbers_for,
    size_of,
    unknown,
)
from kvdoctor.decode.calls import Array
from kvdoctor.model.node_sizes import Computed, NumberOf


def _slice(r: Reading) -> Abstract:
    value, plan = r.at(0), r.plan()
    if value.shape is None or plan is None:
        return UNKNOWN
    listed = {index: r.ints(index) or () for index in r.listing}
    for axis, size in enumerate(plan[0][0]):
        if isinstance(size, Computed):
            bounds = [listed[part.input][part.at] if isinstance(part, NumberOf) else part for part in size.parts]
            value = cut_axis(value, axis, slice(*bounds[1:]))
    return value


def cut_axis(value: Abstract, axis: int, part: slice) -> Abstract:
    """A part of an axis."""
    shape = value.shape or ()
    axis %= len(shape)
    picked = range(shape[axis])[part]
    size = (*shape[:axis], len(picked), *shape[axis + 1 :])
    rows = bool(value.key) and not value.exact and shape[axis] > 1 and axis < len(shape) - 1
    if size == shape and part.step == 1 and not rows:
        return value
    return _pick(value, axis, picked, size)


def _pick(value: Abstract, axis: int, picked: range, shape: tuple[int, ...]) -> Abstract:
    """Elements of an axis in a given order; of a collapsed axis another number stands for each choice."""
    if value.data is None:
        return Abstract(shape, key="")
    if 0 in shape:
        return Abstract(shape, np.zeros(shape, value.data.dtype), value.exact)
    if value.data.shape[axis] == (value.shape or ())[axis]:
        return Abstract(shape, _take(value, axis, np.array(picked, np.int64)), value.exact)
    if value.exact:
        return Abstract(shape, value.data, exact=True)
    if value.key:
        if axis == len(shape) - 1 and len(shape) > 1:
            # The columns of a table, as of a mask that is cut to the length of the cache: its values are not known.
            return Abstract(shape)
        wide = [1] * len(shape)
        wide[axis] = len(picked)
        return Abstract(shape, value.data * numbers_for(value.key, np.array(picked, np.int64)).reshape(wide))
    return Abstract(shape, value.data * number_for(f"{picked.start}:{picked.step}"))


def _take(value: Abstract, axis: int, places: Array) -> Array:
    """Elements of an axis that has a number for each; one number again for those of a part that was joined to others.

    A key that was joined with the value of its layer is cut out as it was before, and not as if each of its features
    had a number of its own.
    """
    data = value.data if value.data is not None else np.zeros(value.shape or ())
    taken = np.take(data, places, axis=axis)
    if value.exact or taken.shape[axis] < 2 or fold_axis(data, axis) is not data:
        return taken
    return fold_axis(taken, axis)


def _gather(r: Reading) -> Abstract:
    value, places = r.at(0), r.at(1)
    if value.shape is None or places.shape is None or not value.shape:
        return UNKNOWN
    axis = r.number("axis", 0) % len(value.shape)
    shape = (*value.shape[:axis], *places.shape, *value.shape[axis + 1 :])
    rows, at = value.shape[axis], places.numbers
    if at is None:
        return _gather_by_data(value, places, axis, shape)
    if at.size and (at.min() < -rows or at.max() >= rows):
        wrong = int(at.max() if at.max() >= rows else at.min())
        raise CannotRun(f"index {wrong} is beyond an axis of {rows}")
    flat = np.where(at < 0, at + rows, at).ravel()
    if value.data is None:
        return Abstract(shape)
    if value.key and not value.exact and value.data.shape[axis] == 1 and rows > 1 and not _is_last(value, axis):
        picked = numbers_for(value.key, flat).reshape(
            [*[1] * axis, *places.shape, *[1] * (len(value.shape) - axis - 1)]
        )
        return Abstract(shape, picked)
    if value.data.shape[axis] == rows:
        taken = _take(value, axis, flat)
        sizes = places.shape if taken.shape[axis] == flat.size else (1,) * len(places.shape)
        return Abstract(shape, taken.reshape([*taken.shape[:axis], *sizes, *taken.shape[axis + 1 :]]), value.exact)
    ones = [*value.data.shape[:axis], *[1] * len(places.shape), *value.data.shape[axis + 1 :]]
    found = value.data.reshape(ones)
    if not value.exact:
        behind = value.data.ndim - axis - 1
        found = found * numbers_for("rows", flat).reshape([*[1] * axis, *places.shape, *[1] * behind])
    return Abstract(shape, found, value.exact)


def _is_last(value: Abstract, axis: int) -> bool:
    return len(value.shape or ()) > 1 and axis == len(value.shape or ()) - 1


def _gather_by_data(value: Abstract, places: Abstract, axis: int, shape: tuple[int, ...]) -> Abstract:
    """Rows of a weight by numbers that are not exact: a smooth function of them."""
    if places.data is None or value.data is None or not value.key or value.exact:
        return Abstract(shape)
    made = np.sin(places.data * number_for(value.key))
    return Abstract(shape, made.reshape([*[1] * axis, *made.shape, *[1] * (len(value.shape or ()) - axis - 1)]))


def _gather_elements(r: Reading) -> Abstract:
    data, places = r.at(0).numbers, r.at(1).numbers
    if data is None or places is None:
        return unknown(r.at(1).shape)
    axis = r.number("axis", 0)
    size = data.shape[axis]
    if places.size and (places.min() < -size or places.max() >= size):
        raise CannotRun(f"index {int(places.max())} is beyond an axis of {size}")
    return exactly(np.take_along_axis(data, places % max(size, 1), axis=axis))


def _gather_nd(r: Reading) -> Abstract:
    value, places = r.at(0), r.at(1).numbers
    if value.shape is None or places is None or r.number("batch_dims", 0):
        return UNKNOWN
    depth = places.shape[-1]
    shape = (*places.shape[:-1], *value.shape[depth:])
    if places.size:
        highest = places.reshape(-1, depth).max(axis=0)
        if any(int(top) >= size for top, size in zip(highest, value.shape, strict=False)):
            raise CannotRun(f"index {highest.tolist()} is beyond {list(value.shape[:depth])}")
    if value.data is None or value.data.shape[:depth] != value.shape[:depth]:
        return Abstract(shape)
    return Abstract(shape, value.data[tuple(np.moveaxis(places, -1, 0))], value.exact)


def _scatter_nd(r: Reading) -> Abstract:
    value, places, added = r.at(0), r.at(1).numbers, r.at(2)
    if value.shape is None or value.data is None or places is None or added.data is None or added.shape is None:
        return unknown(value.shape)
    depth = places.shape[-1]
    if r.text("reduction", "none") != "none":
        return unknown(value.shape)
    if places.size:
        highest = places.reshape(-1, depth).max(axis=0)
        if any(int(top) >= size for top, size in zip(highest, value.shape, strict=False)):
            raise CannotRun(f"index {highest.tolist()} is beyond {list(value.shape[:depth])}")
    behind = added.data.shape[places.ndim - 1 :]
    sizes = [*value.shape[:depth], *(max(a, b) for a, b in zip(value.data.shape[depth:], behind, strict=True))]
    if size_of(sizes) > MOST_ELEMENTS:
        return unknown(value.shape)
    found = np.broadcast_to(value.data, sizes).astype(np.result_type(value.data, added.data))
    put = np.broadcast_to(added.data, [*places.shape[:-1], *behind])
    found[tuple(np.moveaxis(places, -1, 0))] = put
    return Abstract(value.shape, found, value.exact and added.exact)


def _scatter_elements(r: Reading) -> Abstract:
    value, places, added = r.at(0), r.at(1), r.at(2)
    if value.shape is None or value.data is None or places.numbers is None or added.data is None:
        return unknown(value.shape)
    axis = r.number("axis", 0) % len(value.shape)
    at = places.numbers
    if at.size and at.max() >= value.shape[axis]:
        raise CannotRun(f"index {int(at.max())} is beyond an axis of {value.shape[axis]}")
    if r.text("reduction", "none") != "none" or size_of(value.shape) > MOST_ELEMENTS:
        return unknown(value.shape)
    found = value.array().astype(np.result_type(value.data, added.data))
    np.put_along_axis(found, np.where(at < 0, at + value.shape[axis], at), added.array(), axis)
    return Abstract(value.shape, found, value.exact and added.exact)


def _tensor_scatter(r: Reading) -> Abstract:
    """TensorScatter (ONNX 24): rows are written into a buffer from an index of each sequence on."""
    value, added, places = r.at(0), r.at(1), r.at(2).numbers if r.has(2) else np.zeros(1, np.int64)
    if value.shape is None or value.data is None or added.shape is None or added.data is None or places is None:
        return unknown(value.shape)
    axis = r.number("axis", -2) % len(value.shape)
    count, length = added.shape[axis], value.shape[axis]
    if r.text("mode", "linear") == "linear" and places.size and int(places.max()) + count > length:
        raise CannotRun(f"{count} rows at {int(places.max())} are beyond a buffer of {length}")
    sizes = [max(a, b) for a, b in zip(value.data.shape, added.data.shape, strict=True)]
    sizes[axis], sizes[0] = length, max(value.shape[0], 1)
    found = np.broadcast_to(value.data, sizes).astype(np.float64)
    rows = np.broadcast_to(added.data, [count if at == axis else size for at, size in enumerate(sizes)])
    for row in range(sizes[0]):
        start = int(places[row] if places.size > 1 else places.ravel()[0])
        place = [slice(None)] * len(sizes)
        for offset in range(count):
            place[axis] = slice((start + offset) % length, (start + offset) % length + 1)
            inner, outer = tuple(place[1:]), [slice(None)] * len(sizes)
            outer[axis] = slice(offset, offset + 1)
            found[row][inner] = rows[row][tuple(outer[1:])]
    return Abstract(value.shape, found)


def _split(r: Reading) -> list[Abstract]:
    value, plan = r.at(0), r.plan()
    if value.shape is None or plan is None:
        return [UNKNOWN] * len(r.outputs)
    axis = r.number("axis", 0) % len(value.shape)
    sizes = [shape[axis] for _, shape in plan]
    if sum(sizes) != value.shape[axis]:
        raise CannotRun(f"an axis of {value.shape[axis]} is split into {sizes}")
    ends = list(accumulate(sizes))
    return [cut_axis(value, axis, slice(end - size, end, 1)) for end, size in zip(ends, sizes, strict=True)]


INDEXING: dict[str, Callable[[Reading], Abstract | list[Abstract]]] = {
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
    "TensorScatter": _tensor_scatter,
    "Split": _split,
}
