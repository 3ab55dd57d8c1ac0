"""The axes and numbers that operators return (ONNX operator schemas): one function for each kind of operator.

A rule that does not know its result returns nothing: an unknown size binds no stand-in, and a run will show it.
"""

from collections.abc import Callable, Sequence

from kvdoctor.repair.shapes.facts import UNKNOWN, NodeInputs, TraceCandidate, ValueFacts
from kvdoctor.repair.shapes.number_rules import NUMBERS
from kvdoctor.repair.shapes.reshapes import infer_reshape
from kvdoctor.repair.shapes.terms import Term, product, symbol, whole

Rule = Callable[[NodeInputs], list[ValueFacts]]

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
"""Operators whose result has the values of the same constant."""


def infer_outputs(reading: NodeInputs) -> list[ValueFacts]:
    """The facts on each output of a node."""
    node = reading.node
    rule = _RULES.get(node.op_type)
    found: list[ValueFacts]
    if node.op_type in ELEMENTWISE:
        found = infer_elementwise(reading)
    elif node.op_type in LIKE_FIRST:
        first = reading.at(0)
        found = [ValueFacts(first.shape, table=first.table if node.op_type in PASSING else None)]
    elif node.op_type in REDUCING:
        found = _reduced(reading)
    elif rule is not None:
        found = rule(reading)
    else:
        found = []
    numbers = NUMBERS.get(node.op_type)
    if numbers is not None and found:
        values, others = numbers(reading)
        found[0] = ValueFacts(found[0].shape, values, others, table=found[0].table)
    return [*found, *[UNKNOWN] * (len(node.output) - len(found))]


def _matmul(r: NodeInputs) -> list[ValueFacts]:
    left, right = r.at(0).shape, r.at(1).shape
    if left is None or right is None or min(len(left), len(right)) < 2:
        return []
    require_equal(r, left[-1], right[-2])
    return [ValueFacts((*broadcast(r, [left[:-2], right[:-2]]), left[-2], right[-1]))]


def _gemm(r: NodeInputs) -> list[ValueFacts]:
    left, right = r.at(0).shape, r.at(1).shape
    if left is None or right is None or (len(left), len(right)) != (2, 2):
        return []
    turned = r.number("transA", 0), r.number("transB", 0)
    return [ValueFacts((left[1 if turned[0] else 0], right[0 if turned[1] else 1]))]


def _packed_matmul(r: NodeInputs) -> list[ValueFacts]:
    """MatMulNBits: the columns are an attribute."""
    left = r.at(0).shape
    return [ValueFacts((*left[:-1], whole(r.number("N", 0))))] if left else []


def _transpose(r: NodeInputs) -> list[ValueFacts]:
    first = r.at(0)
    if first.shape is None:
        return []
    order = r.numbers("perm", 9) or tuple(reversed(range(len(first.shape))))
    if sorted(order) != list(range(len(first.shape))):
        return []
    return [ValueFacts(tuple(first.shape[i] for i in order), table=first.table)]


def _expand(r: NodeInputs) -> list[ValueFacts]:
    data, target = r.at(0), r.at(1).numbers
    if data.shape is None or target is None:
        return []
    r.notes.expanded[id(r.node)] = data.shape
    return [ValueFacts(tuple(broadcast(r, [data.shape, target])), table=data.table)]


def _concat(r: NodeInputs) -> list[ValueFacts]:
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
        known = [term for term in column if term is not None]
        for other in known[1:]:
            require_equal(r, known[0], other)
        dims.append(next((term for term in known if r.facts.real(term).symbols), known[0] if known else None))
    return [ValueFacts(tuple(dims))]


def _sum(terms: list[Term]) -> Term:
    found = whole(0)
    for term in terms:
        found = found + term
    return found


def _gather(r: NodeInputs) -> list[ValueFacts]:
    data, picks = r.at(0).shape, r.at(1).shape
    if data is None or picks is None or not data:
        return []
    axis = r.number("axis", 0) % len(data)
    return [ValueFacts((*data[:axis], *picks, *data[axis + 1 :]))]


def _gather_elements(r: NodeInputs) -> list[ValueFacts]:
    return [ValueFacts(r.at(1).shape)]


def _gather_nd(r: NodeInputs) -> list[ValueFacts]:
    data, picks = r.at(0).shape, r.at(1).shape
    if data is None or not picks or picks[-1] is None or r.number("batch_dims", 0):
        return []
    deep = r.facts.real(picks[-1]).number
    return [ValueFacts((*picks[:-1], *data[deep:]))] if deep is not None else []


