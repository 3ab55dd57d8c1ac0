"""Where the axes of a node's outputs come from, and the numbers of short tensors: one rule for each operator.

Shapes, positions and bounds are computed with such numbers. Source: ONNX operator schemas.
"""

from collections.abc import Callable, Iterable, Sequence
from math import prod

from kvdoctor.model.node_sizes import (
    MOST_NUMBERS,
    VARIES,
    AxisOf,
    Computed,
    How,
    NodeSizes,
    NumberOf,
    Size,
    Sizes,
    SizesUnknown,
    ask,
)
from kvdoctor.model.operators import AxisRule, has, operator_of
from kvdoctor.model.proto import AttributeProto
from kvdoctor.model.view import integers

Rule = Callable[[NodeSizes], "list[Sizes]"]
"""Gives the sizes of each output, of as many as it knows."""


def axes_of(node: NodeSizes) -> list[Sizes] | None:
    """The axes of each output of a node; None where no rule knows them."""
    return ask(KINDS.get(operator_of(node.op).axes) or OWN.get(node.op), node)


def broadcast(*sides: Sizes) -> Sizes:
    """Sizes that are broadcast, from the last axis on (ONNX, multidirectional broadcasting)."""
    rank = max(map(len, sides), default=0)
    columns = (tuple(side[at - rank] for side in sides if rank - at <= len(side)) for at in range(rank))
    return tuple(column[0] if len(column) == 1 else Computed("broadcast", column) for column in columns)


def _matmul(n: NodeSizes) -> list[Sizes]:
    left, right = n.axes(0), n.axes(1)
    if not left or not right:
        raise SizesUnknown
    n.required.append(Computed("equal", (left[-1], right[max(len(right) - 2, 0)])))
    return [(*broadcast(left[:-2], right[:-2]), *left[-2:-1], *(right[-1:] if len(right) > 1 else ()))]


def _gemm(n: NodeSizes) -> list[Sizes]:
    left, right = n.axes(0), n.axes(1)
    if (len(left), len(right)) != (2, 2):
        raise SizesUnknown
    rows, inner = reversed(left) if n.number("transA", 0) else left
    other, columns = reversed(right) if n.number("transB", 0) else right
    n.required.append(Computed("equal", (inner, other)))
    return [(rows, columns)]


def read_equation(attribute: AttributeProto | None) -> tuple[list[str], str]:
    """The letters of the axes of each operand of an Einsum, and those of its result; none where it has an ellipsis."""
    text = attribute.s.decode("utf-8", "replace").replace(" ", "") if attribute is not None else "."
    terms, arrow, result = text.partition("->")
    if not arrow:  # the letters that occur once, sorted
        result = "".join(sorted(letter for letter in set(terms) - {","} if terms.count(letter) == 1))
    return ([], "") if "." in text else (terms.split(","), result)


def _einsum(n: NodeSizes) -> list[Sizes]:
    terms, result = read_equation(n.attribute("equation"))
    if not terms:
        raise SizesUnknown
    places: dict[str, list[Size]] = {}
    for index, term in enumerate(terms):
        for at, letter in enumerate(term):
            places.setdefault(letter, []).append(AxisOf(index, at))
    groups = {letter: Computed("letter", tuple(same)) for letter, same in places.items()}
    n.required += groups.values()
    return [tuple(groups.get(letter) for letter in result)]


def _transpose(n: NodeSizes) -> list[Sizes]:
    axes = n.axes(0)
    order = n.known(len(n.inputs), "perm") or tuple(reversed(range(len(axes))))
    if sorted(order) != list(range(len(axes))):
        raise SizesUnknown
    return [tuple(axes[at] for at in order)]


def _reshape(n: NodeSizes) -> list[Sizes]:
    """A 0 copies the axis at its place unless `allowzero` is set, a -1 is what the others leave."""
    wanted, copies = n.target(1), not n.number("allowzero", 0)
    numbers = n.numbers(1) or (None,) * len(wanted)
    sizes: list[Size] = [AxisOf(0, at) if number == 0 and copies else wanted[at] for at, number in enumerate(numbers)]
    if -1 in numbers:
        at = list(numbers).index(-1)
        sizes[at] = _rest(n, numbers, at, [*sizes[:at], *sizes[at + 1 :]]) if n.shape(0) is not None else None
    return [tuple(sizes)]


