"""Nodes that store rows of a cache in a narrower type, and read them back: float16, int8, or int4 packed in uint8.

A row is what one token and one head has along head_dim. With int8 and int4 it is divided by a scale of its own, which
is carried with the values, so a row is rounded once, when it is new, and never again. The arithmetic is that of
`decode/stored_cache.py`, which a proof reads the caches with.
"""

from dataclasses import dataclass

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
        if self.kind == "float16":
            return self._node(graph, "stored", "Cast", [value], into, to=FLOAT16), ""
        exact = self._node(graph, "exact", "Cast", [value], to=FLOAT)
        scale = self._scale(graph, exact, row.axis)
        wide = self._node(graph, "scale", "Cast", [scale], to=FLOAT)
        steps = self._node(graph, "steps", "Round", [self._node(graph, "share", "Div", [exact, wide])])
        limits = [self._number(float(-LEVELS[self.kind])), self._number(float(LEVELS[self.kind]))]
        level = self._node(graph, "level", "Clip", [steps, *limits])
        if self.kind == "int8":
            return self._node(graph, "stored", "Cast", [level], into, to=INT8), scale
        raised = self._node(graph, "raised", "Add", [level, self._number(float(ZERO_POINT))])
        half = (row.size or 0) // 2
        low, high = (
            self._node(graph, "half", "Slice", [raised, *(self.numbers([n]) for n in (start, start + half, row.axis))])
            for start in (0, half)
        )
        pair = self._node(graph, "pair", "Mul", [high, self._number(16.0)])
        packed = self._node(graph, "packed", "Add", [low, pair])
        return self._node(graph, "stored", "Cast", [packed], into, to=UINT8), scale

    def decode(self, graph: GraphProto, stored: tuple[str, str], row: Row, into: str) -> None:
        """Read stored values, with their scales, under a given name, in the element type of the graph."""
        values, scale = stored
        if self.kind == "float16":
            self._node(graph, "read", "Cast", [values], into, to=row.elem_type)
            return
        level = self._node(graph, "levels", "Cast", [values], to=FLOAT)
        if self.kind == "int4":
            shifted = self._node(graph, "shifted", "Mul", [level, self._number(1 / 16)])
            high = self._node(graph, "high", "Floor", [shifted])
            taken = self._node(graph, "taken", "Mul", [high, self._number(16.0)])
            low = self._node(graph, "low", "Sub", [level, taken])
            raised = self._node(graph, "raised", "Concat", [low, high], axis=row.axis)
            level = self._node(graph, "levels", "Sub", [raised, self._number(float(ZERO_POINT))])
        wide = self._node(graph, "scale", "Cast", [scale], to=FLOAT)
        if row.elem_type == FLOAT:
            self._node(graph, "read", "Mul", [level, wide], into)
        else:
            self._node(
                graph, "read", "Cast", [self._node(graph, "product", "Mul", [level, wide])], into, to=row.elem_type
            )

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