def _slice(r: NodeInputs) -> list[ValueFacts]:
    data = r.at(0)
    starts, ends = r.at(1).numbers, r.at(2).numbers
    if data.shape is None:
        return []
    axes = r.facts.known_numbers(r.at(3)) if r.has(3) else tuple(range(len(starts or ())))
    steps = r.facts.known_numbers(r.at(4)) if r.has(4) else (1,) * len(axes or ())
    if starts is None or ends is None or axes is None or steps is None:
        return [ValueFacts((None,) * len(data.shape))]
    dims = list(data.shape)
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=False):
        dims[axis % len(dims)] = _cut(r, dims[axis % len(dims)], (start, end, step))
    return [ValueFacts(tuple(dims), table=data.table)]


def _cut(r: NodeInputs, axis: Term | None, cut: tuple[Term | None, Term | None, int]) -> Term | None:
    """The length of a slice; it is assumed to lie within the axis if it does so in the file."""
    start, end, step = cut
    if axis is None or start is None or end is None or step != 1:
        return None
    size, real = r.facts.size, r.facts.real
    length, first, last = size(real(axis)), size(real(start)), size(real(end))
    low = whole(0) if first <= -length else axis + start if first < 0 else start
    if not r.at(0).fed and real(end).symbols and real(axis).number is not None and r.at(0).numbers is None:
        r.notes.ends.append((r.node, length))
    high = axis if last >= length and real(end).number is not None else axis + end if last < 0 else end
    return high - low if size(real(high)) >= size(real(low)) else None


def _split(r: NodeInputs) -> list[ValueFacts]:
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
        equal = None if whole_axis is None else r.facts.real(whole_axis).divided(whole(count))
        parts = (equal,) * count
    return [ValueFacts((*data[:axis], part, *data[axis + 1 :])) for part in parts]


def _squeeze(r: NodeInputs) -> list[ValueFacts]:
    data = r.at(0)
    if data.shape is None:
        return []
    axes = r.numbers("axes", 1)
    if axes is None:
        axes = tuple(i for i, d in enumerate(data.shape) if d is not None and r.facts.real(d).number == 1)
    gone = {axis % max(len(data.shape), 1) for axis in axes}
    return [ValueFacts(tuple(d for i, d in enumerate(data.shape) if i not in gone), table=data.table)]


def _unsqueeze(r: NodeInputs) -> list[ValueFacts]:
    data, axes = r.at(0), r.numbers("axes", 1)
    if data.shape is None or axes is None:
        return []
    rank = len(data.shape) + len(axes)
    new, rest = {axis % rank for axis in axes}, iter(data.shape)
    return [ValueFacts(tuple(whole(1) if i in new else next(rest, None) for i in range(rank)), table=data.table)]


def _shape(r: NodeInputs) -> list[ValueFacts]:
    data = r.at(0).shape
    return [ValueFacts((whole(len(data[slice(*_ends(r, len(data)))])),))] if data is not None else []


def _ends(r: NodeInputs, rank: int) -> tuple[int, int]:
    return r.number("start", 0), r.number("end", rank)


def _scalar(r: NodeInputs) -> list[ValueFacts]:  # noqa: ARG001 - the form of a rule
    return [ValueFacts(())]


def _sized(r: NodeInputs) -> list[ValueFacts]:
    return [ValueFacts(r.at(0).numbers)]


def _range(r: NodeInputs) -> list[ValueFacts]:
    start, end, step = (r.at(i).numbers for i in range(3))
    known = start and end and step and start[0] is not None and end[0] is not None and step[0] is not None
    if not known or start is None or end is None or step is None:
        return [ValueFacts((None,))]
    if r.facts.known_numbers(r.at(2)) != (1,) or start[0] is None or end[0] is None:
        return [ValueFacts((None,))]
    return [ValueFacts((end[0] - start[0],))]


def _reduced(r: NodeInputs) -> list[ValueFacts]:
    data = r.at(0).shape
    if data is None:
        return []
    axes = r.numbers("axes", 1)
    if axes is None:
        axes = tuple(range(len(data))) if not r.number("noop_with_empty_axes", 0) else ()
    gone = {axis % max(len(data), 1) for axis in axes}
    keep = r.number("keepdims", 1)
    return [ValueFacts(tuple(whole(1) if i in gone else d for i, d in enumerate(data) if keep or i not in gone))]


def _tile(r: NodeInputs) -> list[ValueFacts]:
    data, times = r.at(0).shape, r.at(1).numbers
    if data is None or times is None or len(data) != len(times):
        return []
    return [ValueFacts(tuple(None if a is None or b is None else a * b for a, b in zip(data, times, strict=True)))]


def _einsum(r: NodeInputs) -> list[ValueFacts]:
    equation = r.attribute("equation")
    text = equation.s.decode("utf-8", "replace").replace(" ", "") if equation is not None else ""
    terms, arrow, result = text.partition("->")
    if "." in text or not arrow:
        return []
    sizes = dict[str, Term | None]()
    for term, known in zip(terms.split(","), r.inputs, strict=False):
        for letter, dim in zip(term, (known.shape if known is not None else None) or (), strict=False):
            if sizes.get(letter) is not None and dim is not None:
                require_equal(r, sizes[letter], dim)
            if dim is not None and (sizes.get(letter) is None or r.facts.real(dim).symbols):
                sizes[letter] = dim
    return [ValueFacts(tuple(sizes.get(letter) for letter in result))]


