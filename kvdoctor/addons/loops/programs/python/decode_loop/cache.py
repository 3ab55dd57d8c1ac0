"""The cache of one batch of sequences: its first values, the next ones, and those after a rewind or a reorder.

A tensor that the runtime returned is passed on as it is. What the program puts together itself is copied once, and a
buffer is written in place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from .contract import Fill, Slot
from .values import Array, as_value, numpy_type, shape_of

CARRIES = ("feed-back", "append", "write", "shift", "drop-oldest")
"""What becomes of an output and the value before it."""

Values = dict[str | None, ort.OrtValue]
"""Tensors by their names. The source of an encoder has none."""


class Cache:
    """The values of the slots by the names of their inputs, `values`."""

    def __init__(self, slots: Sequence[Slot], sizes: Mapping[str, int]) -> None:
        """Zeros where the first call takes them."""
        self._slots = slots
        self._arrays: dict[str, Array] = {}
        """The memory of the values that the program puts together."""
        self.values: Values = {}
        for slot in slots:
            if slot.zeros is not None:
                shape = shape_of(slot.zeros, {**sizes, "batch_heads": sizes["batch"] * slot.heads})
                self._hold(slot, np.zeros(shape, numpy_type(slot.dtype)))

    def take(self, fills: Sequence[Fill], outputs: Values, length: int) -> None:
        """Take over what a call returned; `length` tokens were there before it."""
        for fill in fills:
            slot = self._slots[fill.slot]
            if fill.carry == "feed-back":
                self.values[slot.past] = outputs[fill.output]
                self._arrays.pop(slot.past, None)
            else:
                self._join(slot, fill.carry, outputs[fill.output].numpy(), length)

    def cut(self, length: int) -> None:
        """Go back to an earlier length."""
        for slot in self._slots:
            if slot.rewinds == "cut":
                self._hold(slot, self._array(slot)[_at(slot, slice(length))])

    def reorder(self, rows: Sequence[int]) -> None:
        """Hold some of the sequences, in that order."""
        for slot in self._slots:
            if slot.batch_axis is not None:
                entries = [row * slot.heads + head for row in rows for head in range(slot.heads)]
                self._hold(slot, self._array(slot).take(entries, slot.batch_axis))

    def _join(self, slot: Slot, carry: str, entries: Array, length: int) -> None:
        """Make the next value of the one before and what was returned."""
        axis = slot.length_axis or 0
        count = entries.shape[axis]
        if carry == "write":
            self._array(slot)[_at(slot, slice(length, length + count))] = entries
        elif carry == "append":
            self._hold(slot, np.concatenate([self._array(slot), entries], axis))
        elif carry == "shift":
            self._hold(slot, np.concatenate([self._array(slot)[_at(slot, slice(count, None))], entries], axis))
        else:  # drop-oldest
            self._hold(slot, entries[_at(slot, slice(1, None))])

    def _array(self, slot: Slot) -> Array:
        made = self._arrays.get(slot.past)
        return np.asarray(self.values[slot.past].numpy()) if made is None else made

    def _hold(self, slot: Slot, array: Array) -> None:
        array = np.ascontiguousarray(array) if array.ndim else array
        self.values[slot.past] = as_value(array)
        self._arrays[slot.past] = array


def _at(slot: Slot, part: slice) -> tuple[Any, ...]:
    """The index of a part of the entries."""
    return (*[slice(None)] * (slot.length_axis or 0), part)
