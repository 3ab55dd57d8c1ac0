"""Nodes that store rows of a cache in a narrower type, and read them back: float16, int8, or int4 packed in uint8.

A row is what one token and one head has along head_dim. With int8 and int4 it is divided by a scale of its own, which
is carried with the values, so a row is rounded once, when it is new, and never again. The arithmetic is that of
`decode/stored_cache.py`, which a proof reads the caches with.
"""

from dataclasses import dataclass
from functools import partial

from kvdoctor.choices import CacheType
from kvdoctor.decode.stored_cache import LARGEST_SCALE, LEVELS, SMALLEST_SCALE, ZERO_POINT
from kvdoctor.model.edit import GraphWriter, fresh_name, make_node
from kvdoctor.model.proto import GraphProto, NodeProto, TensorProto
from kvdoctor.model.traverse import find_attribute, opset_version
from kvdoctor.records import record

FLOAT, UINT8, INT8, INT64, FLOAT16 = 1, 2, 3, 7, 10
STORED = {"float16": FLOAT16, "int8": INT8, "int4": UINT8}
"""The element type in which each choice is stored. Concat takes no INT4 tensors, so two share a byte."""
AXES_AS_INPUT = 18
"""The opset from which the axes of ReduceMax are an input."""


@record
class Row:
    """What a row is in the tensors of a slot: the axis of head_dim, its size (None where unknown), the element type."""

    axis: int
    size: int | None
    elem_type: int


@dataclass(eq=False)
class RowCodec(GraphWriter):
    """Writes the nodes of one model; `kind` is the type that its cache gets. Constants go into the main graph."""

    kind: CacheType

    @property
    def is_scaled(self) -> bool:
        """Whether scales are carried with the values."""
        return self.kind != "float16"

    def encode(self, graph: GraphProto, value: str, row: Row, into: str = "") -> tuple[str, str]:
        """Store a value: the name of what is stored, which may be given, and of the scales (empty for float16)."""
        node = partial(self._node, graph)
        if self.kind == "float16":
            return node("stored", "Cast", [value], into, to=FLOAT16), ""
        exact = node("exact", "Cast", [value], to=FLOAT)
        scale = self._scale(graph, exact, row.axis)
        wide = node("scale", "Cast", [scale], to=FLOAT)
        steps = node("steps", "Round", [node("share", "Div", [exact, wide])])
        limits = [self._number(float(-LEVELS[self.kind])), self._number(float(LEVELS[self.kind]))]
        level = node("level", "Clip", [steps, *limits])
        if self.kind == "int8":
            return node("stored", "Cast", [level], into, to=INT8), scale
        raised = node("raised", "Add", [level, self._number(float(ZERO_POINT))])
        half = (row.size or 0) // 2
        bounds = [[*map(self.numbers, ([start], [start + half], [row.axis]))] for start in (0, half)]
        low, high = (node("half", "Slice", [raised, *numbers]) for numbers in bounds)
        pair = node("pair", "Mul", [high, self._number(16.0)])
        packed = node("packed", "Add", [low, pair])
        return node("stored", "Cast", [packed], into, to=UINT8), scale

    def decode(self, graph: GraphProto, stored: tuple[str, str], row: Row, into: str) -> None:
        """Read stored values, with their scales, under a given name, in the element type of the graph."""
        (values, scale), node = stored, partial(self._node, graph)
        if self.kind == "float16":
            node("read", "Cast", [values], into, to=row.elem_type)
            return
        level = node("levels", "Cast", [values], to=FLOAT)
        if self.kind == "int4":
            shifted = node("shifted", "Mul", [level, self._number(1 / 16)])
            high = node("high", "Floor", [shifted])
            taken = node("taken", "Mul", [high, self._number(16.0)])
            low = node("low", "Sub", [level, taken])
            raised = node("raised", "Concat", [low, high], axis=row.axis)
            level = node("levels", "Sub", [raised, self._number(float(ZERO_POINT))])
        wide = node("scale", "Cast", [scale], to=FLOAT)
        if row.elem_type == FLOAT:
            node("read", "Mul", [level, wide], into)
        else:
            node("read", "Cast", [node("product", "Mul", [level, wide])], into, to=row.elem_type)

    def pass_on(self, graph: GraphProto, value: str, into: str) -> None:
        """Give a value another name."""
        self._node(graph, "same", "Identity", [value], into)

    def transpose_back(self, graph: GraphProto, value: str, node: NodeProto, into: str) -> None:
        """Undo on a value what a Transpose does; without `perm` it reverses the axes, which undoes itself."""
        order = find_attribute(node, "perm")
        if order is None:
            self._node(graph, "back", "Transpose", [value], into)
        else:
            places = sorted(range(len(order.ints)), key=lambda at: order.ints[at])
            self._node(graph, "back", "Transpose", [value], into, perm=places)

    def scale_shape(self, graph: GraphProto, node: NodeProto, factors: list[int]) -> None:
        """Multiply what a Shape returns by numbers, for all that reads it."""
        name = str(node.output[0])
        node.output[0] = fresh_name(f"{name}.packed", self.known)
        self._node(graph, "shape", "Mul", [node.output[0], self.numbers(factors)], name)

    def _scale(self, graph: GraphProto, exact: str, axis: int) -> str:
        """The largest magnitude of each row over the number of levels, as float16."""
        size = self._node(graph, "magnitude", "Abs", [exact])
        if opset_version(self.model.opset_import) >= AXES_AS_INPUT:
            largest = self._node(graph, "largest", "ReduceMax", [size, self.numbers([axis])], keepdims=1)
        else:
            largest = self._node(graph, "largest", "ReduceMax", [size], axes=[axis], keepdims=1)
        step = self._node(graph, "step", "Mul", [largest, self._number(1 / LEVELS[self.kind])])
        limits = [self._number(SMALLEST_SCALE), self._number(LARGEST_SCALE)]
        bounded = self._node(graph, "step", "Clip", [step, *limits])
        return self._node(graph, "stored_scale", "Cast", [bounded], to=FLOAT16)

    def _node(
        self, graph: GraphProto, hint: str, op: str, inputs: list[str], into: str = "", **attributes: "int | list[int]"
    ) -> str:
        name = into or self.fresh(hint)
        graph.node.append(make_node(op, inputs, name, **attributes))
        return name

    def _number(self, number: float) -> str:
        return self.tensor("constant", TensorProto(data_type=FLOAT, float_data=[number]))


def slice_shape(sizes: list[int], node: NodeProto) -> list[int]:
    """The sizes that a Shape returns, of those of all axes: from opset 15 on it may take some of them."""
    start, end = find_attribute(node, "start"), find_attribute(node, "end")
    return sizes[slice(start.i if start is not None else None, end.i if end is not None else None)]
