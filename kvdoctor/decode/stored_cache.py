"""A narrower type of a cache: how rows are stored, and how a stored cache is read and compared. numpy only.

A row is what one token and one head has along head_dim. int8 and int4 are symmetric: a row is divided by its scale,
its largest magnitude over 127 or 7, and rounded. Scales are float16, which is 2 bytes for each row, and what is rounded
is divided by the scale as it is stored.
"""

from typing import Any, Literal

import numpy as np

from kvdoctor.choices import CacheType
from kvdoctor.decode.calls import Array
from kvdoctor.records import record

LEVELS = {"int8": 127, "int4": 7}
"""The largest number of steps, either way."""
ZERO_POINT = 8
"""What is added to a 4-bit number, so that two of them make one unsigned byte: the first half of a row lies in the low
bits, the second half in the high ones."""
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 65504.0
"""The smallest positive float16, which a row of zeros has too, and the largest."""
STORABLE = ("self-attention", "cross-attention")
"""The kinds of slots that hold keys and values, which can be stored in a narrower type."""

Granularity = Literal["token", "channel", "head", "tensor"]
"""What shares a scale: a row (one token and head), a channel of a head over all tokens, a head, or a whole tensor."""

GRANULARITIES: tuple[Granularity, ...] = ("token", "channel", "head", "tensor")


@record
class StoredSlot:
    """How a slot is stored in a converted model: the type, the axis of head_dim, and the outputs that have its scales.

    `scales` maps the output that returns the values to the one that returns their scales; it is empty for float16.
    """

    past: str
    kind: CacheType
    axis: int
    scales: dict[str, str]


def row_scales(values: Array, kind: CacheType, axes: tuple[int, ...]) -> Array:
    """The scales of a tensor, float16, with size 1 along the axes that share one."""
    largest = np.abs(values.astype(np.float32)).max(axis=axes, keepdims=True, initial=0)
    scales: Array = np.clip(largest / np.float32(LEVELS[kind]), SMALLEST_SCALE, LARGEST_SCALE).astype(np.float16)
    return scales


def find_scales(values: Array, slot: StoredSlot) -> Array | None:
    """The scale of each row of a slot; None for float16, which has none."""
    return None if slot.kind == "float16" else row_scales(values, slot.kind, (slot.axis,))


def round_values(values: Array, kind: CacheType, scales: Array | None) -> Array:
    """What is read back of values that were stored, in their own type; float16 takes no scales."""
    with np.errstate(over="ignore"):
        if kind == "float16" or scales is None:
            return values.astype(np.float16).astype(values.dtype)
    wide, most = scales.astype(np.float32), LEVELS[kind]
    levels = np.clip(np.rint(values.astype(np.float32) / wide), -most, most)
    rounded: Array = (levels * wide).astype(values.dtype)
    return rounded


HALF_STEP, HALF_ULP = 0.51, 2.0**-11
"""What rounding moves a number by at most: in steps, with the rounding of the product; to float16, as a fraction."""


def measure_drift(pair: tuple[Array, Array], scales: Array | None, length: int, deviation: float) -> float:
    """How far rows that were read are from those that should have been stored, beyond what rounding explains.

    `pair` are the rows as they were read and as they should be, `scales` those of the rows that were read (None for
    float16), `length` the axis of tokens. The root mean square of the worst token, as a fraction of the deviation.
    """
    got, want = (rows.astype(np.float64) for rows in pair)
    step = HALF_ULP * np.abs(want) + SMALLEST_SCALE if scales is None else HALF_STEP * scales.astype(np.float64)
    beyond = np.maximum(np.abs(got - want) - step, 0)
    over = tuple(axis for axis in range(got.ndim) if axis != length)
    worst = float(np.sqrt((beyond**2).mean(axis=over)).max(initial=0))
    return float(f"{worst / deviation:.3g}") if deviation > 0 else float(worst > 0)


def read_stored(stored: Array, scales: Array | None, kind: CacheType, axis: int) -> Array:
    """A stored cache as float32."""
    if kind == "float16" or scales is None:
        return stored.astype(np.float32)
    levels: Any = stored
    if kind == "int4":
        levels = np.concatenate([stored & 15, stored >> 4], axis=axis).astype(np.int8) - ZERO_POINT
    read: Array = levels.astype(np.float32) * scales.astype(np.float32)
    return read
