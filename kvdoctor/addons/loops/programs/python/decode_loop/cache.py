"""The cache of one batch of sequences: its first values, the next ones, and those after a rewind or a reorder.

A tensor that the runtime returned is passed on as it is. What the program puts together itself is copied once, and a
buffer is written in place.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from .contract import Slot
from .values import Array, as_value, numpy_type, shape_of


class Cache:
    """The values of the slots by the names of their inputs, `values`."""

    def __init__(self, slots: Sequence[Slot], made: Mapping[str, ort.OrtValue], batch: int, capacity: int) -> None:
        """The values that the first call takes: what the encoder `made`, else zeros."""
        self._slots = slots
        self._passed = {slot.past: slot.present for slot in slots if slot.present is not None and not slot.is_copied}
        """The outputs that later calls pass on as they are."""
        self._arrays: dict[str, Array] = {}
        """The memory of the values that the program puts together."""
        self.values: dict[str, ort.OrtValue] = {}
        for slot in slots:
            if slot.by_encoder and slot.made is not None:
                self.values[slot.past] = made[slot.made]
                continue
            sizes = {"batch": batch, "batch_heads": batch * slot.heads, "past": slot.first_length}
            sizes |= {"encoder": slot.first_length, "capacity": capacity}
            self._hold(slot, np.zeros(shape_of(slot.dims, sizes), numpy_type(slot.dtype)))

    def advance(self, outputs: Mapping[str, ort.OrtValue], length: int) -> None:
        """Take over what a call returned; `length` tokens were there before it."""
        if not length:
            made = {slot.past: slot.made for slot in self._slots if slot.made and not slot.by_encoder}
            self.values |= {past: outputs[name] for past, name in made.items() if past not in self._arrays}
        else:
            self.values.update({past: outputs[present] for past, present in self._passed.items()})
        for slot in self._slots if self._arrays else ():
            name = slot.present if length else slot.made
            if slot.past in self._arrays and name is not None:
                self._join(slot, outputs[name].numpy(), length)

    def cut(self, length: int) -> None:
        """Go back to an earlier length."""
        for slot in self._slots:
            if slot.rewinds == "cut":
                self._hold(slot, self._array(slot)[_at(slot, slice(length))])

    def reorder(self, rows: Sequence[int]) -> None:
        """Hold some of the sequences, in that order."""
        for slot in self._slots:
            if slot.batch_axis is not None:
                shared = slot.heads if slot.dims[slot.batch_axis] == "batch_heads" else 1
                entries = [row * shared + head for row in rows for head in range(shared)]
                self._hold(slot, self._array(slot).take(entries, slot.batch_axis))

    def _join(self, slot: Slot, entries: Array, length: int) -> None:
        """Make the next past of a slot of the past and what was returned."""
        axis = slot.length_axis or 0
        count = entries.shape[axis]
        if slot.carry == "write":
            self._array(slot)[_at(slot, slice(length, length + count))] = entries
        elif slot.carry == "append":
            self._hold(slot, np.concatenate([self._array(slot), entries], axis))
        elif slot.carry == "shift":
            self._hold(slot, np.concatenate([self._array(slot)[_at(slot, slice(count, None))], entries], axis))
        else:  # drop-oldest
            self._hold(slot, entries[_at(slot, slice(1, None))])

    def _array(self, slot: Slot) -> Array:
        if slot.past not in self._arrays:
            return np.asarray(self.values[slot.past].numpy())
        return self._arrays[slot.past]

    def _hold(self, slot: Slot, array: Array) -> None:
        array = np.ascontiguousarray(array) if array.ndim else array
        self.values[slot.past] = as_value(array)
        if slot.is_copied:
            self._arrays[slot.past] = array


def _at(slot: Slot, part: slice) -> tuple[Any, ...]:
    """The index of a part of the entries."""
    return (*[slice(None)] * (slot.length_axis or 0), part)
