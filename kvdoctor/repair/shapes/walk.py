"""The walk through a graph: from the axes of its inputs to the facts on every value."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod

from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import STANDARD, bodies_of, describe_node, input_of, nodes_in
from kvdoctor.model.view import integers
from kvdoctor.repair.shapes.facts import (
    MOST_NUMBERS,
    UNKNOWN,
    ConstantUse,
    Dims,
    GraphScope,
    NodeInputs,
    TraceCandidate,
    ValueFacts,
    WalkNotes,
    read_constant,
)
from kvdoctor.repair.shapes.rules import infer_outputs
from kvdoctor.repair.shapes.terms import Term

MOST_ROUNDS = 8
"""Largest number of walks; a stand-in that is bound late adds facts on earlier values."""


SHAPING = {"Expand": 1, "Tile": 1, "Reshape": 1, "ConstantOfShape": 0, "Unsqueeze": 1, "Squeeze": 1}
"""Operators with an input that only gives a shape or axes, not values."""

FUSED = ("Attention", "RotaryEmbedding", "TensorScatter")
"""Operators of the ONNX standard that take positions or lengths."""

COUNTING = ("Range", "Slice", "Trilu")
"""Operators that number rows; they are noted for repairs of masks and positions."""

EVEN = {
    *("Expand", "Tile", "Reshape", "ConstantOfShape", "Unsqueeze", "Squeeze", "Transpose", "Cast", "Identity", "Not"),
    *("Add", "Sub", "Mul", "Div", "Where", "And", "Or", "Equal", "Less", "Greater", "LessOrEqual", "GreaterOrEqual"),
    *("Min", "Max", "Neg", "Exp", "Log", "Sqrt"),
}
"""Operators that return equal elements for inputs with equal elements."""


@dataclass(eq=False)
class ShapeWalk:
    """A model under a facts. `inputs` gives the axes of graph inputs as terms, `fed` the numbers that some hold."""

    model: ModelProto
    inputs: Mapping[str, tuple[Term, ...]]
    notes: WalkNotes
    keep: list[NodeProto] = field(default_factory=list)
    scopes: "dict[int, GraphScope]" = field(default_factory=dict)
    fed: Mapping[str, Dims] = field(default_factory=dict)

    def run(self) -> GraphScope:
        """Walk until no more is bound; what is known of the values of the main graph."""
        self.functions = {(f.domain, f.name) for f in self.model.functions}
        self.keep = list(nodes_in(self.model.graph.node))  # their ids must stay theirs
        for _ in range(MOST_ROUNDS):
            before = len(self.notes.facts.bound)
            self.notes.clear()
            main = GraphScope(self.model.graph, "main graph")
            for value in self.model.graph.input:
                main.values[value.name] = ValueFacts(self.inputs.get(value.name), self.fed.get(value.name))
            self._graph(self.model.graph, main)
            if len(self.notes.facts.bound) == before:
                break
        return main

    def _graph(self, graph: GraphProto, inside: GraphScope) -> None:
        self.scopes[id(graph)] = inside
        for tensor in graph.initializer:
            inside.constants[tensor.name] = tensor
            inside.values.pop(tensor.name, None)
        for node in graph.node:
            self._node(node, inside)

    def _node(self, node: NodeProto, inside: GraphScope) -> None:
        if node.op_type == "Constant" and node.output:
            tensor = _tensor(node)
            if tensor is not None:
                inside.constants[node.output[0]] = tensor
                return
        aliased = inside.constant(input_of(node, 0)) if node.op_type == "Identity" and node.output else None
        if aliased is not None and inside.known(input_of(node, 0)) is None:
            inside.constants[node.output[0]] = aliased
            return
        if node.op_type == "If" and not node.domain:
            self._branches(node, inside)
            return
        reading = NodeInputs(
            node, [self._read(node, i, name, inside) for i, name in enumerate(node.input)], self.notes, inside
        )
        for name, known in zip(node.output, self._made(reading), strict=False):
            if name:
                inside.values[name] = known

    def _read(self, node: NodeProto, index: int, name: str, inside: GraphScope) -> ValueFacts | None:
        if not name:
            return None
        known = inside.known(name)
        if known is not None:
            return known
        tensor = inside.constant(name)
        if tensor is None:
            return UNKNOWN
        numbers = integers(tensor) if prod(tensor.dims) <= MOST_NUMBERS else None
        return read_constant(self.notes.facts, ConstantUse(node, index, tensor, inside.path), numbers)

    def _made(self, reading: NodeInputs) -> list[ValueFacts]:
        key = (reading.node.domain, reading.node.op_type)
        if reading.node.domain not in STANDARD or reading.node.op_type in FUSED:
            self._note_constants(reading)
        if reading.node.op_type in COUNTING:
            self.notes.counting.append(reading)
        shaping = SHAPING.get(reading.node.op_type)
        fed = any(k is not None and k.fed for i, k in enumerate(reading.inputs) if i != shaping)
        found = [UNKNOWN] * len(reading.node.output) if key in self.functions else infer_outputs(reading)
        even = reading.node.op_type in EVEN and all(
            known.even
            for index, known in enumerate(reading.inputs)
            if known is not None and index not in (shaping, None)
        )
        return [replace(known, fed=fed and self._counts(known), even=even) for known in found]

    def _note_constants(self, reading: NodeInputs) -> None:
        """An operator that holds a whole attention takes positions and lengths as they are given."""
        for index, known in enumerate(reading.inputs):
            if known is not None and not known.fed and known.numbers:
                self.notes.candidates.append(TraceCandidate(known.table, reading.node, reading.scope.path, index))

    def _counts(self, known: ValueFacts) -> bool:
        """Whether numbers depend on how many tokens there are; those of the batch are the same for all tokens."""
        if known.numbers is None or None in known.numbers:
            return True
        symbols = {name for term in known.numbers if term is not None for name in self.notes.facts.real(term).symbols}
        return not symbols.isdisjoint(("past", "new"))

    def _branches(self, node: NodeProto, inside: GraphScope) -> None:
        results: list[list[ValueFacts]] = []
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                inner = GraphScope(body, f"{describe_node(node)}, {attribute.name}", inside)
                self._graph(body, inner)
                results.append([inner.known(value.name) or UNKNOWN for value in body.output])
        for index, name in enumerate(node.output):
            shapes = [
                self._opened(infer_outputs[index]) if index < len(infer_outputs) else None for infer_outputs in results
            ]
            same = shapes[0] if shapes and all(shape == shapes[0] for shape in shapes) else None
            if name:
                inside.values[name] = ValueFacts(same)

    def _opened(self, known: ValueFacts) -> Dims | None:
        if known.shape is None:
            return None
        return tuple(None if term is None else self.notes.facts.real(term) for term in known.shape)


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