def _flatten(r: NodeInputs) -> list[ValueFacts]:
    data = r.at(0).shape
    if data is None or None in data:
        return []
    dims = [dim for dim in data if dim is not None]
    axis = r.number("axis", 1)
    axis += len(dims) if axis < 0 else 0
    return [ValueFacts((product(dims[:axis]), product(dims[axis:])))]


def _argmax(r: NodeInputs) -> list[ValueFacts]:
    data = r.at(0).shape
    if data is None:
        return []
    gone, keep = r.number("axis", 0) % max(len(data), 1), r.number("keepdims", 1)
    return [ValueFacts(tuple(whole(1) if i == gone else d for i, d in enumerate(data) if keep or i != gone))]


_RULES: dict[str, Rule] = {
    "MatMul": _matmul,
    "MatMulInteger": _matmul,
    "Gemm": _gemm,
    "MatMulNBits": _packed_matmul,
    "Transpose": _transpose,
    "Reshape": infer_reshape,
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


def infer_elementwise(r: NodeInputs) -> list[ValueFacts]:
    """An operator that takes its operands element by element (ONNX, multidirectional broadcasting)."""
    given = [known for known in r.inputs if known is not None]
    shapes = [known.shape for known in given]
    if any(shape is None for shape in shapes):
        return []
    dims = broadcast(r, [shape for shape in shapes if shape is not None])
    _note_candidates(r, given, dims)
    return [ValueFacts(tuple(dims))]


def broadcast(r: NodeInputs, shapes: "Sequence[Sequence[Term | None]]") -> list[Term | None]:
    """The axes of a broadcast; numbers that must be a length are bound to it."""
    rank = max((len(shape) for shape in shapes), default=0)
    found: list[Term | None] = []
    for back in range(rank, 0, -1):
        column = [shape[-back] for shape in shapes if len(shape) >= back]
        found.append(_broadcast_axis(r, column))
    return found


def _broadcast_axis(r: NodeInputs, column: "list[Term | None]") -> Term | None:
    known = [term for term in column if term is not None]
    if len(known) != len(column):
        # An unknown size may be 1 or the size of the others.
        return next((term for term in known if r.facts.real(term).number not in (None, 1)), None)
    moving = [term for term in known if r.facts.real(term).symbols]
    kept = moving[0] if moving else next((term for term in known if r.facts.real(term).number != 1), known[0])
    for term in known:
        if r.facts.real(term).number == 1 and not _stands_for(r, term, kept):
            continue
        require_equal(r, kept, term)
    return r.facts.real(kept) if moving else kept


def _stands_for(r: NodeInputs, term: Term, kept: Term) -> bool:
    """Whether a 1 may be a length that was traced at 1: a number that a size was computed from.

    Axes of constants do not count, because most of them hold one row for all.
    """
    opened = r.facts.open(term)
    free = [r.facts.baked[name] for name in opened.symbols if name in r.facts.baked]
    return bool(free) and all(one.kind == "number" for one in free) and r.facts.size(r.facts.real(kept)) == 1


def require_equal(r: NodeInputs, one: Term | None, other: Term | None) -> None:
    """Require two sizes to be equal."""
    if one is None or other is None:
        return
    if r.facts.agree(one, other) is None:
        left, right = r.facts.real(one), r.facts.real(other)
        r.note_conflict(f"{left} and {right} must be equal", left, right)


def _note_candidates(r: NodeInputs, given: list[ValueFacts], dims: "list[Term | None]") -> None:
    """Note constants with one row in place of one for each new token: it may be that of the traced position."""
    rows = r.notes.rows
    if rows is None or not any(known.fed for known in given):
        return
    for known in given:
        if known.fed or known.even or known.shape is None or _has_entry_per_sequence(r, known):
            continue
        for axis, dim in enumerate(known.shape):
            whole_dim = dims[len(dims) - len(known.shape) + axis]
            if whole_dim is None or dim is None or r.facts.real(whole_dim) != rows:
                continue
            if r.facts.real(dim) == whole(1) and r.facts.size(rows) == 1:
                r.notes.candidates.append(TraceCandidate(known.table, r.node, r.scope.path, axis))


def _has_entry_per_sequence(r: NodeInputs, known: ValueFacts) -> bool:
    """Whether a value has one entry for each sequence, the same for all positions."""
    sizes = [None if dim is None else r.facts.real(dim) for dim in known.shape or ()]
    return all(size is not None and size in (whole(1), symbol("batch")) for size in sizes)
