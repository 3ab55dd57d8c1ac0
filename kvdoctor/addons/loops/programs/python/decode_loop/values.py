"""The values of inputs that are made for a call, by the sums of the contract."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import onnxruntime as ort

from .contract import Dims, Made, Terms

Array = np.ndarray[Any, Any]
NUMPY = {"float": "float32", "double": "float64"}
"""Element types that numpy has another name for."""


@dataclass
class Step:
    """What a call is made for.

    `rows` has the numbers that inputs copy: the new tokens, int64[batch, new], and what the caller says of the source,
    int[batch, encoder_input]. `sizes` are what axes and terms count. `padding` is the number of entries on the left of
    each sequence that are none of its tokens, empty where there are none.
    """

    rows: dict[str, Array]
    sizes: dict[str, int]
    padding: Sequence[int] = ()


def numpy_type(dtype: str) -> np.dtype[Any]:
    """The element type of an ONNX tensor in numpy."""
    return np.dtype(NUMPY.get(dtype, dtype))


def as_value(array: Array) -> ort.OrtValue:
    """A tensor of the runtime over the memory of a contiguous array."""
    return ort.OrtValue.ortvalue_from_numpy(array)


def as_float32(value: ort.OrtValue) -> Array:
    """The numbers of a tensor of any float type."""
    made: Array = value.numpy()
    return made if made.dtype == np.float32 else made.astype(np.float32)


def shape_of(dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape; an axis that nothing counts has size 1."""
    return tuple([dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in dims])


class Value:
    """The value of an input that is made for each call.

    Its memory is used again while the shape stays: the runtime has read it when the next call begins.
    """

    def __init__(self, made: Made) -> None:
        counted = {*made.begin, *made.end, *made.inside}
        self._made, self._dtype = made, numpy_type(made.dtype)
        self._constant = made.copy is None and not counted - {"one", "columns"}
        self._rows_differ = bool(counted & {"query", "sequence"})
        self._array: Array = np.empty(0)
        self._value: ort.OrtValue | None = None

    def make(self, step: Step) -> ort.OrtValue:
        """The value in a call."""
        shape = shape_of(self._made.dims, step.sizes)
        if self._value is None or self._array.shape != shape:
            self._array = np.empty(shape, self._dtype)
            self._value = as_value(self._array)
        elif self._constant:
            return self._value
        self._fill(self._array, step)
        return self._value

    def _fill(self, array: Array, step: Step) -> None:
        copied = step.rows.get(self._made.copy or "")
        if copied is not None and copied.shape == array.shape:  # as usual: nothing else would be left
            array[...] = copied
            return
        axis, last = self._made.batch_axis, array.ndim - 1
        columns = 1 if last < 0 or axis == last else array.shape[last]
        rows = array.reshape(-1, columns) if array.size else array.reshape(0, 1)
        step.sizes["columns"] = columns
        if copied is None and not self._rows_differ and not step.padding:
            self._write(rows, step.sizes)
            return
        sizes = dict(step.sizes)
        batch, each = (1, 1) if axis is None else (array.shape[axis], prod(array.shape[axis + 1 : last]))
        for number, row in enumerate(rows):
            sequence = number // each % batch
            sizes["sequence"], sizes["query"] = sequence, number % array.shape[last - 1] if last > 0 else 0
            if axis is not None and step.padding:
                sizes["padding"] = step.padding[sequence]
            self._write(row, sizes)
            if copied is not None and copied.shape[1] <= columns:
                row[: copied.shape[1]] = copied[sequence]

    def _write(self, rows: Array, sizes: Mapping[str, int]) -> None:
        """Write one row, or several that are equal."""
        made, columns = self._made, sizes["columns"]
        begin, end = max(_sum(made.begin, sizes), 0), min(_sum(made.end, sizes), columns)
        if begin > 0 or end < columns:
            rows.fill(made.outside)
        if begin < end:
            rows[..., begin:end] = _sum(made.inside, sizes)
        if made.step and end > 1:  # the first column has none before it
            rows[..., begin:end] += np.arange(begin, max(begin, end), dtype=rows.dtype) * made.step


def _sum(terms: Terms, sizes: Mapping[str, int]) -> Any:
    total: Any = 0
    for name, factor in terms.items():
        total += sizes[name] * factor
    return total
