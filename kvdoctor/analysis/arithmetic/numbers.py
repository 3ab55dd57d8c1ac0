"""The numbers of values that no input decides: constants, and what is computed of constants alone.

The last size of a query or key is the width of a head, which many exports compute their scale of.

Functions of one number that are not linear (activations, caps of scores and logits) are the nodes between a value and
its result in which no other value has a part. Such a function is computed at a few points and compared with the known
ones, so that every way of writing it counts: by an operator of its own, by Erf, Tanh or Sigmoid, in any order.
"""

import math
import struct
from collections.abc import Callable, Container, Iterable
from math import prod

from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import Trait, operators_with
from kvdoctor.model.proto import TensorProto
from kvdoctor.records import record

Numbers = tuple[float, ...]

MOST_NUMBERS = 512
MOST_DEEP = 16
MOST_STEPS = 40
FORMATS: dict[int, str] = {
    TensorProto.FLOAT: "f",
    TensorProto.DOUBLE: "d",
    TensorProto.FLOAT16: "e",
    TensorProto.INT64: "q",
    TensorProto.INT32: "i",
    TensorProto.BFLOAT16: "H",
}
"""How struct reads an element."""
WIDTHS = {data_type: struct.calcsize(form) for data_type, form in FORMATS.items()}
"""Bytes of an element."""

UNARY: dict[str, Callable[[float], float]] = {
    "Sqrt": math.sqrt,
    "Reciprocal": lambda x: 1 / x,
    "Neg": lambda x: -x,
    "Exp": math.exp,
    "Log": math.log,
    "Erf": math.erf,
    "Tanh": math.tanh,
    "Sigmoid": lambda x: 1 / (1 + math.exp(-x)) if x > -700 else 0.0,
    "Relu": lambda x: max(x, 0.0),
    "Abs": abs,
}
BINARY: dict[str, Callable[[float, float], float]] = {
    "Add": lambda x, y: x + y,
    "Sub": lambda x, y: x - y,
    "Mul": lambda x, y: x * y,
    "Div": lambda x, y: x / y,
    "Pow": math.pow,
    "Max": max,
    "Min": min,
}
FAILURES = (ValueError, ZeroDivisionError, OverflowError, TypeError, struct.error)


def read_numbers(tensor: TensorProto) -> Numbers | None:
    """The elements of a tensor, flat; None of a large one, of one without its payload, and of other element types."""
    count, form = prod(tensor.dims), FORMATS.get(tensor.data_type)
    if form is None or not 0 < count <= MOST_NUMBERS:
        return None
    payload = bytes(tensor.raw_data) or _listed(tensor, form)
    return decode_numbers(payload, tensor.data_type, count)


def decode_numbers(payload: bytes, data_type: int, count: int) -> Numbers | None:
    """So many elements of a type from their bytes; None where there are fewer."""
    form = FORMATS.get(data_type)
    if form is None or len(payload) < count * struct.calcsize(form):
        return None
    numbers = struct.unpack_from(f"<{count}{form}", payload)
    if data_type == TensorProto.BFLOAT16:
        numbers = struct.unpack(f"<{count}f", struct.pack(f"<{count}I", *(number << 16 for number in numbers)))
    return tuple(float(number) for number in numbers)


def _listed(tensor: TensorProto, form: str) -> bytes:
    """The elements that are listed as numbers, as bytes; those of 16 bits are listed as their bits."""
    lists = {"f": tensor.float_data, "d": tensor.double_data, "q": tensor.int64_data}
    listed = list(lists.get(form, tensor.int32_data))
    try:
        return struct.pack(f"<{len(listed)}{'H' if form == 'e' else form}", *listed)
    except struct.error:
        return b""


