"""Products of matrices, in an abstract run: a collapsed axis is multiplied, not summed."""

from collections.abc import Callable
from functools import lru_cache

import numpy as np

from kvdoctor.analysis.abstract_run.arithmetic import combine
from kvdoctor.analysis.abstract_run.reading import PLANS, Reading
from kvdoctor.analysis.abstract_run.shaping import broadcast_shapes
from kvdoctor.analysis.abstract_run.values import (
    MOST_ELEMENTS,
    UNKNOWN,
    Abstract,
    CannotRun,
    as_weight,
    number_for,
    size_of,
)
from kvdoctor.model.operator_axes import read_equation


def multiply(left: Abstract, right: Abstract) -> Abstract:
    """A product of matrices (ONNX MatMul); a collapsed axis is multiplied, not summed.

    Raises:
        CannotRun: the inner sizes differ.
    """
    one, other = left.shape, right.shape
    if one is None or other is None or not one or not other:
        return UNKNOWN
    shape, count = _plan_product(one, other)
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


@lru_cache(PLANS)
def _plan_product(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """The shape of a product of matrices, and its number of elements.

    Raises:
        CannotRun: the inner sizes differ.
    """
    if one[-1] != (other[-2] if len(other) > 1 else other[0]):
        raise CannotRun(f"{list(one)} and {list(other)} cannot be multiplied")
    front = broadcast_shapes(one[:-2], other[:-2])
    shape = (*front, *one[-2:-1], *(other[-1:] if len(other) > 1 else ()))
    return shape, size_of(shape)


def _matmul(r: Reading) -> Abstract:
    return multiply(as_weight(r.at(0)), as_weight(r.at(1)))


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
    values, plan = [r.at(index) for index in range(len(r.inputs))], r.plan()
    if plan is None:
        return UNKNOWN
    shape, spread = plan[0][1], dict[str, int]()
    for term, value in zip(terms, values, strict=True):
        if value.data is None:
            return Abstract(shape)
        for letter, width in zip(term, value.data.shape, strict=True):
            spread[letter] = max(spread.get(letter, 1), width)
    operands = []
    for term, value in zip(terms, values, strict=True):
        wide = [spread[letter] for letter in term]
        if size_of(wide) > MOST_ELEMENTS:
            return Abstract(shape)
        operands.append(np.broadcast_to(np.asarray(value.data, np.float64), wide))
    if size_of(spread[letter] for letter in result if letter in spread) > MOST_ELEMENTS:
        return Abstract(shape)
    return Abstract(shape, np.einsum(f"{','.join(terms)}->{result}", *operands, optimize=len(operands) > 2))


def _matmul_bits(r: Reading) -> Abstract:
    value = r.at(0)
    if value.shape is None:
        return UNKNOWN
    shape = (*value.shape[:-1], r.number("N", 0))
    if value.data is None:
        return Abstract(shape)
    key = r.at(1).key or "weight"
    data = value.data.mean(axis=-1, keepdims=True) * number_for(key)
    return Abstract(shape, data)


PRODUCTS: dict[str, Callable[[Reading], Abstract | list[Abstract]]] = {
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "Gemm": _gemm,
    "MatMulNBits": _matmul_bits,
    "Einsum": _einsum,
}
