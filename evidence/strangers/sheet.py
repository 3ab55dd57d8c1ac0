"""Graphs written operator by operator: values are names, arrays become initializers."""

import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

INT, INT32, FLOAT, BOOL, HALF = (getattr(TensorProto, name) for name in ("INT64", "INT32", "FLOAT", "BOOL", "FLOAT16"))
Operand = str | int | float | Sequence[Any] | NDArray[Any]
FAR = 2**31


class Weights:
    """Initializers of one file: random weights by name, and constants by value."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.arrays: dict[str, NDArray[np.generic]] = {}

    def weight(self, name: str, *shape: int, scale: float | None = None) -> str:
        """A random float32 weight, the same under the same name in every graph of one seed."""
        random = np.random.default_rng([self.seed, zlib.crc32(name.encode())])
        values = random.standard_normal(shape) * (scale or shape[0] ** -0.5)
        self.arrays[f"weights.{name}"] = values.astype(np.float32)
        return f"weights.{name}"

    def constant(self, value: Operand) -> str:
        """The name of a constant: integers are int64, floats float32."""
        if isinstance(value, str):
            return value
        array = np.asarray(value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        kind = f"{array.dtype}{list(array.shape)}".encode()
        name = f"const_{zlib.crc32(kind + array.tobytes()):08x}"
        self.arrays[name] = array
        return name


class Sheet:
    """The nodes of one graph, branch or loop body."""

    def __init__(self, weights: Weights, prefix: str = "") -> None:
        self.weights, self.prefix = weights, prefix
        self.nodes: list[onnx.NodeProto] = []

    def fresh(self, kind: str) -> str:
        """A name that no other value of the file has."""
        return f"{self.prefix}{kind.lower()}_{len(self.nodes)}"

    def op(self, kind: str, *inputs: Operand, **attributes: Any) -> str:
        """The first output of a new node."""
        return self.ops(1, kind, *inputs, **attributes)[0]

    def ops(self, count: int, kind: str, *inputs: Operand, **attributes: Any) -> list[str]:
        """All outputs of a new node."""
        name = self.fresh(kind)
        outputs = [name if count == 1 else f"{name}_{number}" for number in range(count)]
        names = [self.weights.constant(value) for value in inputs]
        self.nodes.append(helper.make_node(kind, names, outputs, name=name, **attributes))
        return outputs

    def rename(self, value: str, name: str) -> None:
        """Give a value a second name, that of an output."""
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"{self.prefix}to_{name}"))

    # Shapes

    def size(self, value: str, axis: int) -> str:
        """int64[1]: the length of one axis."""
        return self.op("Slice", self.op("Shape", value), [axis], [axis + 1] if axis != -1 else [FAR], [0])

    def join(self, *parts: Operand, axis: int = 0) -> str:
        return self.op("Concat", *parts, axis=axis)

    def part(self, value: str, start: Operand, end: Operand, axis: int, step: int = 1) -> str:
        first, last = ([each] if isinstance(each, int) else each for each in (start, end))
        return self.op("Slice", value, first, last, [axis], [step])

    def reshape(self, value: str, *sizes: Operand) -> str:
        """Sizes are numbers or int64[1]."""
        if all(isinstance(size, int) for size in sizes):
            return self.op("Reshape", value, list(sizes))
        return self.op("Reshape", value, self.join(*([s] if isinstance(s, int) else s for s in sizes)), allowzero=1)

    def move(self, value: str, *order: int) -> str:
        return self.op("Transpose", value, perm=list(order)) if list(order) != sorted(order) else value

    def lift(self, value: str, *axes: int) -> str:
        return self.op("Unsqueeze", value, list(axes))

    def drop(self, value: str, *axes: int) -> str:
        return self.op("Squeeze", value, list(axes))

    def cast(self, value: str, kind: int) -> str:
        return self.op("Cast", value, to=kind)

    def count(self, length: str) -> str:
        """int64[length]: 0, 1, 2, ..."""
        return self.op("Range", 0, self.drop(length, 0), 1)

    def zeros(self, *sizes: Operand, kind: int = FLOAT) -> str:
        zero = numpy_helper.from_array(np.zeros(1, helper.tensor_dtype_to_np_dtype(kind)))
        return self.op("ConstantOfShape", self.join(*([s] if isinstance(s, int) else s for s in sizes)), value=zero)

    # Arithmetic

    def add(self, left: Operand, right: Operand) -> str:
        return self.op("Add", left, right)

    def sub(self, left: Operand, right: Operand) -> str:
        return self.op("Sub", left, right)

    def mul(self, left: Operand, right: Operand) -> str:
        return self.op("Mul", left, right)

    def dot(self, left: Operand, right: Operand) -> str:
        return self.op("MatMul", left, right)

    def both(self, left: str, right: str) -> str:
        return self.op("And", left, right)

    def where(self, condition: str, yes: Operand, no: Operand) -> str:
        return self.op("Where", condition, yes, no)

    def sum(self, value: str, *axes: int, keep: bool = True) -> str:
        return self.op("ReduceSum", value, list(axes), keepdims=int(keep))

    def mean(self, value: str, *axes: int) -> str:
        return self.op("ReduceMean", value, list(axes), keepdims=1)

    def silu(self, value: str) -> str:
        return self.mul(value, self.op("Sigmoid", value))

    def linear(self, value: str, name: str, inner: int, outer: int) -> str:
        return self.dot(value, self.weights.weight(name, inner, outer))

    def norm(self, value: str, name: str, width: int, centred: bool = False) -> str:
        """RMS norm, or layer norm where centred."""
        if centred:
            value = self.sub(value, self.mean(value, -1))
        root = self.op("Sqrt", self.add(self.mean(self.mul(value, value), -1), np.float32(1e-5)))
        scale = self.weights.weight(name, width, scale=0.1)
        return self.mul(self.op("Div", value, root), self.add(scale, np.float32(1)))

    # Graphs inside

    def scan(
        self,
        body: Callable[["Sheet", list[str], list[str]], tuple[list[str], list[str]]],
        states: Sequence[str],
        inputs: Sequence[str],
        axis: int = 1,
    ) -> tuple[list[str], list[str]]:
        """Scan over an axis of float inputs; `body` returns the next states and the values of one step."""
        name = self.fresh("scan")
        inner = Sheet(self.weights, f"{name}_")
        into = [f"{name}_s{n}" for n in range(len(states))], [f"{name}_x{n}" for n in range(len(inputs))]
        after, made = body(inner, *into)
        outs = [f"{name}_o{n}" for n in range(len(after) + len(made))]
        for value, out in zip([*after, *made], outs, strict=True):
            inner.rename(value, out)
        typed = [helper.make_tensor_value_info(each, FLOAT, None) for each in [*into[0], *into[1]]]
        graph = helper.make_graph(
            inner.nodes, name, typed, [helper.make_tensor_value_info(each, FLOAT, None) for each in outs]
        )
        found = self.ops(
            len(outs),
            "Scan",
            *states,
            *inputs,
            body=graph,
            num_scan_inputs=len(inputs),
            scan_input_axes=[axis] * len(inputs),
            scan_output_axes=[axis] * len(made),
        )
        return found[: len(states)], found[len(states) :]
