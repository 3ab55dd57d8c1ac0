"""The values that go from call to call, of one batch of sequences.

A tensor that the runtime returned is passed on as it is. What the program puts together itself is copied once, and a
buffer is written in place.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from .contract import Axis, Take, Zeros
from .values import Array, as_value, numpy_type, shape_of


class Cache:
    """Values by the names that the contract has for them."""

    def __init__(self, values: Mapping[str, ort.OrtValue] | None = None) -> None:
        self.values = dict(values or {})
        self._arrays: dict[str, Array] = {}
        """The memory of the values that the program puts together."""

    def fill(self, zeros: Iterable[Zeros], sizes: Mapping[str, int]) -> None:
        """Take zeros, before the first call."""
        for one in zeros:
            self.hold(one.value, np.zeros(shape_of(one.dims, sizes), numpy_type(one.dtype)))

    def take(self, takes: Sequence[Take], outputs: Mapping[str, ort.OrtValue], length: int) -> None:
        """Take over what a call returned; `length` tokens were there before it."""
        for one in takes:
            if one.axis is None:
                self.values[one.value] = outputs[one.output]
                self._arrays.pop(one.value, None)
            else:
                self._join(one, one.axis, outputs[one.output].numpy(), length)

    def cut(self, axes: Iterable[Axis], length: int) -> None:
        """Go back to an earlier length."""
        for one in axes:
            self.hold(one.value, self._array(one.value)[_at(one.axis, slice(length))])

    def reorder(self, axes: Iterable[Axis], rows: Sequence[int]) -> None:
        """Hold some of the sequences, in that order."""
        for one in axes:
            entries = [row * one.each + entry for row in rows for entry in range(one.each)]
            self.hold(one.value, self._array(one.value).take(entries, one.axis))

    def hold(self, name: str, array: Array) -> None:
        """Hold the elements of an array as the value of a name."""
        array = np.ascontiguousarray(array) if array.ndim else array
        self.values[name] = as_value(array)
        self._arrays[name] = array

    def _join(self, one: Take, axis: int, entries: Array, length: int) -> None:
        """Make the next value of the one before and what was returned."""
        count = entries.shape[axis]
        if one.carry == "write":
            self._array(one.value)[_at(axis, slice(length, length + count))] = entries
        elif one.carry == "drop-oldest":
            self.hold(one.value, entries[_at(axis, slice(1, None))])
        else:
            before = self._array(one.value)[_at(axis, slice(count if one.carry == "shift" else 0, None))]
            self.hold(one.value, np.concatenate([before, entries], axis))

    def _array(self, name: str) -> Array:
        made = self._arrays.get(name)
        return np.asarray(self.values[name].numpy()) if made is None else made


def _at(axis: int, part: slice) -> tuple[Any, ...]:
    """The index of a part of an axis."""
    return (*[slice(None)] * axis, part)
