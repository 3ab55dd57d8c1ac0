"""The values of inputs: each rule of the contract as a function that fills an array in the shape of the input."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnxruntime as ort

from .contract import ContractError, Dims, Input

Array = np.ndarray[Any, Any]
NUMPY = {"float": "float32", "double": "float64"}
"""Element types that numpy has another name for."""
GIVEN = ("embeddings", "encoder-input", "encoder-states")
"""Rules of values that a graph or the caller made."""


@dataclass
class Step:
    """What the values of a call are made from.

    `tokens` int64[batch, new] are the new ones; `sizes` has what each axis and each number counts. `padding` is the
    number of entries on the left of each sequence that are none of its tokens, empty where there are none. `mask` is
    what the caller says of the source, int[batch, encoder_input].
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


def shape_of(dims: Dims, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """A shape; an axis that the program does not count has size 1."""
    return tuple([dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in dims])


class Value:
    """The value of an input that is made from counts, tokens and padding.

    Its memory is used again while the shape stays: the runtime has read it when the next call begins.
    """

    def __init__(self, one: Input) -> None:
        if one.rule not in FILLS:
            raise ContractError(f"input {one.name!r} follows the rule {one.rule!r}, which this program does not know")
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


def _sequences(one: Input, array: Array) -> Array:
    """The array with its sequences on the first axis; none where it has no such axis."""
    return array[:0] if one.batch_axis is None else np.moveaxis(array, one.batch_axis, 0)


def _tokens(_one: Input, array: Array, step: Step) -> None:
    array[...] = step.tokens if array.ndim > 1 else step.tokens.reshape(-1)


def _token_and_position(_one: Input, array: Array, step: Step) -> None:
    array[:, 0] = step.tokens[:, 0]
    array[:, 1] = step.sizes["past"]


def _mask(one: Input, array: Array, step: Step) -> None:
    """The columns of the tokens are seen: in each row all but padding, or those up to the token of the row."""
    total = step.sizes["total"]
    first = array.shape[-1] - total if one.from_right else 0  # the column of the first token
    oldest = max(first, 0)
    array[...] = one.hidden
    if one.rows_from is None:
        array[..., oldest : max(first + total, 0)] = one.shown
        for row, padded in zip(_sequences(one, array), step.padding, strict=False):
            row[..., oldest : max(first + padded, 0)] = one.hidden
    else:
        last = first + step.sizes[one.rows_from]
        for query in range(array.shape[-2]):
            array[..., query, oldest : max(last + query + 1, 0)] = one.shown


def _positions(one: Input, array: Array, step: Step) -> None:
    array[...] = np.arange(step.sizes["past"], step.sizes["total"])
    if step.padding:
        for row, padded in zip(_sequences(one, array), step.padding, strict=False):
            np.subtract(row, padded, out=row)
        np.maximum(array, 0, out=array)


def _rows(_one: Input, array: Array, step: Step) -> None:
    array[...] = np.arange(step.sizes["batch"])


def _number(one: Input, array: Array, step: Step) -> None:
    array[...] = one.value if one.count == "constant" else step.sizes[one.count]


def _encoder_mask(_one: Input, array: Array, step: Step) -> None:
    """The caller's mask; ones where the encoder shortens what it reads: all its states count."""
    array[...] = step.mask if step.mask is not None and step.mask.shape == array.shape else 1


FILLS: dict[str, Callable[[Input, Array, Step], None]] = {
    "tokens": _tokens,
    "token-and-position": _token_and_position,
    "attention-mask": _mask,
    "padding-mask": _mask,
    "window-mask": _mask,
    "causal-mask": _mask,
    "positions": _positions,
    "rows": _rows,
    "number": _number,
    "encoder-mask": _encoder_mask,
}
"""By rule: writes the value into an array of the input's shape and type."""