def _rest(n: NodeSizes, numbers: Sequence[int | None], at: int, others: list[Size]) -> Size:
    """The axis of a -1: an axis of the data, where as many elements stand before and within both."""
    data = n.shape(0) or ()
    shape = [size for size in data if size is not None]
    known = [shape[i] if n_ == 0 and i < len(shape) else n_ for i, n_ in enumerate(numbers) if n_ is not None]
    if len(shape) == len(data) and len(known) == len(numbers) and (left := -prod(known)) > 0:
        size, before = prod(shape) // left, prod(known[:at])
        for axis, own in enumerate(shape):
            if own == size and prod(shape[:axis]) == before:
                return AxisOf(0, axis)
    return Computed("quotient", (Computed("product", n.axes(0)), *others))


def _flatten(n: NodeSizes) -> list[Sizes]:
    axes, at = n.axes(0), n.number("axis", 1)
    at += len(axes) if at < 0 else 0
    return [(Computed("product", axes[:at]), Computed("product", axes[at:]))]


def _concat(n: NodeSizes) -> list[Sizes]:
    present = [index for index in range(len(n.inputs)) if n.has(index)]
    ranks = {len(shape) for index in present if (shape := n.shape(index)) is not None}
    if len(ranks) != 1:
        raise SizesUnknown
    rank = ranks.pop()
    joined = n.axis(0, rank)
    columns = (tuple(AxisOf(index, at) for index in present) for at in range(rank))
    return [tuple(Computed("sum" if at == joined else "equal", column) for at, column in enumerate(columns))]


def _gather(n: NodeSizes) -> list[Sizes]:
    data, picks = n.axes(0), n.axes(1)
    if not data:
        raise SizesUnknown
    at = n.axis(0, len(data))
    taken: Sizes = (Computed("part", (data[at], picks[0])),) if len(picks) == 1 else picks
    return [(*data[:at], *taken, *data[at + 1 :])]


def _gather_nd(n: NodeSizes) -> list[Sizes]:
    data, picks = n.axes(0), n.axes(1)
    deep = (n.shape(1) or (None,))[-1]
    if deep is None or deep == VARIES:
        raise SizesUnknown
    return [(*picks[:-1], *data[n.number("batch_dims", 0) + deep :])]


def _slice(n: NodeSizes) -> list[Sizes]:
    sizes: list[Size] = list(n.axes(0))
    try:
        axes, steps = n.known(3, "axes"), n.known(4)
        listed = [n.attribute(name) for name in ("starts", "ends")]  # attributes up to opset 9, inputs since
        starts, ends = (tuple(one.ints) if one is not None else n.target(at) for at, one in enumerate(listed, 1))
    except SizesUnknown:
        return [tuple(Computed("cut", (size, None, None, None)) for size in sizes)]
    axes = tuple(range(len(starts))) if axes is None else axes
    for start, end, axis, step in zip(starts, ends, axes, steps or (1,) * len(axes), strict=False):
        sizes[axis] = Computed("cut", (sizes[axis], start, end, step))
    return [tuple(sizes)]


