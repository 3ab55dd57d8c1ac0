"""The numbers of values that no input decides: constants, and what is computed of constants alone.

The last size of a query or key is the width of a head, which many exports compute their scale of.
"""

import math
import struct
from collections.abc import Callable, Container, Iterable
from functools import cached_property
from math import prod

from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import Trait
from kvdoctor.model.proto import TensorProto

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

    @cached_property
    def _by_operator(self) -> dict[str, list[FlatNode]]:
        found: dict[str, list[FlatNode]] = {}
        for node in self.flow.nodes:
            found.setdefault(node.op, []).append(node)
        return found

    def nodes(self, operators: Iterable[str]) -> list[FlatNode]:
        """The nodes of some operators in the order of the graph."""
        found = (node for name in operators for node in self._by_operator.get(name, ()))
        return sorted(found, key=lambda node: node.index)

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
