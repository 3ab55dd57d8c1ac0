"""Operators that combine numbers along an axis, in an abstract run: products, reductions, norms.

A product multiplies a collapsed axis instead of summing over it.

A mean over a collapsed axis cannot be the number itself: a vector minus its mean, or divided by its length, would lose
all that it holds. `blend` stands for the mean: what is normalized by it stays bounded and still tells inputs apart.
"""

from typing import Any

import numpy as np

from kvdoctor.analysis.abstract_run.arithmetic import combine, sigmoid
from kvdoctor.analysis.abstract_run.shaping import broadcast_shapes
from kvdoctor.analysis.abstract_run.values import (
    MOST_ELEMENTS,
    UNKNOWN,
    Abstract,
    CannotRun,
    Reading,
    Rule,
    as_weight,
    known,
    number_for,
    size_of,
    unknown,
)
from kvdoctor.decode.calls import Array
from kvdoctor.model.node_sizes import AxisOf
from kvdoctor.model.operator_axes import read_equation


def blend(values: Array) -> Array:
    """What stands for the mean over a collapsed axis."""
    found: Array = values * (1 + 0.5 * np.sin(3 * np.log1p(np.abs(values)))) + 0.3
    return found


def _reduce(r: Reading) -> Abstract:
    value, (sizes, target) = r.at(0), known(r.plan())[0]
    shape = known(value.shape)
    kept = {size.at for size in sizes if isinstance(size, AxisOf)}
    gone = tuple(at for at in range(len(shape)) if at not in kept)
    if not gone and shape:
        return value
    data = known(value.data, target)
    collapsed = not value.exact and any(data.shape[at] != shape[at] for at in gone)
    if value.exact:
        data = value.array() if size_of(shape) <= MOST_ELEMENTS else data
    found = known(_reduce_numbers(data, r.kind, gone, collapsed), target)
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
    value, shape = r.at(0), known(r.at(0).shape)
    data, axis = known(value.data, shape), known(r.ints(1), shape)
    data = value.array() if value.exact else data
    at = axis[0] % len(shape)
    if data.shape[at] != shape[at]:
        return Abstract(shape)
    flipped = bool(r.number("reverse", 0))
    data = np.flip(data, at) if flipped else data
    found = np.cumsum(data, axis=at, dtype=data.dtype)
    found = found - data if r.number("exclusive", 0) else found
    return Abstract(shape, np.flip(found, at) if flipped else found, value.exact)


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


def _norm(centered: bool, skips: bool = False) -> Rule:
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
    _, shape = known(r.plan())[0]
    numbers = known(r.at(0).numbers, shape)
    axis = r.number("axis", 0) % max(numbers.ndim, 1)
    if not numbers.shape[axis]:
        return Abstract(shape)
    pick = np.argmax if r.kind == "ArgMax" else np.argmin
    flipped = np.flip(numbers, axis) if r.number("select_last_index", 0) else numbers
    found = pick(flipped, axis=axis)
    found = numbers.shape[axis] - 1 - found if r.number("select_last_index", 0) else found
    return Abstract(shape, np.asarray(found, np.int64).reshape(shape), exact=True)


def multiply(left: Abstract, right: Abstract) -> Abstract:
    """A product of matrices (ONNX MatMul); a collapsed axis is multiplied, not summed.

    Raises:
        CannotRun: the inner sizes differ.
    """
    one, other = left.shape, right.shape
    if one is None or other is None or not one or not other:
        return UNKNOWN
    if one[-1] != (other[-2] if len(other) > 1 else other[0]):
        raise CannotRun(f"{list(one)} and {list(other)} cannot be multiplied")
    shape = (*broadcast_shapes(one[:-2], other[:-2]), *one[-2:-1], *(other[-1:] if len(other) > 1 else ()))
    count = size_of(shape)
    a, b = left.data, right.data
    if a is None or b is None or min(len(one), len(other)) < 2:
        return Abstract(shape)
    if not count:
        return Abstract(shape, np.zeros(shape))
    inner = one[-1]
    if inner == 0:
        return Abstract(shape, np.zeros((1,) * len(shape)))
    if count > MOST_ELEMENTS:
        made = (*np.broadcast_shapes(a.shape[:-2], b.shape[:-2]), a.shape[-2], b.shape[-1])
        if size_of(made) > MOST_ELEMENTS:
            return Abstract(shape)
    if a.shape[-1] == 1 and b.shape[-2] == 1:
        return Abstract(shape, np.asarray(a * b, np.float64))
    sizes = (*a.shape[:-1], inner), (*b.shape[:-2], inner, b.shape[-1])
    if max(map(size_of, sizes)) > MOST_ELEMENTS:
        return Abstract(shape)
    product = np.matmul(
        np.broadcast_to(a, sizes[0]).astype(np.float64), np.broadcast_to(b, sizes[1]).astype(np.float64)
    )
    # A weight that is one number would multiply every feature equally, and a normalized vector sums to nothing.
    return Abstract(shape, product)


def _gemm(r: Reading) -> Abstract:
    left, right = (
        _turn(as_weight(r.at(i))) if r.number(f"trans{n}", 0) else as_weight(r.at(i)) for i, n in enumerate("AB")
    )
    found = multiply(left, right)
    if found.data is not None:
        found.data = found.data * r.real("alpha", 1.0)
    if r.has(2):
        return combine([found, r.at(2)], lambda x, c: x + c * r.real("beta", 1.0))
    return found


def _turn(value: Abstract) -> Abstract:
    if value.shape is None or value.data is None:
        return Abstract(None if value.shape is None else value.shape[::-1], key=value.key)
    return Abstract(value.shape[::-1], value.data.T, value.exact)


def _einsum(r: Reading) -> Abstract:
    terms, result = read_equation(r.attributes.get("equation"))
    (_, shape), spread = known(r.plan())[0], dict[str, int]()
    values = [known(value.data, shape) for value in r.all()]
    for term, data in zip(terms, values, strict=True):
        for letter, width in zip(term, data.shape, strict=True):
            spread[letter] = max(spread.get(letter, 1), width)
    operands = []
    for term, data in zip(terms, values, strict=True):
        wide = [spread[letter] for letter in term]
        if size_of(wide) > MOST_ELEMENTS:
            return Abstract(shape)
        operands.append(np.broadcast_to(np.asarray(data, np.float64), wide))
    if size_of(spread[letter] for letter in result if letter in spread) > MOST_ELEMENTS:
        return Abstract(shape)
    return Abstract(shape, np.einsum(f"{','.join(terms)}->{result}", *operands, optimize=len(operands) > 2))


def _matmul_bits(r: Reading) -> Abstract:
    shape = (*known(r.at(0).shape)[:-1], r.number("N", 0))
    data = known(r.at(0).data, shape).mean(axis=-1, keepdims=True)
    return Abstract(shape, data * number_for(r.at(1).key or "weight"))


COMBINING: dict[str, Rule] = {
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
    **dict.fromkeys(("MatMul", "MatMulInteger"), lambda r: multiply(as_weight(r.at(0)), as_weight(r.at(1)))),
    "Gemm": _gemm,
    "MatMulNBits": _matmul_bits,
    "Einsum": _einsum,
}
