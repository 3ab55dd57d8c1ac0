"""Operators that cut, pick and write elements by their place, in an abstract run."""

from itertools import accumulate

import numpy as np

from kvdoctor.analysis.abstract_run.values import (
    MOST_ELEMENTS,
    UNKNOWN,
    Abstract,
    CannotRun,
    Reading,
    Rule,
    exactly,
    fold_axis,
    known,
    number_for,
    numbers_for,
    size_of,
)
from kvdoctor.decode.calls import Array
from kvdoctor.model.node_sizes import Computed, NumberOf


def _slice(r: Reading) -> Abstract:
    value, (sizes, _) = r.at(0), known(r.plan())[0]
    listed = {index: r.ints(index) or () for index in r.listing}
    for axis, size in enumerate(sizes):
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
    value, places, at = r.at(0), r.at(1), r.at(1).numbers
    sizes, picked = known(value.shape), known(places.shape)
    axis = r.number("axis", 0) % len(sizes)
    behind = len(sizes) - axis - 1
    shape, rows = (*sizes[:axis], *picked, *sizes[axis + 1 :]), sizes[axis]
    if at is None:  # rows of a weight by numbers that are not exact: a smooth function of them
        if places.data is None or value.data is None or not value.key or value.exact:
            return Abstract(shape)
        made = np.sin(places.data * number_for(value.key))
        return Abstract(shape, made.reshape([*[1] * axis, *made.shape, *[1] * behind]))
    if at.size and (at.min() < -rows or at.max() >= rows):
        wrong = int(at.max() if at.max() >= rows else at.min())
        raise CannotRun(f"index {wrong} is beyond an axis of {rows}")
    flat, data = np.where(at < 0, at + rows, at).ravel(), known(value.data, shape)
    along = [*[1] * axis, *picked, *[1] * behind]
    if value.key and not value.exact and data.shape[axis] == 1 and rows > 1 and (behind or len(sizes) == 1):
        return Abstract(shape, numbers_for(value.key, flat).reshape(along))
    if data.shape[axis] == rows:
        taken = _take(value, axis, flat)
        held = picked if taken.shape[axis] == flat.size else (1,) * len(picked)
        return Abstract(shape, taken.reshape([*taken.shape[:axis], *held, *taken.shape[axis + 1 :]]), value.exact)
    found = data.reshape([*data.shape[:axis], *[1] * len(picked), *data.shape[axis + 1 :]])
    if not value.exact:
        found = found * numbers_for("rows", flat).reshape(along)
    return Abstract(shape, found, value.exact)


def _gather_elements(r: Reading) -> Abstract:
    data, places = (known(r.at(index).numbers, r.at(1).shape) for index in (0, 1))
    axis = r.number("axis", 0)
    size = data.shape[axis]
    if places.size and (places.min() < -size or places.max() >= size):
        raise CannotRun(f"index {int(places.max())} is beyond an axis of {size}")
    return exactly(np.take_along_axis(data, places % max(size, 1), axis=axis))


def _gather_nd(r: Reading) -> Abstract:
    value, sizes, places = r.at(0), known(r.at(0).shape), known(r.at(1).numbers)
    if r.number("batch_dims", 0):
        return UNKNOWN
    depth = _count_axes(places, sizes)
    shape = (*places.shape[:-1], *sizes[depth:])
    if value.data is None or value.data.shape[:depth] != sizes[:depth]:
        return Abstract(shape)
    return Abstract(shape, value.data[tuple(np.moveaxis(places, -1, 0))], value.exact)


def _count_axes(places: Array, sizes: tuple[int, ...]) -> int:
    """The number of axes that places of elements count in.

    Raises:
        CannotRun: a place is beyond such an axis.
    """
    depth: int = places.shape[-1]
    highest = places.reshape(-1, depth).max(axis=0).tolist() if places.size else []
    if any(int(top) >= size for top, size in zip(highest, sizes, strict=False)):
        raise CannotRun(f"index {highest} is beyond {list(sizes[:depth])}")
    return depth


def _scatter_nd(r: Reading) -> Abstract:
    value, added = r.at(0), r.at(2)
    shape = known(value.shape)
    data, places, put = (known(found, shape) for found in (value.data, r.at(1).numbers, added.data))
    if r.text("reduction", "none") != "none":
        return Abstract(shape)
    depth, behind = _count_axes(places, shape), put.shape[places.ndim - 1 :]
    sizes = [*shape[:depth], *(max(a, b) for a, b in zip(data.shape[depth:], behind, strict=True))]
    if size_of(sizes) > MOST_ELEMENTS:
        return Abstract(shape)
    found = np.broadcast_to(data, sizes).astype(np.result_type(data, put))
    found[tuple(np.moveaxis(places, -1, 0))] = np.broadcast_to(put, [*places.shape[:-1], *behind])
    return Abstract(shape, found, value.exact and added.exact)


def _scatter_elements(r: Reading) -> Abstract:
    value, added = r.at(0), r.at(2)
    shape = known(value.shape)
    data, at, put = (known(found, shape) for found in (value.data, r.at(1).numbers, added.data))
    axis = r.number("axis", 0) % len(shape)
    if at.size and at.max() >= shape[axis]:
        raise CannotRun(f"index {int(at.max())} is beyond an axis of {shape[axis]}")
    if r.text("reduction", "none") != "none" or size_of(shape) > MOST_ELEMENTS:
        return Abstract(shape)
    found = value.array().astype(np.result_type(data, put))
    np.put_along_axis(found, np.where(at < 0, at + shape[axis], at), added.array(), axis)
    return Abstract(shape, found, value.exact and added.exact)


def _tensor_scatter(r: Reading) -> Abstract:
    """TensorScatter (ONNX 24): rows are written into a buffer from an index of each sequence on."""
    shape, taken = known(r.at(0).shape), known(r.at(1).shape, r.at(0).shape)
    places = known(r.at(2).numbers, shape) if r.has(2) else np.zeros(1, np.int64)
    data, put = (known(r.at(index).data, shape) for index in (0, 1))
    axis = r.number("axis", -2) % len(shape)
    count, length = taken[axis], shape[axis]
    if r.text("mode", "linear") == "linear" and places.size and int(places.max()) + count > length:
        raise CannotRun(f"{count} rows at {int(places.max())} are beyond a buffer of {length}")
    sizes = [max(a, b) for a, b in zip(data.shape, put.shape, strict=True)]
    sizes[axis], sizes[0] = length, max(shape[0], 1)
    found = np.broadcast_to(data, sizes).astype(np.float64)
    rows = np.broadcast_to(put, [count if at == axis else size for at, size in enumerate(sizes)])
    for row in range(sizes[0]):
        start = int(places[row] if places.size > 1 else places.ravel()[0])
        written, given = (np.moveaxis(array[row], axis - 1, 0) for array in (found, rows))
        for offset in range(count):
            written[(start + offset) % length] = given[offset]
    return Abstract(shape, found)


def _split(r: Reading) -> list[Abstract]:
    whole, plan = known(r.at(0).shape), known(r.plan())
    axis = r.number("axis", 0) % len(whole)
    sizes = [shape[axis] for _, shape in plan]
    if sum(sizes) != whole[axis]:
        raise CannotRun(f"an axis of {whole[axis]} is split into {sizes}")
    ends = zip(accumulate(sizes), sizes, strict=True)
    return [cut_axis(r.at(0), axis, slice(end - size, end, 1)) for end, size in ends]


INDEXING: dict[str, Rule] = {
    "Slice": _slice,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
    "TensorScatter": _tensor_scatter,
    "Split": _split,
}