class FixedValues:
    """The numbers of the fixed values of one flow; `head_dim` is the width of a head, where it is known."""

    def __init__(self, flow: Flow, head_dim: int | None = None) -> None:
        self.flow, self.head_dim = flow, head_dim
        self._known: dict[str, Numbers | None] = {}

    def nodes(self, operators: Iterable[str]) -> list[FlatNode]:
        """The nodes of some operators in the order of the graph."""
        wanted = frozenset(operators)
        return [node for node in self.flow.nodes if node.op in wanted]

    def one(self, name: str) -> float | None:
        """The number of a value that has one element."""
        found = self.of(name)
        return found[0] if found is not None and len(found) == 1 else None

    def of(self, name: str, left: int = MOST_DEEP) -> Numbers | None:
        """The numbers of a value, flat; None where an input decides it, or a form is not known."""
        if name not in self._known:
            self._known[name] = None
            tensor, node = self.flow.constants.get(name), self.flow.producers.get(name)
            if tensor is not None:
                self._known[name] = read_numbers(tensor)
            elif node is not None and left:
                self._known[name] = self._compute(node, left - 1)
        return self._known[name]

    def _compute(self, node: FlatNode, left: int) -> Numbers | None:
        if node.has("copy") and len(node.inputs) > 1:  # the outputs of an If
            chosen = {self.of(name, left) for name in node.inputs}
            return chosen.pop() if len(chosen) == 1 else None
        if node.has("copy", "cast", "view", "permute", "repeat"):
            return self.of(node.input(0), left)
        if node.has("pick"):
            return self._width(node)
        if node.op not in UNARY and node.op not in BINARY and not node.has("range"):
            return None
        given = [self.of(name, left) for name in node.inputs]
        if None in given or not given:
            return None
        try:
            return _apply(node, [numbers for numbers in given if numbers is not None])
        except FAILURES:
            return None

    def _width(self, node: FlatNode) -> Numbers | None:
        """The last size of a tensor, which is taken for the width of a head."""
        place, listed = self.of(node.input(1)), self.flow.producers.get(self.source(node.input(0)))
        if listed is not None and listed.has("pick") and place is not None:  # sizes in another order
            order = self.of(listed.input(1)) or ()
            place = order[int(place[0]) : int(place[0]) + 1 or None] if len(order) > 1 else None
            listed = self.flow.producers.get(self.source(listed.input(0)))
        if listed is None or not listed.has("sizes") or self.head_dim is None:
            return None
        return (float(self.head_dim),) if place in ((-1.0,), (3.0,)) else None

    def readers(self, name: str) -> list[FlatNode]:
        """The nodes that take the content of a value."""
        return [node for node, _ in self.flow.consumers.get(name, ()) if not node.has("sizes")]

    def factor(self, node: FlatNode | None) -> tuple[float, str] | None:
        """The number that a node multiplies a value with, and that value; None where it does something else."""
        if node is None or not node.has("multiply", "divide") or len(node.inputs) != 2:
            return None
        one, other = (self.one(given) for given in node.inputs)
        if other:
            return (1 / other if node.has("divide") else other), node.inputs[0]
        return (one, node.inputs[1]) if one and node.has("multiply") else None

    def biased(self, node: FlatNode) -> str:
        """What a constant is added to; empty where none is."""
        given = node.inputs if node.has("add") and len(node.inputs) == 2 else ()
        free = [name for name in given if self.flow.constant(name) is None]
        return free[0] if len(free) == 1 else ""

    def before_scales(
        self, name: str, *between: Trait, biases: bool = False, ends: Container[str] = ()
    ) -> tuple[list[float], str]:
        """The factors on a value, and the value before them; nodes of some kinds may lie between, and biases."""
        factors: list[float] = []
        for _ in range(MOST_STEPS):
            node = self.flow.producers.get(name)
            if node is None or name in ends:
                break
            factor, bias = self.factor(node), self.biased(node) if biases else ""
            factors += [factor[0]] if factor is not None else []
            before = factor[1] if factor is not None else node.input(0) if node.has(*between) else bias
            if not before:
                break
            name = before
        return factors, name

    def source(self, name: str) -> str:
        """The value that a value is a copy, cast or view of."""
        for _ in range(MOST_DEEP):
            node = self.flow.producers.get(name)
            if node is None or not node.has("copy", "cast", "view") or (node.has("copy") and len(node.inputs) > 1):
                break
            name = node.input(0)
        return name


def _apply(node: FlatNode, given: list[Numbers]) -> Numbers | None:
    if node.op in UNARY:
        return tuple(UNARY[node.op](x) for x in given[0])
    if node.has("range"):
        start, end, step = (numbers[0] for numbers in given)
        count = max(math.ceil((end - start) / step), 0)
        return tuple(start + at * step for at in range(count)) if 0 < count <= MOST_NUMBERS else None
    one, other = given[0], given[-1]
    length = max(len(one), len(other))
    if len(given) != 2 or {len(one), len(other)} - {1, length}:
        return None
    return tuple(BINARY[node.op](one[at % len(one)], other[at % len(other)]) for at in range(length))


SEEDS = operators_with("activation") | {"Erf"}
"""Operators that bend; the nodes around them belong to the same function."""
SCALARS = frozenset((*UNARY, *BINARY)) | operators_with("copy", "cast")
MOST_BENT = 12
POINTS = (-2.5, -1.0, -0.4, 0.3, 1.0, 2.5)
CLOSE = 1e-3
FAR = 1e4
"""Where a cap has reached its bound."""


_sigmoid = UNARY["Sigmoid"]


def _tanh_gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


