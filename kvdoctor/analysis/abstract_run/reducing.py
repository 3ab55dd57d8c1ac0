"""Operators that reduce, accumulate or normalize along an axis, in an abstract run.

A mean over a collapsed axis cannot be the number itself: a vector minus its mean, or divided by its length, would lose
all that it holds. `blend` stands for the mean: what is normalized by it stays bounded and still tells inputs apart.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from kvdoctor.analysis.abstract_run.arithmetic import combine, sigmoid
from kvdoctor.analysis.abstract_run.reading import Reading
from kvdoctor.analysis.abstract_run.values import MOST_ELEMENTS, UNKNOWN, Abstract, size_of, unknown
from kvdoctor.decode.calls import Array
from kvdoctor.model.node_sizes import AxisOf


def blend(values: Array) -> Array:
    """What stands for the mean over a collapsed axis.

    The wave keeps differences alive from one normalization to the next, and is slow enough for rounding not to grow.
    """
    found: Array = values * (1 + 0.5 * np.sin(3 * np.log1p(np.abs(values)))) + 0.3
    return found


def _reduce(r: Reading) -> Abstract:
    value, plan, data = r.at(0), r.plan(), r.at(0).data
    if value.shape is None or plan is None:
        return UNKNOWN
    sizes, target = plan[0]
    kept = {size.at for size in sizes if isinstance(size, AxisOf)}
    gone = tuple(at for at in range(len(value.shape)) if at not in kept)
    if not gone and value.shape:
        return value
    if data is None:
        return Abstract(target)
    collapsed = not value.exact and any(data.shape[at] != value.shape[at] for at in gone)
    if value.exact:
        data = value.array() if size_of(value.shape) <= MOST_ELEMENTS else data
    found = _reduce_numbers(data, r.kind, gone, collapsed)
    if found is None:
        return Abstract(target)
    return Abstract(target, found if len(target) == found.ndim else found.squeeze(gone), value.exact)


EXTREMES: dict[str, Any] = {"ReduceMax": np.max, "ReduceMin": np.min}


def _reduce_numbers(data: Array, kind: str, gone: tuple[int, ...], collapsed: bool) -> Array | None:
    empty = any(data.shape[at] == 0 for at in gone)
    if kind in EXTREMES:
        return None if empty else np.asarray(EXTREMES[kind](data, axis=gone, keepdims=True))
    if kind == "ReduceProd":
        return None if collapsed else np.asarray(data.prod(axis=gone, keepdims=True, dtype=data.dtype))
    if kind == "ReduceMean":
        if empty:
            return None
        mean = np.asarray(data.mean(axis=gone, keepdims=True))
        return blend(mean) if collapsed else mean
    if kind == "ReduceSum":
        total = data.sum(axis=gone, keepdims=True, dtype=data.dtype if data.dtype.kind != "b" else np.int64)
        return np.asarray(total)
    squares = np.asarray((data * data).sum(axis=gone, keepdims=True))
    squares = blend(squares) if collapsed else squares
    return np.sqrt(squares) if kind == "ReduceL2" else squares


def _cumsum(r: Reading) -> Abstract:
    value, axis = r.at(0), r.ints(1)
    if value.shape is None or value.data is None or axis is None:
        return unknown(value.shape)
    data = value.array() if value.exact else value.data
    at = axis[0] % len(value.shape)
    if data.shape[at] != value.shape[at]:
        return unknown(value.shape)
    turned = bool(r.number("reverse", 0))
    data = np.flip(data, at) if turned else data
    found = np.cumsum(data, axis=at, dtype=data.dtype)
    found = found - data if r.number("exclusive", 0) else found
    return Abstract(value.shape, np.flip(found, at) if turned else found, value.exact)


def softmax(value: Abstract, axis: int) -> Abstract:
    """A softmax; over a collapsed axis a bounded function stands for it."""
    if value.shape is None or value.data is None:
        return unknown(value.shape)
    axis %= max(len(value.shape), 1)
    data = np.asarray(value.data, np.float64)
    if 0 in value.shape:
        return Abstract(value.shape, np.zeros(value.shape))
    if data.shape[axis] == 1 and value.shape[axis] > 1:
        return Abstract(value.shape, sigmoid(data) if not value.exact else data * 0 + 1 / value.shape[axis])
    raised = np.exp(data - data.max(axis=axis, keepdims=True))
    return Abstract(value.shape, raised / raised.sum(axis=axis, keepdims=True))


def _softmax(r: Reading) -> Abstract:
    found = softmax(r.at(0), r.number("axis", -1))
    if r.kind == "LogSoftmax" and found.data is not None:
        found.data = np.log(found.data)
    return found


def normalize(value: Abstract, centered: bool) -> Abstract:
    """A normalization over the last axis: LayerNormalization, or by the root mean square alone."""
    data = value.data
    if data is None or value.shape is None:
        return unknown(value.shape)
    collapsed = data.shape[-1] != value.shape[-1]

    def mean(x: Array) -> Array:
        found = np.asarray(x.mean(axis=-1, keepdims=True)) if x.shape[-1] != 1 else x
        return blend(found) if collapsed else found

    off = data - mean(data) if centered else data
    return Abstract(value.shape, off / np.sqrt(mean(off * off) + 1e-6))


def _norm(centered: bool, skips: bool = False) -> Callable[[Reading], Abstract | list[Abstract]]:
    def compute(r: Reading) -> Abstract | list[Abstract]:
        value, first = r.at(0), 1
        if skips:
            value, first = combine([value, r.at(1)], np.add), 2
        # Skip...: input, skip, gamma, beta (not in the simplified one), bias
        bias = (first + 2 if centered else first + 1) if skips else None
        if bias is not None and r.has(bias):
            value = combine([value, r.at(bias)], np.add)
        found = normalize(value, centered)
        if r.has(first):
            found = combine([found, r.at(first)], np.multiply)
        if centered and r.has(first + 1):
            found = combine([found, r.at(first + 1)], np.add)
        return [found, UNKNOWN, UNKNOWN, value] if skips else found

    return compute


def _argmax(r: Reading) -> Abstract:
    value, plan = r.at(0), r.plan()
    if value.shape is None or plan is None:
        return UNKNOWN
    axis = r.number("axis", 0) % max(len(value.shape), 1)
    shape = plan[0][1]
    numbers = value.numbers
    if numbers is None or not numbers.shape[axis]:
        return Abstract(shape)
    pick = np.argmax if r.kind == "ArgMax" else np.argmin
    turned = np.flip(numbers, axis) if r.number("select_last_index", 0) else numbers
    found = pick(turned, axis=axis)
    found = numbers.shape[axis] - 1 - found if r.number("select_last_index", 0) else found
    return Abstract(shape, np.asarray(found, np.int64).reshape(shape), exact=True)


REDUCING: dict[str, Callable[[Reading], Abstract | list[Abstract]]] = {
    **dict.fromkeys(
        ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceSumSquare"), _reduce
    ),
    "CumSum": _cumsum,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "LayerNormalization": _norm(True),
    "SimplifiedLayerNormalization": _norm(False),
    "RMSNormalization": _norm(False),
    "SkipLayerNormalization": _norm(True, skips=True),
    "SkipSimplifiedLayerNormalization": _norm(False, skips=True),
    "ArgMax": _argmax,
    "ArgMin": _argmax,
}