def _split(n: NodeSizes) -> list[Sizes]:
    axes, listed = n.axes(0), n.attribute("split")
    at = n.axis(0, len(axes))
    length, given = n.value(axes[at]), tuple(listed.ints) if listed is not None else ()
    if not given and n.has(1):
        given = tuple(NumberOf(1, part) for part in range(n.outputs))
    elif not given and length is not None and length > 0 and length % n.outputs:
        each = -(-length // n.outputs)
        given = (*[each] * (n.outputs - 1), length - each * (n.outputs - 1))  # the last part is smaller
    even = Computed("quotient", (axes[at], n.outputs))
    sizes = [Computed("part", (axes[at], size)) for size in given] or [even] * n.outputs
    return [(*axes[:at], size, *axes[at + 1 :]) for size in sizes]


def _squeeze(n: NodeSizes) -> list[Sizes]:
    axes, named = n.axes(0), n.known(1, "axes")
    if named is None and None in (shape := n.shape(0) or ()):
        raise SizesUnknown
    if named is None:
        named = tuple(at for at, size in enumerate(shape) if size == 1)
    gone = {axis % max(len(axes), 1) for axis in named}
    return [tuple(axis for axis in axes if axis.at not in gone)]


def _unsqueeze(n: NodeSizes) -> list[Sizes]:
    named, rest = n.known(1, "axes"), iter(n.axes(0))
    if named is None:
        raise SizesUnknown
    rank = len(n.axes(0)) + len(named)
    new = {axis % rank for axis in named}
    return [tuple(1 if at in new else next(rest, None) for at in range(rank))]


def _reducing(n: NodeSizes) -> list[Sizes]:
    """Reduces some axes, all where it names none."""
    axes, named = n.axes(0), n.known(1, "axes")
    if not named and not n.number("noop_with_empty_axes", 0):
        named = tuple(range(len(axes)))
    return [_without(n, axes, named or ())]


def _without(n: NodeSizes, axes: tuple[AxisOf, ...], named: Iterable[int]) -> Sizes:
    """The axes after some are reduced, to 1 with `keepdims`."""
    gone, keep = {axis % max(len(axes), 1) for axis in named}, n.number("keepdims", 1)
    return tuple(1 if axis.at in gone else axis for axis in axes if keep or axis.at not in gone)


def _topk(n: NodeSizes) -> list[Sizes]:
    axes = n.axes(0)
    at = n.axis(-1, len(axes))
    return [(*axes[:at], Computed("part", (axes[at], NumberOf(1, 0))), *axes[at + 1 :])] * 2


def _pad(n: NodeSizes) -> list[Sizes]:
    axes, listed = n.axes(0), n.attribute("pads")
    pads: Sizes = tuple(listed.ints) if listed is not None else n.target(1)
    named = n.known(3) or tuple(range(len(axes)))
    sizes: list[Size] = list(axes)
    for index, at in enumerate(named):
        sizes[at] = Computed("sum", (sizes[at], pads[index], pads[index + len(named)]))
    return [tuple(sizes)]


KINDS: dict[AxisRule, Rule] = {
    "first": lambda n: [n.axes(0)],
    "broadcast": lambda n: [broadcast(*(n.axes(index) for index in range(len(n.inputs)) if n.has(index)))],
    "reduce": _reducing,
}

OWN: dict[str, Rule] = {
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "Gemm": _gemm,
    "MatMulNBits": lambda n: [(*n.axes(0)[:-1], n.number("N", 0))],
    "Einsum": _einsum,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Expand": lambda n: [broadcast(n.axes(0), n.target(1))],
    "Tile": lambda n: [tuple(Computed("product", pair) for pair in zip(n.axes(0), n.target(1), strict=False))],
    "Concat": _concat,
    "Gather": _gather,
    "GatherElements": lambda n: [tuple(Computed("part", (axis, AxisOf(1, axis.at))) for axis in n.axes(0))],
    "GatherND": _gather_nd,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "ArgMax": lambda n: [_without(n, n.axes(0), [n.number("axis", 0)])],
    "ArgMin": lambda n: [_without(n, n.axes(0), [n.number("axis", 0)])],
    "TopK": _topk,
    "Pad": _pad,
    "Shape": lambda n: [(len(n.axes(0)[n.number("start", 0) : n.number("end", len(n.axes(0)))]),)],
    "Size": lambda _: [()],
    "ConstantOfShape": lambda n: [n.target(0)],
    "Range": lambda _: [(Computed("range", tuple(NumberOf(index, 0) for index in range(3))),)],
}
"""The rules of operators that are the only ones of their kind."""


NumberRule = Callable[[NodeSizes], Sizes]
"""Gives the numbers of the first output."""


def numbers_of(node: NodeSizes) -> Sizes | None:
    """The numbers of the output of a node; None where no rule knows them."""
    same = has(node.op, "copy", "cast", "view")
    return ask((lambda n: n.elements(0)) if same else NUMBERS.get(node.op), node)


def _concat_numbers(n: NodeSizes) -> Sizes:
    if any(len(n.shape(index) or (None,)) != 1 for index in range(len(n.inputs))):
        raise SizesUnknown
    return tuple(number for index in range(len(n.inputs)) for number in n.elements(index))


def _slice_numbers(n: NodeSizes) -> Sizes:
    starts, ends, steps = n.known(1, "starts"), n.known(2, "ends"), n.known(4)
    axes, sizes = n.known(3, "axes"), _sizes_of_elements(n)
    if starts is None or ends is None:
        raise SizesUnknown
    axes = tuple(range(len(starts))) if axes is None else axes
    cuts = zip(axes, starts, ends, steps or (1,) * len(axes), strict=False)
    return _picked(n, {axis % len(sizes): range(sizes[axis])[start:end:step] for axis, start, end, step in cuts})


def _sizes_of_elements(n: NodeSizes) -> tuple[int, ...]:
    """The sizes of the first input, whose numbers are listed."""
    count, shape = len(n.elements(0)), n.shape(0) or ()
    sizes = (count,) if len(shape) == 1 else tuple(size or 0 for size in shape)
    if prod(sizes) != count or not sizes:
        raise SizesUnknown
    return sizes


def _picked(n: NodeSizes, chosen: dict[int, Sequence[int]]) -> Sizes:
    """The numbers of the first input at some places along some axes."""
    row, sizes = n.elements(0), _sizes_of_elements(n)
    places: list[int | None] = [0]
    for axis, size in enumerate(sizes):
        along = [at + size * (at < 0) if -size <= at < size else None for at in chosen.get(axis, range(size))]
        places = [None if one is None or at is None else one * size + at for one in places for at in along]
    return tuple(None if at is None else row[at] for at in places)


def _combined(how: How) -> NumberRule:
    """Numbers that are computed one by one from those of all inputs."""
    return lambda n: _one_by_one(how, [n.elements(index) for index in range(len(n.inputs))])


def _one_by_one(how: How, rows: Sequence[Sizes]) -> Sizes:
    count = max(map(len, rows), default=0)
    if any(len(row) not in (1, count) for row in rows):
        raise SizesUnknown
    return tuple(Computed(how, tuple(row[at % len(row)] for row in rows)) for at in range(count))


def _filled_numbers(n: NodeSizes) -> Sizes:
    counts, value = n.known(0), n.attribute("value")
    number = (0,) if value is None else integers(value.t)
    if counts is None or number is None or len(number) != 1 or prod(counts) > MOST_NUMBERS:
        raise SizesUnknown
    return number * prod(counts)


def _repeated_numbers(n: NodeSizes) -> Sizes:
    """An Expand of one number, or of a row to its own length."""
    row, target = n.elements(0), n.known(1)
    if target is None or len(target) > 1 or prod(target) > MOST_NUMBERS or len(row) not in (1, *target):
        raise SizesUnknown
    return tuple(row[at % len(row)] for at in range(max(len(row), *target)))


NUMBERS: dict[str, NumberRule] = {
    "Shape": lambda n: n.axes(0)[n.number("start", 0) : n.number("end", len(n.axes(0)))],
    "Size": lambda n: (Computed("product", n.axes(0)),),
    "Expand": _repeated_numbers,
    "Concat": _concat_numbers,
    "Gather": lambda n: _picked(n, {n.axis(0, len(n.axes(0))): n.known(1) or ()}),
    "Slice": _slice_numbers,
    "Where": lambda n: _one_by_one(
        "choice", (n.elements(0) if n.numbers(0) is not None else (None,), n.elements(1), n.elements(2))
    ),
    "Add": _combined("sum"),
    "Sub": _combined("difference"),
    "Mul": _combined("product"),
    "Div": _combined("quotient"),
    "Min": _combined("min"),
    "Max": _combined("max"),
    "Equal": _combined("same"),
    "Neg": lambda n: tuple(Computed("product", (-1, number)) for number in n.elements(0)),
    "ReduceProd": lambda n: (Computed("product", n.elements(0)),),
    "ConstantOfShape": _filled_numbers,
}