KINDS: dict[str, Callable[[float], float]] = {
    "gelu": lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))),
    "gelu by tanh": _tanh_gelu,
    "silu": lambda x: x * _sigmoid(x),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "relu": lambda x: max(x, 0.0),
    "squared relu": lambda x: max(x, 0.0) ** 2,
    "tanh": math.tanh,
    "sigmoid": _sigmoid,
}
"""The known functions by name."""
AT_POINTS = {name: [function(x) for x in POINTS] for name, function in KINDS.items()}
WHOLE: dict[str, Callable[[FlatNode, float], float]] = {
    "Gelu": lambda node, x: KINDS["gelu by tanh" if node.text("approximate", "") == "tanh" else "gelu"](x),
    "FastGelu": lambda _, x: _tanh_gelu(x),
    "BiasGelu": lambda _, x: KINDS["gelu"](x),
    "QuickGelu": lambda node, x: x * _sigmoid(node.real("alpha", 1.702) * x),
    "Swish": lambda node, x: x * _sigmoid(node.real("alpha", 1.0) * x),
    "Silu": lambda _, x: KINDS["silu"](x),
}
"""Operators that are a whole function."""


@record
class Bend:
    """A function: its kind, the bound of a cap, the node that bends, its argument and its result."""

    kind: str
    cap: float | None
    node: FlatNode
    argument: str
    result: str


class Bends:
    """The functions of one flow, by their results."""

    def __init__(self, flow: Flow, fixed: FixedValues) -> None:
        self.flow, self.fixed = flow, fixed
        self._origins: dict[str, tuple[str, ...]] = {}
        found = (self._read(node) for node in fixed.nodes(SEEDS))
        self.by_result = {bend.result: bend for bend in found if bend is not None}

    def _read(self, seed: FlatNode) -> Bend | None:
        """The function around a node: the longest one that is known."""
        arguments, result, found = self.origins(seed.input(0)), seed.output(), None
        for _ in range(MOST_BENT):
            found = self._recognize(seed, arguments, result) or found
            further = self._step(arguments, result)
            if further is None:
                break
            arguments, result = further
        return found

    def _recognize(self, seed: FlatNode, arguments: tuple[str, ...], result: str) -> Bend | None:
        for argument in arguments:
            kind = self._kind(argument, result)
            if kind is not None:
                return Bend(kind, None, seed, argument, result)
        for argument in arguments if seed.op == "Tanh" else ():
            cap, slope = self._compute(result, argument, FAR), self._compute(result, argument, 1e-4)
            if cap is not None and slope is not None and cap > 1.5 and abs(slope / 1e-4 - 1) < CLOSE:
                return Bend("cap", cap, seed, argument, result)
        return None

    def _kind(self, argument: str, result: str) -> str | None:
        values: list[float] = []
        for point in POINTS:
            if (value := self._compute(result, argument, point)) is None:
                return None
            values.append(value)
        errors = {name: max(abs(x - y) for x, y in zip(at, values, strict=True)) for name, at in AT_POINTS.items()}
        best = min(errors, key=lambda name: errors[name])
        return best if errors[best] < CLOSE else None

    def _step(self, arguments: tuple[str, ...], result: str) -> tuple[tuple[str, ...], str] | None:
        """The next value that is still a function of the argument, with the arguments that are left."""
        readers = list({id(node): node for node in self.fixed.readers(result)}.values())
        if len(readers) != 1 or readers[0].op not in SCALARS:
            return None
        node = readers[0]
        for other in node.inputs:
            if other and other != result and self.fixed.one(other) is None:
                origins = self.origins(other)
                arguments = tuple(name for name in arguments if name in origins)
        return (arguments, node.output()) if arguments else None

    def origins(self, name: str, left: int = MOST_BENT) -> tuple[str, ...]:
        """The values that a value is a function of, the nearest first, itself included."""
        if name not in self._origins:
            self._origins[name] = (name,)
            node = self.flow.producers.get(name)
            if node is not None and node.op in SCALARS and left and name not in self.flow.carried:
                free = [one for one in node.inputs if one and self.fixed.one(one) is None]
                lists = [self.origins(one, left - 1) for one in dict.fromkeys(free)]
                common = [one for one in lists[0] if all(one in other for other in lists)] if lists else []
                self._origins[name] = (name, *common)
        return self._origins[name]

    def _compute(self, name: str, argument: str, x: float, left: int = 2 * MOST_BENT) -> float | None:
        """A value at a value of the argument; None where something else has a part in it."""
        if name == argument:
            return x
        constant, node = self.fixed.one(name), self.flow.producers.get(name)
        if constant is not None or node is None or not left:
            return constant
        given = [self._compute(one, argument, x, left - 1) for one in node.inputs[: 1 if node.op in WHOLE else 2]]
        if None in given or not given:
            return None
        try:
            return _bend(node, [one for one in given if one is not None])
        except FAILURES:
            return None


def _bend(node: FlatNode, given: list[float]) -> float | None:
    if node.op in WHOLE:
        return WHOLE[node.op](node, given[0])
    if node.op in UNARY:
        return UNARY[node.op](given[0])
    if node.op in BINARY and len(given) == 2:
        return BINARY[node.op](*given)
    return given[0] if node.has("copy", "cast") else None
