"""A graph in the making: nodes of one graph or branch, over weights that all branches share."""

import zlib
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
FAR = 2**60
Size = int | str
Array = NDArray[Any]


class Weights:
    """Weights and constants by name. The same name and seed give the same numbers in each file and branch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.held: dict[str, onnx.TensorProto] = {}

    def normal(self, name: str, shape: tuple[int, ...], scale: float = 1.0) -> str:
        """Random numbers that depend on the name alone: float[shape]."""
        if name not in self.held:
            random = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
            self.put(name, (random.standard_normal(shape) * scale).astype(np.float32))
        return name

    def put(self, name: str, array: Array) -> str:
        self.held[name] = numpy_helper.from_array(array, name)
        return name

    def constant(self, value: Any) -> str:
        """A constant by its content; floats are float32, integers int64."""
        array = np.asarray(value)
        array = array.astype({"f": np.float32, "i": np.int64, "b": np.bool_}[array.dtype.kind])
        digest = zlib.crc32(array.tobytes() + repr((array.shape, str(array.dtype))).encode())
        name = f"constant.{digest:08x}"
        return name if name in self.held else self.put(name, np.ascontiguousarray(array).reshape(array.shape))


class Sheet:
    """Nodes in order. A value is a name; an operand that is no name becomes a constant."""

    def __init__(self, weights: Weights, prefix: str = "") -> None:
        self.weights, self.prefix = weights, prefix
        self.nodes: list[onnx.NodeProto] = []
        self.known: dict[tuple[Any, ...], str] = {}

    def op(self, kind: str, *operands: Any, **attributes: Any) -> str:
        """Add a node, or give the value of an equal one."""
        names = [value if isinstance(value, str) else self.weights.constant(value) for value in operands]
        key = (kind, *names, repr(sorted(attributes.items())))
        if key not in self.known or kind.startswith("Random"):
            made = f"{self.prefix}v{len(self.nodes)}"
            self.nodes.append(
                helper.make_node(kind, names, [made], f"{self.prefix}{kind}_{len(self.nodes)}", **attributes)
            )
            self.known[key] = made
        return self.known[key]

    def hand_out(self, value: str, name: str) -> None:
        """Give a value the name of an output."""
        self.nodes.append(helper.make_node("Identity", [value], [name], f"{self.prefix}out.{name}"))

    def cast(self, value: str, to: int) -> str:
        return self.op("Cast", value, to=to)

    def size(self, value: str, axis: int) -> str:
        """int64[1]."""
        return self.op("Slice", self.op("Shape", value), [axis], [axis + 1], [0])

    def count(self, length: str) -> str:
        """int64[length] of 0, 1, ...; the length is int64[1]."""
        return self.op("Range", 0, self.op("Squeeze", length, [0]), 1)

    def part(self, value: str, begin: Any, end: Any, axis: int) -> str:
        """Slice, with begin and end int64[1]."""
        return self.op("Slice", value, begin, end, [axis])

    def last(self, value: str, length: Any, axis: int) -> str:
        """The last `length` (int64[1], 1 or more) of an axis."""
        begin = [-length] if isinstance(length, int) else self.op("Neg", length)
        return self.part(value, begin, [FAR], axis)

    def all_of(self, *terms: str) -> str:
        found = terms[0]
        for term in terms[1:]:
            found = self.op("And", found, term)
        return found

    def index(self, value: str, axes: str, axis: str) -> str:
        """The index along one axis, shaped to broadcast with a value of these axes: int64[1, .., n, .., 1]."""
        row = self.count(self.length(value, axes, axis))
        around = [i for i, letter in enumerate(axes) if letter != axis]
        return self.op("Unsqueeze", row, around) if around else row

    def length(self, value: str, axes: str, axis: str) -> str:
        """int64[1]; of an axis that may be 1 where the value is broadcast, the length that it stands for."""
        return self.size(value, axes.index(axis))

    def turned(self, value: str, order: str, to: str) -> str:
        """Transpose from axes in one order to another."""
        return value if order == to else self.op("Transpose", value, perm=[order.index(axis) for axis in to])


def declared(name: str, dtype: int, shape: tuple[Size, ...]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: list[onnx.NodeProto],
    inputs: list[onnx.ValueInfoProto],
    outputs: list[onnx.ValueInfoProto],
    weights: Weights,
) -> onnx.ModelProto:
    """A model with those weights that its nodes, or the branches of an If, read."""
    read: set[str] = set()
    todo = list(nodes)
    while todo:
        node = todo.pop()
        read.update(node.input)
        todo.extend(inner for a in node.attribute for inner in a.g.node)
    held = [tensor for name, tensor in weights.held.items() if name in read]
    graph = helper.make_graph(nodes, "decoder", inputs, outputs, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
