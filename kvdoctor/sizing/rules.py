"""What operators make of the axes and numbers that come in (ONNX operator schemas): one function for each kind.

A rule that does not know says so: what is unknown binds nothing, and a run will show it.
"""

from collections.abc import Callable

from kvdoctor.sizing.broadcast import broadcast, elementwise, joined_with
from kvdoctor.sizing.integers import NUMBERS
from kvdoctor.sizing.known import UNKNOWN, Dims, Known
from kvdoctor.sizing.reshapes import Size, aligned, given
from kvdoctor.sizing.terms import Term, product, whole
from kvdoctor.sizing.walk import Reading, Reshaped

Rule = Callable[[Reading], list[Known]]

LIKE_FIRST = {
    *("Relu", "Sqrt", "Reciprocal", "Exp", "Log", "Neg", "Abs", "Erf", "Tanh", "Sigmoid", "Softmax", "LogSoftmax"),
    *("LayerNormalization", "SimplifiedLayerNormalization", "RMSNormalization", "Cos", "Sin", "Floor", "Ceil", "Round"),
    *("Not", "IsNaN", "IsInf", "CumSum", "Trilu", "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "Softplus", "LeakyRelu"),
    *("HardSigmoid", "Elu", "Selu", "Clip", "Sign", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
    *("ScatterND", "ScatterElements", "RotaryEmbedding", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization"),
    *("Cast", "CastLike", "Identity", "Dropout", "RandomNormalLike", "Mish", "Silu", "Swish", "TensorScatter"),
    "Bernoulli",
}
ELEMENTWISE = {
    *("Add", "Sub", "Mul", "Div", "Pow", "Mod", "Where", "And", "Or", "Xor", "Equal", "Less", "LessOrEqual", "Greater"),
    *("GreaterOrEqual", "Min", "Max", "Sum", "Mean", "PRelu", "BitShift", "BitwiseAnd", "BitwiseOr"),
}
REDUCING = {"ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL2", "ReduceSumSquare"}
PASSING = {"Cast", "Identity"}
"""Those whose result is the same constant still."""


def made(reading: Reading) -> list[Known]:
    """What is known of each output of a node."""
    node = reading.node
    rule = _RULES.get(node.op_type)
    found: list[Known]
    if node.op_type in ELEMENTWISE:
        found = elementwise(reading)
    elif node.op_type in LIKE_FIRST:
        first = reading.at(0)
        found = [Known(first.shape, table=first.table if node.op_type in PASSING else None)]
    elif node.op_type in REDUCING:
        found = _reduced(reading)
    elif rule is not None:
        found = rule(reading)
    else:
        found = []
    numbers = NUMBERS.get(node.op_type)
    if numbers is not None and found:
        values, others = numbers(reading)
        found[0] = Known(found[0].shape, values, others, table=found[0].table)
    return [*found, *[UNKNOWN] * (len(node.output) - len(found))]


def _matmul(r: Reading) -> list[Known]:
    left, right = r.at(0).shape, r.at(1).shape
    if left is None or right is None or min(len(left), len(right)) < 2:
        return []
    joined_with(r, left[-1], right[-2])
    return [Known((*broadcast(r, [left[:-2], right[:-2]]), left[-2], right[-1]))]


def _gemm(r: Reading) -> list[Known]:
    left, right = r.at(0).shape, r.at(1).shape
    if left is None or right is None or (len(left), len(right)) != (2, 2):
        return []
    turned = r.number("transA", 0), r.number("transB", 0)
    return [Known((left[1 if turned[0] else 0], right[0 if turned[1] else 1]))]


def _packed_matmul(r: Reading) -> list[Known]:
    """MatMulNBits: the columns are an attribute."""
    left = r.at(0).shape
    return [Known((*left[:-1], whole(r.number("N", 0))))] if left else []


def _transpose(r: Reading) -> list[Known]:
    first = r.at(0)
    if first.shape is None:
        return []
    order = r.numbers("perm", 9) or tuple(reversed(range(len(first.shape))))
    if sorted(order) != list(range(len(first.shape))):
        return []
    return [Known(tuple(first.shape[i] for i in order), table=first.table)]


def _reshape(r: Reading) -> list[Known]:
    data, target = r.at(0), r.at(1)
    choices = [choice for choice in (target.numbers, *target.others) if choice is not None]
    if data.shape is None or not choices:
        return [Known((None,) * len(target.numbers))] if target.numbers is not None else []
    made = [shape for choice in choices if (shape := _reshaped(r, data.shape, choice)) is not None]
    return [Known(made[0], table=data.table)] if made else [Known((None,) * len(choices[0]))]


def _reshaped(r: Reading, into: Dims, target: Dims) -> Dims | None:
    """The axes behind a Reshape; entries that must be another length are bound to it."""
    opened = tuple(None if term is None else r.ledger.open(term) for term in target)
    axes = tuple(r.ledger.real(term) for term in into if term is not None)
    entries = tuple(r.ledger.real(term) for term in opened if term is not None)
    if len(axes) != len(into) or len(entries) != len(opened):
        return None
    size, allowzero = r.ledger.size, bool(r.number("allowzero", 0))
    filled = given(axes, entries, allowzero)
    if filled is None:
        r.clash("an axis is copied that is not there")
        return None
    said, guess = list(filled[0]), filled[1]
    held = _holds(axes, said, guess, size)
    if held is not None:
        _note(r, axes, held, entries)
        return held
    if guess is not None:
        total, rest = size(product(axes)), size(product(said))
        if not rest or total % rest:
            r.clash(f"{rest} elements do not divide {total}", *axes, *entries)
            return None
        said[guess] = whole(total // rest)
    out = aligned(axes, tuple(said), guess, size)
    if out is None:
        r.clash(
            f"what {list(map(str, entries))} stands for cannot be told for axes of {list(map(str, axes))}",
            *axes,
            *entries,
        )
        return None
    for at, term in enumerate(out):
        mine = opened[at]
        said_so = at == guess or mine is None or entries[at] == term or entries[at].number == 0
        if not said_so and mine is not None and r.ledger.agree(mine, term) is None:
            r.clash(f"entry {at} is {entries[at]} and must be {term}", *axes, *entries)
    _note(r, axes, out, entries)
    return out


def _holds(axes: tuple[Term, ...], said: list[Term], guess: int | None, size: Size) -> tuple[Term, ...] | None:
    """The axes behind a Reshape whose target holds at every length as it is: nothing in it stands for a length."""
    total = product(axes)
    if guess is None:
        return tuple(said) if product(said) == total else None
    numbers = {entry.number for at, entry in enumerate(said) if at != guess}
    quotient = total.divided(product(said))
    if quotient is None or any(axis.symbols and size(axis) in numbers for axis in axes):
        return None
    return (*said[:guess], quotient, *said[guess + 1 :])


def _note(r: Reading, axes: tuple[Term, ...], out: tuple[Term, ...], entries: tuple[Term, ...]) -> None:
    before = r.walk.reshapes.get(id(r.node))
    r.walk.reshapes[id(r.node)] = Reshaped(r.node, axes, out, (*(before.said if before else ()), entries))


def _expand(r: Reading) -> list[Known]:
    data, target = r.at(0), r.at(1).numbers
    if data.shape is None or target is None:
        return []
    r.walk.expanded[id(r.node)] = data.shape
    return [Known(tuple(broadcast(r, [data.shape, target])), table=data.table)]


def _concat(r: Reading) -> list[Known]:
    shapes = [known.shape for known in r.inputs if known is not None]
    ranks = {len(shape) for shape in shapes if shape is not None}
    if len(ranks) != 1:
        return []
    rank = ranks.pop()
    joined = r.number("axis", 0) % max(rank, 1)
    dims: list[Term | None] = []
    for axis in range(rank):
        column = [shape[axis] if shape is not None else None for shape in shapes]
        if axis == joined:
            dims.append(None if None in column else _sum([term for term in column if term is not None]))
            continue
        told = [term for term in column if term is not None]
        for other in told[1:]:
            joined_with(r, told[0], other)
        dims.append(next((term for term in told if r.ledger.real(term).symbols), told[0] if told else None))
    return [Known(tuple(dims))]


def _sum(terms: list[Term]) -> Term:
    found = whole(0)
    for term in terms:
        found = found + term
    return found


def _gather(r: Reading) -> list[Known]:
    data, picks = r.at(0).shape, r.at(1).shape
    if data is None or picks is None or not data:
        return []
    axis = r.number("axis", 0) % len(data)
    return [Known((*data[:axis], *picks, *data[axis + 1 :]))]


def _gather_elements(r: Reading) -> list[Known]:
    return [Known(r.at(1).shape)]


def _gather_nd(r: Reading) -> list[Known]:
    data, picks = r.at(0).shape, r.at(1).shape
    if data is None or not picks or picks[-1] is None or r.number("batch_dims", 0):
        return []
    deep = r.ledger.real(picks[-1]).number
    return [Known((*picks[:-1], *data[deep:]))] if deep is not None else []


def _slice(r: Reading) -> list[Known]:
    data = r.at(0)
    starts, ends = r.at(1).numbers, r.at(2).numbers
    if data.shape is None:
        return []
    axes = r.ledger.known_numbers(r.at(3)) if r.has(3) else tuple(range(len(starts or ())))
    steps = r.ledger.known_numbers(r.at(4)) if r.has(4) else (1,) * len(axes or ())
    if starts is None or ends is None or axes is None or steps is None:
        return [Known((None,) * len(data.shape))]
    dims = list(data.shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=False):
        dims[axis % len(dims)] = _cut(r, dims[axis % len(dims)], (start, end, step))
    return [Known(tuple(dims), table=data.table)]


def _cut(r: Reading, axis: Term | None, cut: tuple[Term | None, Term | None, int]) -> Term | None:
    """The length of a slice; it is taken to lie within the axis wherever it does so in the file as it is."""
    start, end, step = cut
    if axis is None or start is None or end is None or step != 1:
        return None
    size, real = r.ledger.size, r.ledger.real
    length, first, last = size(real(axis)), size(real(start)), size(real(end))
    low = whole(0) if first <= -length else axis + start if first < 0 else start
    if not r.at(0).fed and real(end).symbols and real(axis).number is not None and r.at(0).numbers is None:
        r.walk.ends.append((r.node, length))
    high = axis if last >= length and real(end).number is not None else axis + end if last < 0 else end
    return high - low if size(real(high)) >= size(real(low)) else None


def _split(r: Reading) -> list[Known]:
    data = r.at(0).shape
    if data is None:
        return []
    axis, count = r.number("axis", 0) % max(len(data), 1), len(r.node.output)
    parts: tuple[Term | None, ...] | None = r.at(1).numbers if r.has(1) else None
    listed = r.attribute("split")
    if listed is not None:
        parts = tuple(whole(n) for n in listed.ints)
    if parts is None:
        whole_axis = data[axis]
        equal = None if whole_axis is None else r.ledger.real(whole_axis).divided(whole(count))
        parts = (equal,) * count
    return [Known((*data[:axis], part, *data[axis + 1 :])) for part in parts]


def _squeeze(r: Reading) -> list[Known]:
    data = r.at(0)
    if data.shape is None:
        return []
    axes = r.numbers("axes", 1)
    if axes is None:
        axes = tuple(i for i, d in enumerate(data.shape) if d is not None and r.ledger.real(d).number == 1)
    gone = {axis % max(len(data.shape), 1) for axis in axes}
    return [Known(tuple(d for i, d in enumerate(data.shape) if i not in gone), table=data.table)]


def _unsqueeze(r: Reading) -> list[Known]:
    data, axes = r.at(0), r.numbers("axes", 1)
    if data.shape is None or axes is None:
        return []
    rank = len(data.shape) + len(axes)
    new, rest = {axis % rank for axis in axes}, iter(data.shape)
    return [Known(tuple(whole(1) if i in new else next(rest, None) for i in range(rank)), table=data.table)]


def _shape(r: Reading) -> list[Known]:
    data = r.at(0).shape
    return [Known((whole(len(data[slice(*_ends(r, len(data)))])),))] if data is not None else []


def _ends(r: Reading, rank: int) -> tuple[int, int]:
    return r.number("start", 0), r.number("end", rank)


def _scalar(r: Reading) -> list[Known]:  # noqa: ARG001 - the form of a rule
    return [Known(())]


def _sized(r: Reading) -> list[Known]:
    return [Known(r.at(0).numbers)]


def _range(r: Reading) -> list[Known]:
    start, end, step = (r.at(i).numbers for i in range(3))
    known = start and end and step and start[0] is not None and end[0] is not None and step[0] is not None
    if not known or start is None or end is None or step is None:
        return [Known((None,))]
    if r.ledger.known_numbers(r.at(2)) != (1,) or start[0] is None or end[0] is None:
        return [Known((None,))]
    return [Known((end[0] - start[0],))]


def _reduced(r: Reading) -> list[Known]:
    data = r.at(0).shape
    if data is None:
        return []
    axes = r.numbers("axes", 1)
    if axes is None:
        axes = tuple(range(len(data))) if not r.number("noop_with_empty_axes", 0) else ()
    gone = {axis % max(len(data), 1) for axis in axes}
    keep = r.number("keepdims", 1)
    return [Known(tuple(whole(1) if i in gone else d for i, d in enumerate(data) if keep or i not in gone))]


def _tile(r: Reading) -> list[Known]:
    data, times = r.at(0).shape, r.at(1).numbers
    if data is None or times is None or len(data) != len(times):
        return []
    return [Known(tuple(None if a is None or b is None else a * b for a, b in zip(data, times, strict=True)))]


def _einsum(r: Reading) -> list[Known]:
    equation = r.attribute("equation")
    text = equation.s.decode("utf-8", "replace").replace(" ", "") if equation is not None else ""
    terms, arrow, result = text.partition("->")
    if "." in text or not arrow:
        return []
    sizes = dict[str, Term | None]()
    for term, known in zip(terms.split(","), r.inputs, strict=False):
        for letter, dim in zip(term, (known.shape if known is not None else None) or (), strict=False):
            if sizes.get(letter) is not None and dim is not None:
                joined_with(r, sizes[letter], dim)
            if dim is not None and (sizes.get(letter) is None or r.ledger.real(dim).symbols):
                sizes[letter] = dim
    return [Known(tuple(sizes.get(letter) for letter in result))]


def _flatten(r: Reading) -> list[Known]:
    data = r.at(0).shape
    if data is None or None in data:
        return []
    dims = [dim for dim in data if dim is not None]
    axis = r.number("axis", 1)
    axis += len(dims) if axis < 0 else 0
    return [Known((product(dims[:axis]), product(dims[axis:])))]


def _argmax(r: Reading) -> list[Known]:
    data = r.at(0).shape
    if data is None:
        return []
    gone, keep = r.number("axis", 0) % max(len(data), 1), r.number("keepdims", 1)
    return [Known(tuple(whole(1) if i == gone else d for i, d in enumerate(data) if keep or i != gone))]


_RULES: dict[str, Rule] = {
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "Gemm": _gemm,
    "MatMulNBits": _packed_matmul,
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Expand": _expand,
    "Concat": _concat,
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "GatherND": _gather_nd,
    "Slice": _slice,
    "Split": _split,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Shape": _shape,
    "Size": _scalar,
    "ConstantOfShape": _sized,
    "Range": _range,
    "Tile": _tile,
    "Einsum": _einsum,
    "Flatten": _flatten,
    "ArgMax": _argmax,
    "ArgMin": _argmax,
}
