"""Operators that compute element by element, and those that pass values on, in an abstract run.

A mask may differ from head to head: then one number is broadcast along the heads of other values.
"""

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import numpy as np

from kvdoctor.analysis.abstract_run.shaping import broadcast_shapes
from kvdoctor.analysis.abstract_run.values import (
    IS_EXACT,
    MOST_ELEMENTS,
    UNKNOWN,
    Abstract,
    CannotRun,
    Reading,
    Rule,
    as_weight,
    exactly,
    known,
    size_of,
)
from kvdoctor.decode.calls import NUMPY_TYPES, Array
from kvdoctor.model.proto import TensorProto
from kvdoctor.model.view import ELEMENT_TYPES

Compute = Callable[..., Array]


def combine(values: Sequence[Abstract], compute: Compute) -> Abstract:
    """A function of elements, with broadcasting.

    Raises:
        CannotRun: the shapes do not agree.
    """
    shapes = [value.shape for value in values if value.shape is not None]
    if len(shapes) < len(values):
        return UNKNOWN
    shape = broadcast_shapes(*shapes)
    count = size_of(shape)
    numbers = [value.data for value in values if value.data is not None]
    if len(numbers) < len(values):
        return Abstract(shape)
    exact = all(map(IS_EXACT, values))
    if not count:
        return Abstract(shape, np.zeros(shape, compute(*(np.ones(1, n.dtype) for n in numbers)).dtype), exact)
    if not exact and differs_by_head(values, shape):
        return Abstract(shape)
    if count > MOST_ELEMENTS and size_of(np.broadcast_shapes(*(n.shape for n in numbers))) > MOST_ELEMENTS:
        return Abstract(shape)
    return Abstract(shape, np.asarray(compute(*numbers)), exact)


def _divide(left: Array, right: Array) -> Array:
    if left.dtype.kind in "iu" and right.dtype.kind in "iu":
        if not right.all():
            raise CannotRun("an integer is divided by 0")
        exact = np.abs(left).max(initial=0) < 1 << 52
        return np.asarray(np.trunc(left / right), left.dtype) if exact else left // right
    return np.divide(left, right)


def _mod(r: Reading) -> Abstract:
    divide = np.fmod if r.number("fmod", 0) else np.mod
    right = r.at(1).data
    if right is not None and right.dtype.kind in "iu" and not right.all():
        raise CannotRun("an integer is divided by 0")
    return combine([r.at(0), r.at(1)], divide)


def _erf(x: Array) -> Array:
    found: Array = np.tanh(1.128379 * x + 0.100277 * x**3)
    return found


def sigmoid(x: Array) -> Array:
    """The logistic function, by a tanh: that does not overflow."""
    found: Array = 0.5 * (1 + np.tanh(0.5 * x))
    return found


def _gelu(x: Array) -> Array:
    found: Array = 0.5 * x * (1 + _erf(x / np.sqrt(2)))
    return found


ELEMENTWISE: dict[str, Any] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": _divide,
    "Pow": lambda left, right: np.power(left, right if left.dtype.kind == "f" else right.astype(left.dtype)),
    "Where": lambda chosen, left, right: np.where(chosen.astype(bool), left, right),
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "Not": np.logical_not,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Neg": np.negative,
    "Abs": np.abs,
    "Sqrt": np.sqrt,
    "Reciprocal": np.reciprocal,
    "Exp": np.exp,
    "Log": np.log,
    "Sin": np.sin,
    "Cos": np.cos,
    "Tanh": np.tanh,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Round": np.round,
    "Sign": np.sign,
    "IsNaN": np.isnan,
    "IsInf": np.isinf,
    "Erf": _erf,
    "Sigmoid": sigmoid,
    "Relu": lambda x: np.maximum(x, 0),
    "LeakyRelu": lambda x: np.where(x < 0, 0.01 * x, x),
    "Softplus": lambda x: np.logaddexp(0, x),
    "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "Gelu": _gelu,
    "FastGelu": _gelu,
    "BiasGelu": lambda x, *b: _gelu(x + sum(b)),
    "QuickGelu": lambda x: x * sigmoid(1.702 * x),
    "Silu": lambda x: x * sigmoid(x),
    "Swish": lambda x: x * sigmoid(x),
    "Mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "Elu": lambda x: np.where(x < 0, np.expm1(np.minimum(x, 0)), x),
    "BitwiseAnd": np.bitwise_and,
    "BitwiseOr": np.bitwise_or,
    "BitwiseNot": np.invert,
}
EXTREMES: dict[str, Compute] = {"Min": np.minimum, "Max": np.maximum, "Sum": np.add}


