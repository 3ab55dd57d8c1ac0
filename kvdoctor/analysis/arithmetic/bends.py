"""The functions of one number in a graph that are not linear: activations, and caps of scores and logits.

A function is the nodes between a value and its result in which no other value has a part. It is computed at a few
points and compared with the known functions, so that every way of writing one counts: by an operator of its own, by
Erf, Tanh or Sigmoid, with the factors in any order.
"""

import math
from collections.abc import Callable

from kvdoctor.analysis.arithmetic.numbers import BINARY, FAILURES, UNARY, FixedValues
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import operators_with
from kvdoctor.records import record

SEEDS = operators_with("activation") | {"Erf"}
"""Operators that bend; the nodes around them belong to the same function."""
SCALARS = frozenset((*UNARY, *BINARY)) | operators_with("copy", "cast")
MOST_STEPS = 12
POINTS = (-2.5, -1.0, -0.4, 0.3, 1.0, 2.5)
NEAR = 1e-3
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
        for _ in range(MOST_STEPS):
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
            if cap is not None and slope is not None and cap > 1.5 and abs(slope / 1e-4 - 1) < NEAR:
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
        return best if errors[best] < NEAR else None

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

    def origins(self, name: str, left: int = MOST_STEPS) -> tuple[str, ...]:
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

    def _compute(self, name: str, argument: str, x: float, left: int = 2 * MOST_STEPS) -> float | None:
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
            return _apply(node, [one for one in given if one is not None])
        except FAILURES:
            return None


def _apply(node: FlatNode, given: list[float]) -> float | None:
    if node.op in WHOLE:
        return WHOLE[node.op](node, given[0])
    if node.op in UNARY:
        return UNARY[node.op](given[0])
    if node.op in BINARY and len(given) == 2:
        return BINARY[node.op](*given)
    return given[0] if node.has("copy", "cast") else None
