"""The values of inputs: each rule of the contract as a function that makes an array in the shape of the input."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from .contract import Dims, Input

Array = np.ndarray[Any, Any]
NUMPY = {"float": "float32", "double": "float64"}
"""Element types that numpy has another name for."""


@dataclass
class Step:
    """What the values of a call are made from.

    `tokens` int64[batch, new] are the new ones; `sizes` has what each axis counts. `padding` is the number of entries
    on the left of each sequence that are none of its tokens, empty where there are none. `mask` is what the caller says
    of the source, int[batch, encoder_input].
    """

    tokens: Array
    sizes: dict[str, int]
    padding: Sequence[int] = ()
    mask: Array | None = None


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


def shape_of(dims: Dims, sizes: dict[str, int]) -> tuple[int, ...]:
    """A shape; an axis that the program does not count has size 1."""
    return tuple([dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in dims])


class Value:
    """The value of an input that is made from counts, tokens and padding.

    Its memory is used again while the shape stays: the runtime has read it when the next call begins.
    """

    def __init__(self, one: Input) -> None:
        self._input = one
        self._fill = FILLS[one.rule]
        self._stays = one.rule == "number" and one.count == "constant"
        self._array: Array = np.empty(0)
        self._value: ort.OrtValue | None = None

    def make(self, step: Step) -> ort.OrtValue:
        """The value in a call."""
        shape = shape_of(self._input.dims, step.sizes)
        if self._value is None or self._array.shape != shape:
            self._array = np.empty(shape, numpy_type(self._input.dtype))
            self._value = as_value(self._array)
        elif self._stays:
            return self._value
        self._fill(self._input, self._array, step)
        return self._value


def _tokens(_one: Input, array: Array, step: Step) -> None:
    array[...] = step.tokens if array.ndim > 1 else step.tokens.reshape(-1)


def _token_and_position(_one: Input, array: Array, step: Step) -> None:
    array[:, 0] = step.tokens[:, 0]
    array[:, 1] = step.sizes["past"]


def _mask(one: Input, array: Array, step: Step) -> None:
    """1 for tokens, 0 for padding on the left and for what is after the last token; the opposite in a padding mask."""
    shown = 0 if one.rule == "padding-mask" else 1
    array[..., : step.sizes["total"]] = shown
    array[..., step.sizes["total"] :] = 1 - shown
    if array.ndim > 1:
        for row, padded in enumerate(step.padding):
            array[row, ..., :padded] = 1 - shown


def _window_mask(_one: Input, array: Array, step: Step) -> None:
    """1 for tokens, of which the last one is in the last column; 0 before them."""
    first = array.shape[-1] - step.sizes["total"]
    array[...] = 0
    array[..., max(first, 0) :] = 1
    if array.ndim > 1:
        for row, padded in enumerate(step.padding):
            array[row, ..., : max(first + padded, 0)] = 0


def _causal_mask(one: Input, array: Array, step: Step) -> None:
    """A row for each query, which sees itself and what is before it."""
    queries, columns = array.shape[-2:]
    first = 0 if one.dims[-2] == "total" else step.sizes["past"]
    oldest = max(columns - step.sizes["total"], 0) if one.from_right else 0  # the newest is in the last column
    last = columns - step.sizes["total"] if one.from_right else 0
    array[...] = one.hidden
    for query in range(queries):
        array[..., query, oldest : max(last + first + query + 1, 0)] = one.shown


def _positions(one: Input, array: Array, step: Step) -> None:
    array[...] = np.arange(step.sizes["past"], step.sizes["total"])
    if step.padding and "batch" in one.dims:
        rows = np.moveaxis(array, one.dims.index("batch"), 0)
        for row, padded in enumerate(step.padding):
            rows[row] -= padded
        np.maximum(array, 0, out=array)


def _rows(_one: Input, array: Array, step: Step) -> None:
    array[...] = np.arange(step.sizes["batch"])


def _number(one: Input, array: Array, step: Step) -> None:
    array[...] = one.value if one.count == "constant" else COUNTED[one.count](step.sizes)


COUNTED: dict[str, Callable[[dict[str, int]], int]] = {
    "past": lambda sizes: sizes["past"],
    "total": lambda sizes: sizes["total"],
    "last": lambda sizes: sizes["total"] - 1,
    "new": lambda sizes: sizes["new"],
    "last-new": lambda sizes: sizes["new"] - 1,
    "batch": lambda sizes: sizes["batch"],
    "cached": lambda sizes: int(sizes["past"] > 0),
    "first": lambda sizes: int(sizes["past"] == 0),
    "encoder_input": lambda sizes: sizes["encoder_input"],
}


def _encoder_mask(_one: Input, array: Array, step: Step) -> None:
    """The caller's mask; ones where the encoder shortens what it reads: all its states count."""
    array[...] = step.mask if step.mask is not None and step.mask.shape == array.shape else 1


FILLS: dict[str, Callable[[Input, Array, Step], None]] = {
    "tokens": _tokens,
    "token-and-position": _token_and_position,
    "attention-mask": _mask,
    "padding-mask": _mask,
    "window-mask": _window_mask,
    "causal-mask": _causal_mask,
    "positions": _positions,
    "rows": _rows,
    "number": _number,
    "encoder-mask": _encoder_mask,
}
"""By rule: writes the value into an array of the input's shape and type."""
