"""Values that are combined along axes: products, softmax, sums and norms.

What is combined along an axis that is the same in every call stays uniform. Along all tokens it does so where the
weights of later ones are exactly 0: after a softmax over scores of which a mask hides all later tokens.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from kvdoctor.analysis.proof.call import Made, Reading, is_calm, known, refuse
from kvdoctor.analysis.proof.masks import FINITE, hides_later, is_hiding, is_plain
from kvdoctor.analysis.proof.shaping import transposed
from kvdoctor.analysis.proof.types import (
    MEASURED,
    ROWS,
    UNKNOWN,
    ZEROS,
    Axis,
    Linear,
    Mark,
    Region,
    Term,
    Type,
    axis_of,
    constant_of,
    is_fixed,
    linear_of,
    number,
    plain_number,
    size_of,
)
from kvdoctor.model.operator_axes import read_equation
from kvdoctor.model.operators import has, operators_with

NOTHING: tuple[Mark, Mark, Mark] = (0.0, None, None)
"""What is known of weights after a softmax over scores that a mask hides in part."""
AXIS_IS_LAST = 13
"""The opset from which on a softmax without an axis is along the last one."""


def _may_combine(call: Reading, taken: Type, at: int, made: Sequence[Axis]) -> bool:
    """Whether elements along an axis, counted from the end, may be combined: later tokens weigh nothing.

    `made` are the axes of the result: of one new token none is later, but there are later ones than each in the past.
    """
    shape = taken.shape or ()
    axis = shape[at]
    if not _pads_nothing(call, taken, at):
        return False
    if is_fixed(axis):
        return True
    if axis != (call.lengths.total,):
        return False
    if call.lengths.single:
        return (call.lengths.total,) not in made
    for (row, column), marks in taken.regions:
        if column == at and marks[0] == 0.0 and shape[row] == (call.lengths.new,):
            return True
    return False


def _pads_nothing(call: Reading, taken: Type, at: int) -> bool:
    """Whether all padding along an axis is 0, where there may be any."""
    padded = call.lengths.is_padded((taken.shape or ())[at])
    return not padded or any(marks[0] == 0.0 for _, marks in _find_padding(taken, at))


def _find_padding(taken: Type, at: int) -> list[Region]:
    """What is known of the padding of each row along an axis, and of all else."""
    shape = taken.shape or ()
    return [one for one in taken.regions if one[0][1] == at and shape[one[0][0]] == (ROWS,)]


def _is_one(gone: Iterable[Axis]) -> bool:
    """Whether at most one axis that goes counts tokens: a row that goes hides nothing of a column."""
    return sum(not is_fixed(axis) for axis in gone) <= 1


def multiply(call: Reading) -> Made:
    """MatMul, FusedMatMul of ONNX Runtime and Gemm: rows of the first times columns of the second, and a bias."""
    refuse(call.node.number("transBatchA", 0) or call.node.number("transBatchB", 0))
    taken, orders = list(call.given), [list(range(len(call.axes(at, 1)))) for at in (0, 1)]
    for at, name in enumerate(("transA", "transB")):
        if call.node.number(name, 0) and len(order := orders[at]) > 1:
            order[-2:] = order[:-3:-1]
            taken[at] = transposed(call, taken[at], order)
    left, right = (known(one.shape) for one in taken[:2])
    rows, columns = left[-2:-1], right[-1:] if len(right) > 1 else ()
    inner = right[-2] if columns else right[0]
    shape = (*call.broadcast([Type("f", left[:-2]), Type("f", right[:-2])]), *rows, *columns)
    refuse(left[-1] != inner)
    # Where the weights are the second factor, the keys are its rows, the queries its columns.
    swapped = bool(columns) and not call.lengths.single and not is_fixed(inner)
    combined = _may_combine(call, taken[0], -1, shape) or (swapped and _may_combine(call, taken[1], -2, shape))
    lengths, times = (call.lengths.canonical(left), call.lengths.canonical(right)), call.node.real("alpha", 1.0)
    how = ("product", lengths, times, tuple(map(tuple, orders))) if len(taken) == len(orders) else None
    return Made(_made(call, combined, shape, taken).type, how)


def measure(call: Reading) -> list[Made]:
    """DynamicQuantizeLinear: integers in units of a scale of this call, but for rounding; the scale; its zero point."""
    taken, node = call.input(0), call.node.index
    refuse(not call.is_uniform(0))
    kinds = (("i", taken.shape, MEASURED), ("f", (), 1), ("i", (), ZEROS))
    found = [Type(kind, shape, calm=True, last=taken.last, scale=(node, power)) for kind, shape, power in kinds]
    return [Made(one, ("measured", at)) for at, one in enumerate(found)]


def integer_product(call: Reading) -> Made:
    """MatMulInteger: integers of one scale, without their zero point, times weights."""
    taken, zeros = call.input(0), call.input(2)
    node, form = known(taken.scale)
    refuse(form != MEASURED or zeros.scale != (node, ZEROS) or not call.is_uniform(1))
    refuse(call.has(3) and not call.is_uniform(3))
    call.inputs = [replace(taken, scale=None, uniform=True), call.input(1)]
    made = multiply(call).type
    return Made(replace(made, kind="i", uniform=False, scale=(node, -1)) if made.uniform else UNKNOWN)


def _made(call: Reading, combined: bool, shape: tuple[Axis, ...], taken: Sequence[Type], kind: str = "f") -> Made:
    """A value that was combined rightly, or one of which nothing but its axes is known."""
    return Made(call.opaque(shape, taken, kind, True) if combined else Type(kind, shape))


def rows_times_weights(call: Reading) -> Made:
    """Products with packed weights: the last axis of the first input with weights of the graph."""
    shape = call.axes(0, 1)
    refuse(not all(map(call.lengths.is_even, shape[-1:])) or not call.node.number("N", 0))
    return Made(call.opaque((*shape[:-1], axis_of(number(call.node.number("N", 0)))), call.given, "f", True))


def einsum(call: Reading) -> Made:
    """Einsum of two inputs without repeated letters."""
    letters, result = read_equation(call.node.attribute("equation"))
    taken = call.given
    refuse(not result or len(letters) != len(taken))
    sizes: dict[str, Axis] = {}
    for names, one in zip(letters, taken, strict=True):
        if one.shape is None or len(names) != len(one.shape) or len(set(names)) != len(names):
            return Made(UNKNOWN)
        for name, axis in zip(names, one.shape, strict=True):
            sizes[name] = sizes.get(name) or axis
            refuse(axis and axis != sizes[name])
    shape = [sizes[name] for name in result if name in sizes]
    gone = [name for name in sizes if name not in result]
    combined = _is_one(sizes[name] for name in gone) and all(
        any(
            name in names and _may_combine(call, one, names.index(name) - len(names), shape)
            for names, one in zip(letters, taken, strict=True)
        )
        for name in gone
    )
    return _made(call, combined, tuple(shape), taken)


def softmax(call: Reading) -> Made:
    """Softmax: over all tokens only where a mask hides the later ones, and leaves the token itself."""
    taken, shape = call.input(0), call.axes(0, 1)
    rank = len(shape)
    first = call.node.attribute("axis") is None and call.lengths.opset < AXIS_IS_LAST
    if first or (call.node.number("axis", -1) + 1) % rank:
        return Made(Type("f", shape))
    # What a proof without padding says of all tokens, it does not say of encoder states: that some are seen.
    found = [one for one in _find_padding(taken, -1) if not is_fixed(shape[-1]) or is_plain(one[1][1])]
    padding = [(pair, NOTHING) for pair, marks in found if is_hiding(marks[0])]
    if call.lengths.is_padded(shape[-1]) and not padding:
        return Made(Type("f", shape))
    if is_fixed(shape[-1]):
        return Made(call.opaque(shape, call.given, "f", True, tuple(padding)))
    rows = [row - rank for row, one in enumerate(shape[:-1]) if one == (call.lengths.new,)]
    hidden = [row for row in rows if hides_later(taken, row, -1, call.lengths.single, bool(padding))]
    alone = call.lengths.single and len(rows) == 1 and is_calm(taken)
    if shape[-1] != (call.lengths.total,) or not (hidden or alone):
        return Made(Type("f", shape))
    regions: tuple[Region, ...] = (*(((row, -1), NOTHING) for row in hidden), *padding)
    return Made(call.opaque(shape, call.given, "f", True, regions))


EXTREMES = {"ReduceMax": True, "ReduceMin": False}
"""Whether the largest element is taken."""


def reduce(call: Reading) -> Made:
    """Reductions: along axes that are the same in all calls; of numbers that count, the extreme."""
    taken, whole, axes = call.input(0), call.axes(0), call.numbers(1, "axes")
    rank, every = len(whole), not call.has(1) and not call.node.number("noop_with_empty_axes", 0)
    axes = list(range(rank)) if axes is None and every else axes
    if not axes:  # none listed: all, or none at all
        return Made(UNKNOWN)
    gone, keeps = {axis % rank for axis in axes}, call.node.number("keepdims", 1)
    shape = tuple(() if at in gone else axis for at, axis in enumerate(whole) if at not in gone or keeps)
    linear = linear_of(taken)
    found = _reduce_linear(call, linear, gone, whole) if linear is not None else None
    if found is not None:
        return Made(Type(taken.kind, shape, linear=(found, ())))
    # A sum may leave out what a mask makes 0, an extreme or a mean may not.
    summed = taken if has(call.node.op, "sum") else replace(taken, regions=())
    combined = _is_one(whole[at] for at in gone) and all(_may_combine(call, summed, at - rank, shape) for at in gone)
    return _made(call, combined, shape, [taken], taken.kind)


def _reduce_linear(call: Reading, linear: Linear, gone: set[int], shape: Sequence[Axis]) -> Term | None:
    """The sum of equal numbers, or the extreme of numbers that count up along the axes that go."""
    start, factors = linear
    if not isinstance(start, Term) or any(at % len(shape) not in gone for at, _ in factors):
        return None
    if has(call.node.op, "sum") and not factors:
        for at in gone:
            start = start * size_of(shape[at])
        return start
    if call.node.op in EXTREMES:
        for at, factor in factors:
            if (factor > 0) == EXTREMES[call.node.op]:
                start = start + (size_of(shape[at]) - number(1)).times(factor)
        return start
    return None


def accumulate(call: Reading) -> Made:
    """CumSum from the first element on: a number that counts, or a sum of all tokens so far."""
    taken, shape, axes = call.input(0), call.axes(0), call.numbers(1)
    if not axes or call.node.number("reverse", 0):
        return Made(UNKNOWN)
    rank, exclusive = len(shape), call.node.number("exclusive", 0)
    at = axes[0] % rank - rank
    value = constant_of(taken)
    by = value.number if isinstance(value, Term) else None
    if by is not None:
        start = number(0 if exclusive else by)
        return Made(Type(taken.kind, shape, linear=(start, ((at, by),) if by else ())))
    whole = call.lengths.is_even(shape[at]) or (shape[at] == (call.lengths.total,) and _pads_nothing(call, taken, at))
    return Made(call.opaque(shape, [taken], taken.kind) if whole else Type(taken.kind, shape))


def triangle(call: Reading) -> Made:
    """Trilu: elements on one side of a diagonal become 0."""
    taken, shape, lengths = call.input(0), call.axes(0, 2), call.lengths
    diagonal = known(call.input(1).items) if call.has(1) else (number(0),)
    first, second = lengths.offset(shape[-2]), lengths.offset(shape[-1])
    mixed = lengths.is_padded(shape[-2]) != lengths.is_padded(shape[-1])
    if first is None or second is None or mixed or not lengths.is_uniform(taken):
        return Made(Type(taken.kind, shape))
    # The absolute position of the column minus that of the row is the diagonal, plus so much.
    value = diagonal[0] + second - first
    upper = bool(call.node.number("upper", 1))
    marks: list[Mark] = []
    for least, most in ((1, None), (0, 0), (None, -1)):
        under = most is not None and lengths.at_least(value - number(most + 1), 0)
        over = least is not None and lengths.at_least(number(least - 1) - value, 0)
        stays = least is not None and lengths.at_least(number(least) - value, 0)
        stays = stays if upper else most is not None and lengths.at_least(value - number(most), 0)
        parts = dict(taken.regions).get((-2, -1))
        mark = plain_number(constant_of(taken)) if parts is None else parts[len(marks)]
        finite = FINITE if isinstance(mark, float) and math.isfinite(mark) else None
        marks.append(mark if stays else 0.0 if (under if upper else over) else finite)
    regions: tuple[Region, ...] = (((-2, -1), (marks[0], marks[1], marks[2])),)
    if value.number is None:
        return Made(Type(taken.kind, shape, regions=regions))
    return Made(call.opaque(shape, [taken], taken.kind, is_calm(taken), regions), ("triangle", upper, value.number))


def normalize(call: Reading) -> Made:
    """Norms along the last axes."""
    shape = call.axes(0, 1)
    first = call.node.number("axis", -1) % len(shape)
    return _made(call, all(map(call.lengths.is_even, shape[first:])), shape, call.given)


def skip_normalize(call: Reading) -> list[Made]:
    """A norm of a sum, which is an output as well."""
    shape = call.broadcast(call.given[:2])
    refuse(any(one.shape is None for one in call.given) or not all(map(call.lengths.is_even, shape[-1:])))
    made = call.opaque(shape, call.given, "f", True)
    return [Made(made, None if not at else ("output", at)) for at in range(len(call.node.outputs))]


def as_first(call: Reading) -> Made:
    """Scales and zero points next to values: what is computed has the axes of the first input."""
    taken = call.input(0)
    kind = "f" if has(call.node.op, "dequantize") else "i"
    return Made(call.opaque(taken.shape, call.given, kind, is_calm(taken)))


def dropout(call: Reading) -> Made:
    """Dropout outside of training."""
    training = call.has(2) and constant_of(call.input(2)) is not number(0)
    return Made(UNKNOWN) if training or len(call.node.outputs) > 1 else Made(call.input(0), 0)


RULES: dict[str, Callable[[Reading], Made | list[Made]]] = {
    **dict.fromkeys(("MatMul", "FusedMatMul", "Gemm"), multiply),
    "DynamicQuantizeLinear": measure,
    "MatMulInteger": integer_product,
    "MatMulNBits": rows_times_weights,
    "Einsum": einsum,
    "Softmax": softmax,
    "CumSum": accumulate,
    "Trilu": triangle,
    "Dropout": dropout,
    "QuantizeLinear": as_first,
    "DequantizeLinear": as_first,
    **dict.fromkeys(("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization"), normalize),
    **dict.fromkeys(("SkipLayerNormalization", "SkipSimplifiedLayerNormalization"), skip_normalize),
    **dict.fromkeys(operators_with("reduce"), reduce),
}