def _clip(r: Reading) -> Abstract:
    found = r.at(0)
    low = r.at(1) if r.has(1) else Abstract((), np.array(r.real("min", -np.inf)), True)
    high = r.at(2) if r.has(2) else Abstract((), np.array(r.real("max", np.inf)), True)
    kind = found.data.dtype if found.data is not None else None
    clipped = combine([combine([found, low], np.maximum), high], np.minimum)
    if kind is not None and clipped.data is not None and kind.kind in "iu":
        clipped.data = clipped.data.astype(kind)
    return clipped


def _cast(r: Reading) -> Abstract:
    value, to = r.at(0), r.number("to", TensorProto.FLOAT)
    if value.data is None:
        return Abstract(value.shape, key=value.key)
    kind = NUMPY_TYPES.get(ELEMENT_TYPES.get(to, ""))
    if value.exact and kind is not None:
        with np.errstate(all="ignore"):
            return Abstract(value.shape, value.data.astype(kind), True, value.key)
    data = value.data
    if to == TensorProto.BOOL:
        return Abstract(value.shape, data != 0)
    if kind is not None and np.issubdtype(kind, np.integer) and data.dtype.kind == "f":
        return Abstract(value.shape, data, key=value.key)
    return Abstract(value.shape, data.astype(np.float64), key=value.key)


def _cast_like(r: Reading) -> Abstract:
    value, like = r.at(0), r.at(1)
    if value.exact and value.data is not None and like.exact and like.data is not None:
        return Abstract(value.shape, value.data.astype(like.data.dtype), True, value.key)
    return value


def _trilu(r: Reading) -> Abstract:
    value, offset = r.at(0), r.ints(1) if r.has(1) else (0,)
    shape, data = known(value.shape), known(value.data, value.shape)
    if not offset or size_of(shape) > MOST_ELEMENTS:
        return Abstract(shape)
    cut = np.triu if r.number("upper", 1) else np.tril
    return Abstract(shape, cut(np.broadcast_to(data, (*data.shape[:-2], *shape[-2:])), offset[0]), value.exact)


def _dropout(r: Reading) -> Abstract:
    value, mode = r.at(0), r.at(2).numbers if r.has(2) else None
    ratio = r.at(1).numbers if r.has(1) else None
    active = mode is not None and bool(mode.all()) and (ratio is None or bool(ratio.all()))
    if not active or value.data is None:
        return value
    return Abstract(value.shape, value.data * r.random.uniform(0.5, 1.5, value.data.shape))


def _random_like(r: Reading) -> Abstract:
    shape, width = known(r.at(0).shape if r.kind != "RandomNormal" else r.listed("shape")), r.at(0).data
    sizes = width.shape if width is not None else (1,) * len(shape)
    return Abstract(shape, r.random.standard_normal(sizes) * r.real("scale", 1.0))


COMPUTING: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, lambda r: combine(r.all(), ELEMENTWISE[r.kind])),
    **dict.fromkeys(EXTREMES, lambda r: reduce(lambda one, other: combine([one, other], EXTREMES[r.kind]), r.all())),
    **dict.fromkeys(("RandomNormalLike", "RandomUniformLike", "RandomNormal"), _random_like),
    "Mod": _mod,
    "Clip": _clip,
    "Cast": _cast,
    "CastLike": _cast_like,
    "Identity": lambda r: r.at(0),
    "Trilu": _trilu,
    "Dropout": _dropout,
    "QuantizeLinear": lambda r: as_weight(r.at(0)),
    "DequantizeLinear": lambda r: as_weight(r.at(0)),
    "DynamicQuantizeLinear": lambda r: [r.at(0), exactly(1.0), exactly(np.uint8(0))],
    "NonZero": lambda r: exactly(np.array(np.nonzero(known(r.at(0).numbers)), np.int64)),
}


def differs_by_head(values: Sequence[Abstract], shape: tuple[int, ...]) -> bool:
    """Whether exact numbers differ along an axis of heads, along which another value is broadcast.

    Heads whose windows differ see the same in a short sequence: there they would be one number again, and in a longer
    one as many as there are heads. Heads stand before the rows and columns of the scores.
    """
    for value in values:
        data = value.data
        if not value.exact or data is None or data.ndim < 3 or data.size < 2:
            continue
        for back in range(3, data.ndim + 1):
            if data.shape[-back] > 1 and any(
                other.data is not None
                and other.data.ndim >= back
                and other.data.shape[-back] == 1 < (other.shape or shape)[-back]
                and not other.exact
                for other in values
            ):
                first = data[(slice(None),) * (data.ndim - back) + (slice(0, 1),)]
                if not bool((data == first).all()):
                    return True
    return False
