"""The walk through a graph: what is known of every value, from the axes of the inputs on."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from kvdoctor.graph import bodies_of, integers
from kvdoctor.onnx_schema import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.sizing.known import MOST_NUMBERS, UNKNOWN, Clash, Dims, Known, Ledger, Site, constant
from kvdoctor.sizing.terms import Term

MOST_ROUNDS = 8
"""Times that a graph is walked until no more is bound: what is bound late says more of what came before."""


SHAPING = {"Expand": 1, "Tile": 1, "Reshape": 1, "ConstantOfShape": 0, "Unsqueeze": 1, "Squeeze": 1}
"""Operators with an input that says where values go, and has no part in what they are."""

STANDARD = ("", "ai.onnx")
FUSED = ("Attention", "RotaryEmbedding", "TensorScatter")
"""Operators of ONNX itself that take positions or lengths."""

COUNTING = ("Range", "Slice", "Trilu")
"""Operators that number rows: kept for who asks from where they count."""

EVEN = {
    *("Expand", "Tile", "Reshape", "ConstantOfShape", "Unsqueeze", "Squeeze", "Transpose", "Cast", "Identity", "Not"),
    *("Add", "Sub", "Mul", "Div", "Where", "And", "Or", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"),
    *("Min", "Max", "Neg", "Exp", "Log", "Sqrt"),
}
"""Operators that make of values which are all the same values which are all the same."""


@dataclass(eq=False)
class Inside:
    """The values of a graph or branch; those around it are looked up there. `path` is for people."""

    graph: GraphProto
    path: str
    outer: "Inside | None" = None
    values: dict[str, Known] = field(default_factory=dict)
    constants: dict[str, TensorProto] = field(default_factory=dict)

    def known(self, name: str) -> Known | None:
        """What is known of a value, None where a constant of that name stands nearer."""
        scope: Inside | None = self
        while scope is not None:
            if name in scope.values:
                return scope.values[name]
            if name in scope.constants:
                return None
            scope = scope.outer
        return UNKNOWN

    def constant(self, name: str) -> TensorProto | None:
        """The tensor of a constant."""
        scope: Inside | None = self
        while scope is not None:
            if name in scope.constants:
                return scope.constants[name]
            scope = scope.outer
        return None


@dataclass(eq=False)
class Reading:
    """One node with what is known of its inputs; a rule answers with what is known of its outputs."""

    node: NodeProto
    inputs: "list[Known | None]"
    walk: "Walk"
    inside: Inside

    @property
    def ledger(self) -> Ledger:
        """The stand-ins of the graph."""
        return self.walk.ledger

    def attribute(self, name: str) -> AttributeProto | None:
        """The attribute of that name."""
        return next((a for a in self.node.attribute if a.name == name), None)

    def number(self, name: str, default: int) -> int:
        """An integer attribute."""
        found = self.attribute(name)
        return int(found.i) if found is not None else default

    def at(self, index: int) -> Known:
        """What is known of an input; nothing where it is left out."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found or UNKNOWN

    def has(self, index: int) -> bool:
        """Whether an input is there."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def numbers(self, attribute: str, index: int) -> tuple[int, ...] | None:
        """Numbers that are an attribute in old opsets and an input in newer ones."""
        found = self.attribute(attribute)
        if found is not None:
            return tuple(found.ints)
        return self.ledger.known_numbers(self.at(index)) if self.has(index) else None

    def clash(self, words: str, *sizes: Term) -> None:
        """Note that sizes cannot agree."""
        self.ledger.clashes.append(Clash(self.node, self.inside.path, words, sizes))


@dataclass(eq=False)
class Reshaped:
    """A Reshape that was walked over: the axes that came in, and what its entries stand for."""

    node: NodeProto
    into: tuple[Term, ...]
    out: tuple[Term, ...]
    said: tuple[tuple[Term, ...], ...]


@dataclass(eq=False)
class Walk:
    """A model under a ledger. `inputs` gives the axes of graph inputs as terms."""

    model: ModelProto
    inputs: Mapping[str, tuple[Term, ...]]
    ledger: Ledger
    reshapes: dict[int, Reshaped] = field(default_factory=dict)
    expanded: dict[int, Dims] = field(default_factory=dict)
    ends: list[tuple[NodeProto, int]] = field(default_factory=list)
    counting: list[Reading] = field(default_factory=list)
    beside: "list[Beside]" = field(default_factory=list)
    keep: list[NodeProto] = field(default_factory=list)
    scopes: "dict[int, Inside]" = field(default_factory=dict)
    rows: Term | None = None

    def run(self) -> Inside:
        """Walk until no more is bound; what is known of the values of the main graph."""
        self.functions = {(f.domain, f.name) for f in self.model.functions}
        self.keep = list(_every_node(self.model.graph))  # their ids must stay theirs
        for _ in range(MOST_ROUNDS):
            before = len(self.ledger.bound)
            self.ledger.clashes.clear()
            self.reshapes.clear()
            self.beside.clear()
            self.ends.clear()
            self.counting.clear()
            main = Inside(self.model.graph, "main graph")
            for value in self.model.graph.input:
                main.values[value.name] = Known(self.inputs.get(value.name))
            self._graph(self.model.graph, main)
            if len(self.ledger.bound) == before:
                break
        return main

    def _graph(self, graph: GraphProto, inside: Inside) -> None:
        self.scopes[id(graph)] = inside
        for tensor in graph.initializer:
            inside.constants[tensor.name] = tensor
            inside.values.pop(tensor.name, None)
        for node in graph.node:
            self._node(node, inside)

    def _node(self, node: NodeProto, inside: Inside) -> None:
        if node.op_type == "Constant" and node.output:
            tensor = _tensor(node)
            if tensor is not None:
                inside.constants[node.output[0]] = tensor
                return
        aliased = inside.constant(node.input[0]) if node.op_type == "Identity" else None
        if aliased is not None and inside.known(node.input[0]) is None:
            inside.constants[node.output[0]] = aliased
            return
        if node.op_type == "If" and not node.domain:
            self._branches(node, inside)
            return
        reading = Reading(node, [self._read(node, i, name, inside) for i, name in enumerate(node.input)], self, inside)
        for name, known in zip(node.output, self._made(reading), strict=False):
            if name:
                inside.values[name] = known

    def _read(self, node: NodeProto, index: int, name: str, inside: Inside) -> Known | None:
        if not name:
            return None
        known = inside.known(name)
        if known is not None:
            return known
        tensor = inside.constant(name)
        if tensor is None:
            return UNKNOWN
        numbers = integers(tensor) if prod(tensor.dims) <= MOST_NUMBERS else None
        return constant(self.ledger, Site(node, index, tensor, inside.path), numbers)

    def _made(self, reading: Reading) -> list[Known]:
        from kvdoctor.sizing.rules import made

        key = (reading.node.domain, reading.node.op_type)
        if reading.node.domain not in STANDARD or reading.node.op_type in FUSED:
            self._note_constants(reading)
        if reading.node.op_type in COUNTING:
            self.counting.append(reading)
        shaping = SHAPING.get(reading.node.op_type)
        fed = any(k is not None and k.fed for i, k in enumerate(reading.inputs) if i != shaping)
        found = [UNKNOWN] * len(reading.node.output) if key in self.functions else made(reading)
        even = reading.node.op_type in EVEN and all(
            known.even
            for index, known in enumerate(reading.inputs)
            if known is not None and index not in (shaping, None)
        )
        return [replace(known, fed=fed and self._counts(known), even=even) for known in found]

    def _note_constants(self, reading: Reading) -> None:
        """An operator that holds a whole attention takes positions and lengths as they are given."""
        for index, known in enumerate(reading.inputs):
            if known is not None and not known.fed and known.numbers:
                self.beside.append(Beside(known.table, reading.node, reading.inside.path, index))

    def _counts(self, known: Known) -> bool:
        """Whether numbers depend on how many tokens there are; those of the batch are the same for all tokens."""
        if known.numbers is None or None in known.numbers:
            return True
        symbols = {name for term in known.numbers if term is not None for name in self.ledger.real(term).symbols}
        return not symbols.isdisjoint(("past", "new"))

    def _branches(self, node: NodeProto, inside: Inside) -> None:
        results: list[list[Known]] = []
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                inner = Inside(body, f"If {node.name!r}, {attribute.name}", inside)
                self._graph(body, inner)
                results.append([inner.known(value.name) or UNKNOWN for value in body.output])
        for index, name in enumerate(node.output):
            shapes = [self._opened(made[index]) if index < len(made) else None for made in results]
            same = shapes[0] if shapes and all(shape == shapes[0] for shape in shapes) else None
            if name:
                inside.values[name] = Known(same)

    def _opened(self, known: Known) -> Dims | None:
        if known.shape is None:
            return None
        return tuple(None if term is None else self.ledger.real(term) for term in known.shape)


@dataclass(eq=False)
class Beside:
    """A constant that may be of the traced place: one row where there is one for each new token, or a position."""

    site: Site | None
    node: NodeProto
    path: str
    axis: int


def _tensor(node: NodeProto) -> TensorProto | None:
    """The tensor that a Constant gives, also one written as plain integers."""
    for attribute in node.attribute:
        if attribute.name == "value" and attribute.HasField("t"):
            value: TensorProto = attribute.t
            return value
        if attribute.name == "value_int":
            return TensorProto(data_type=TensorProto.INT64, int64_data=[attribute.i])
        if attribute.name == "value_ints":
            return TensorProto(data_type=TensorProto.INT64, dims=[len(attribute.ints)], int64_data=list(attribute.ints))
    return None


def _every_node(graph: GraphProto) -> Iterator[NodeProto]:
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                yield from _every_node(body)
