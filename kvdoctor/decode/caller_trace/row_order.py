"""Finds the order in which a caller fed the rows of its cache, from samples of them: beams are picked and repeated."""

from collections.abc import Mapping

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.caller_trace.recorded import TraceTensor
from kvdoctor.decode.calls import Array, Past, as_array, take_sample

CLOSE = 0.2
"""Standard deviations within which a sample is that of a row: float16 rounds by a tenth of that, other rows are off by
more than one."""


def find_row_order(contract: CacheContract, fed: Mapping[str, TraceTensor], past: Past) -> tuple[int, ...] | None:
    """For each row that was fed the row of `past` that it is; None where a row is none of them.

    A row that is where it was counts as that, whatever other rows are equal to it.
    """
    errors: Array | None = None
    for slot in contract.slots:
        tensor = fed.get(slot.past)
        if tensor is None or tensor.sample is None or slot.past not in past or "batch" not in slot.axes:
            continue
        found = _measure_rows(tensor, as_array(past[slot.past]), slot.axes.index("batch"))
        if found is not None and (errors is None or errors.shape == found.shape):
            errors = found if errors is None else np.fmax(errors, found)
    if errors is None:
        return ()
    order = []
    for row, to in enumerate(np.nan_to_num(errors, nan=0.0, posinf=np.inf)):
        best = row if row < len(to) and to[row] <= CLOSE else int(to.argmin())
        if not to[best] <= CLOSE:
            return None
        order.append(best)
    return tuple(order)


def _measure_rows(tensor: TraceTensor, value: Array, axis: int) -> Array | None:
    """How far each fed row is from each row of a value, float[fed rows, rows]; NaN where the sample has none of it."""
    rest = [size for at, size in enumerate(tensor.shape) if at != axis]
    if tensor.sample is None or len(tensor.shape) != value.ndim or 0 in tensor.shape or 0 in value.shape:
        return None
    if rest != [size for at, size in enumerate(value.shape) if at != axis]:
        return None
    places = take_sample(np.arange(np.prod(tensor.shape)).reshape(tensor.shape)).astype(np.int64)
    at = [*np.unravel_index(places, tensor.shape)]
    fed_rows = at[axis]
    width = max(float(value.astype(np.float64).std()), 1e-12)
    errors = np.full((tensor.shape[axis], value.shape[axis]), np.nan)
    for row in range(value.shape[axis]):
        at[axis] = np.full_like(places, row)
        off = np.abs(tensor.sample - value[tuple(at)].astype(np.float64)) / width
        for fed in np.unique(fed_rows):
            errors[fed, row] = off[fed_rows == fed].max()
    return errors
