"""Smaller sizes of weights: most failures also occur with a vocabulary of 32 and heads of width 8.

A size is replaced wherever its number occurs: in dims of weights, small integer constants, attributes and declared
shapes. That may break the model; a run shows whether the failure is still the same.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvdoctor.contract import Axis, CacheContract, Dim, Port, Slot
from kvdoctor.model.proto import GraphProto, ModelProto, TensorProto
from kvdoctor.model.traverse import bodies_of

VOCABULARY, HEAD_DIM = 32, 8
MIN_SIZE = 16
"""Smaller numbers are counts of heads, axes or flags, and are not replaced."""

MAX_NUMBERS = 64
WIDTHS = {"head_dim", "hidden", "vocabulary", "channels", "state", "fixed"}
"""Axes whose sizes are replaced; batch, tokens and heads keep theirs."""


@dataclass
class SizeMap:
    """The replacement of sizes: those in `exact`, and multiples of `unit` (0: none), which are divided by `factor`."""

    exact: dict[int, int] = field(default_factory=dict)
    unit: int = 0
    factor: int = 1

    def __bool__(self) -> bool:
        return bool(self.exact) or self.factor > 1

    def of(self, number: int) -> int:
        """The new value of a number."""
        if number in self.exact:
            return self.exact[number]
        if self.unit and self.factor > 1 and number >= max(self.unit, MIN_SIZE) and number % self.unit == 0:
            return number // self.factor
        return number

    def dims(self, tensor: TensorProto, table: bool) -> list[int]:
        """The new dims of a weight. The rows of a table are positions and keep their number, except the vocabulary."""
        dims = [self.of(dim) for dim in tensor.dims]
        if table and dims and tensor.dims[0] not in self.exact:
            dims[0] = tensor.dims[0]
        return dims

    def constant(self, tensor: TensorProto) -> None:
        """Replace the numbers in a small integer constant."""
        kinds: dict[int, Any] = {TensorProto.INT64: "<i8", TensorProto.INT32: "<i4"}
        if not self or tensor.data_type not in kinds or math.prod(tensor.dims) > MAX_NUMBERS:
            return
        if tensor.raw_data:
            old = np.frombuffer(tensor.raw_data, kinds[tensor.data_type])
            tensor.raw_data = np.array([self.of(int(n)) for n in old], kinds[tensor.data_type]).tobytes()
        for numbers in (tensor.int64_data, tensor.int32_data):
            numbers[:] = [self.of(n) for n in numbers]

    def declare(self, model: ModelProto) -> None:
        """Replace the numbers of declared shapes and of attributes that are lists of sizes."""
        if self:
            self._graph(model.graph)
            for function in model.functions:
                self._nodes(function.node)

    def _graph(self, graph: GraphProto) -> None:
        for value in (*graph.input, *graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.HasField("dim_value"):
                    dim.dim_value = self.of(dim.dim_value)
        self._nodes(graph.node)

    def _nodes(self, nodes: Iterable[Any]) -> None:
        for node in nodes:
            for attribute in node.attribute:
                attribute.ints[:] = [self.of(n) for n in attribute.ints]
                if attribute.HasField("i") and attribute.name in ("value_int", "hidden_size", "rotary_embedding_dim"):
                    attribute.i = self.of(attribute.i)
                for body in bodies_of(attribute):
                    self._graph(body)

    def contract(self, contract: CacheContract) -> CacheContract:
        """The contract of the model with these sizes."""
        graphs = {
            name: replace(
                graph,
                inputs=tuple(self._port(port) for port in graph.inputs),
                outputs=tuple(self._port(port) for port in graph.outputs),
            )
            for name, graph in contract.graphs.items()
        }
        slots = tuple(replace(slot, shape=self._shape(slot, slot.shape)) for slot in contract.slots)
        vocabulary = self.of(contract.vocabulary) if contract.vocabulary is not None else None
        return replace(contract, graphs=graphs, slots=slots, vocabulary=vocabulary)

    def _port(self, port: Port) -> Port:
        return port if port.shape is None else replace(port, shape=self._shape(port, port.shape))

    def _shape(self, of: Port | Slot, shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
        if len(of.axes) != len(shape):
            return shape
        return tuple(
            self.of(dim) if isinstance(dim, int) and axis in WIDTHS else dim
            for dim, axis in zip(shape, of.axes, strict=True)
        )


def free_axis(contract: CacheContract, axis: Axis) -> CacheContract:
    """The contract with any size for an axis that the file declares with a fixed one."""

    def free(of: Port | Slot) -> Any:
        if of.shape is None or axis not in of.axes:
            return of
        return replace(of, shape=tuple(None if a == axis else d for a, d in zip(of.axes, of.shape, strict=True)))

    graphs = {
        name: replace(graph, inputs=tuple(map(free, graph.inputs)), outputs=tuple(map(free, graph.outputs)))
        for name, graph in contract.graphs.items()
    }
    return replace(contract, graphs=graphs, slots=tuple(map(free, contract.slots)))


def choose_sizes(contract: CacheContract) -> SizeMap:
    """The smaller sizes for a model, from the width of its heads and its vocabulary."""
    exact = {}
    if contract.vocabulary is not None and contract.vocabulary > VOCABULARY:
        exact[contract.vocabulary] = VOCABULARY
    widths = {slot.size("head_dim") for slot in contract.slots} - {None}
    width = next(iter(widths)) if len(widths) == 1 else None
    if width is None or width <= HEAD_DIM or width % HEAD_DIM:
        return SizeMap(exact)
    factor = width // HEAD_DIM
    return SizeMap(exact, width // 2, factor)
