"""The rules for axes and numbers, against what ONNX Runtime makes of the same node."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

from kvdoctor.model.node_sizes import NodeSizes, axis_within, shape_from
from kvdoctor.model.operator_axes import KINDS, NUMBERS, OWN, axes_of, numbers_of
from kvdoctor.model.operators import OPERATORS
from kvdoctor.model.proto import AttributeProto

Array = np.ndarray[Any, Any]
Case = tuple[str, list[Array], dict[str, Any]]
OPSET = 21


def size(*shape: int) -> Array:
    return np.ones(shape, np.float32)


def row(*numbers: Any) -> Array:
    return np.array(numbers if numbers else [], np.int64)


GRID = np.arange(12).reshape(3, 4)

AXES: list[Case] = [
    ("Add", [size(3, 1, 5), size(4, 1)], {}),
    ("Where", [size(4, 1).astype(bool), size(1, 5), size()], {}),
    ("Softmax", [size(2, 3)], {}),
    ("CumSum", [size(2, 3), np.array(1)], {}),
    ("MatMul", [size(2, 1, 4, 5), size(3, 5, 6)], {}),
    ("MatMul", [size(5), size(3, 5, 6)], {}),
    ("MatMul", [size(3, 4, 5), size(5)], {}),
    ("MatMulInteger", [size(4, 5).astype(np.uint8), size(5, 6).astype(np.uint8)], {}),
    ("Gemm", [size(5, 4), size(6, 5)], {"transA": 1, "transB": 1}),
    ("Gemm", [size(4, 5), size(5, 6), size(6)], {}),
    ("Einsum", [size(2, 3, 4), size(2, 4, 5)], {"equation": "bij, bjk -> kbi"}),
    ("Einsum", [size(3, 4), size(4, 5)], {"equation": "ij,jk"}),
    ("Transpose", [size(2, 3, 4)], {}),
    ("Transpose", [size(2, 3, 4)], {"perm": [1, 2, 0]}),
    ("Reshape", [size(2, 3, 4), row(0, -1, 2)], {}),
    ("Reshape", [size(2, 3, 4), row(6, -1)], {}),
    ("Reshape", [size(2, 0, 4), row(0, 8)], {"allowzero": 1}),
    ("Flatten", [size(2, 3, 4, 5)], {"axis": -1}),
    ("Expand", [size(3, 1), row(2, 1, 4)], {}),
    ("Tile", [size(2, 3), row(4, 1)], {}),
    ("Concat", [size(2, 3, 4), size(2, 5, 4)], {"axis": -2}),
    ("Gather", [size(2, 3, 4), row([0, 1, 1, 2, 0]).reshape(1, 5)], {"axis": 1}),
    ("Gather", [size(2, 3, 4), row(0, 1)], {"axis": -1}),
    ("Gather", [size(2, 3, 4), np.array(1)], {}),
    ("GatherElements", [size(2, 3), np.zeros((2, 5), np.int64)], {"axis": 1}),
    ("GatherND", [size(2, 3, 4, 5), np.zeros((2, 6, 1), np.int64)], {"batch_dims": 1}),
    ("GatherND", [size(2, 3, 4), np.zeros((6, 2), np.int64)], {}),
    ("Slice", [size(6, 7, 8), row(-1, 1), row(-100, 5), row(-1, 0), row(-2, 1)], {}),
    ("Slice", [size(6, 7), row(2), row(1 << 40)], {}),
    ("Split", [size(2, 8)], {"axis": 1, "num_outputs": 3}),
    ("Split", [size(2, 8)], {"axis": -1, "num_outputs": 4}),
    ("Split", [size(8, 2), row(5, 3)], {}),
    ("Squeeze", [size(1, 3, 1)], {}),
    ("Squeeze", [size(1, 3, 1), row(-1)], {}),
    ("Unsqueeze", [size(3, 4), row(-1, 0)], {}),
    ("ReduceSum", [size(2, 3, 4), row(-1, 0)], {"keepdims": 0}),
    ("ReduceSum", [size(2, 3)], {"noop_with_empty_axes": 1}),
    ("ReduceMean", [size(2, 3)], {}),
    ("ArgMax", [size(2, 3)], {"axis": 1, "keepdims": 0}),
    ("ArgMin", [size(2, 3)], {}),
    ("TopK", [size(2, 7), row(3)], {}),
    ("Pad", [size(2, 3), row(1, 4), np.array(0, np.float32), row(-1)], {}),
    ("Shape", [size(2, 3, 4)], {"start": -2}),
    ("Size", [size(2, 3)], {}),
    ("ConstantOfShape", [row(2, 3)], {}),
    ("Range", [np.array(3), np.array(12), np.array(4)], {}),
]

LISTED: list[Case] = [
    ("Shape", [size(2, 3, 4)], {"start": 1, "end": -1}),
    ("Size", [size(2, 3, 4)], {}),
    ("Identity", [row(3, 4)], {}),
    ("Cast", [row(3, 4)], {"to": 6}),
    ("Unsqueeze", [row(3, 4), row(0)], {}),
    ("Reshape", [GRID, row(2, -1)], {}),
    ("Expand", [row(7), row(3)], {}),
    ("Concat", [row(3, 4), row(5)], {"axis": 0}),
    ("Gather", [row(3, 4, 5), row(-1, 0)], {}),
    ("Gather", [GRID, row(3, -3)], {"axis": 1}),
    ("Slice", [row(3, 4, 5), row(-1), row(-100), row(0), row(-1)], {}),
    ("Slice", [GRID, row(1), row(3), row(1)], {}),
    ("Where", [np.array([True, False]), row(3, 4), row(5)], {}),
    ("Add", [row(3, 4), row(5)], {}),
    ("Sub", [row(3, 4), row(5, 6)], {}),
    ("Mul", [row(3, 4), np.array(5)], {}),
    ("Div", [row(9, 4), row(2)], {}),
    ("Min", [row(3, 4), row(9, 1)], {}),
    ("Max", [row(3, 4), row(9, 1)], {}),
    ("Equal", [row(3, 4), row(3)], {}),
    ("Neg", [row(3, 4)], {}),
    ("ReduceProd", [row(3, 4)], {"keepdims": 0}),
    ("ConstantOfShape", [row(2)], {}),
]

NEEDS_ALL = ("Squeeze", "Range", "ConstantOfShape")
"""Operators of which nothing is known where one size or number is not."""


def run(op: str, inputs: Sequence[Array], attributes: dict[str, Any]) -> list[Array]:
    """The outputs of a node, computed by ONNX Runtime."""
    outputs = [f"y{index}" for index in range(count_outputs(op, inputs, attributes))]
    names = [f"x{index}" for index in range(len(inputs))]
    types = [helper.np_dtype_to_tensor_dtype(array.dtype) for array in inputs]
    given = [helper.make_tensor_value_info(*one, None) for one in zip(names, types, strict=True)]
    made = [helper.make_empty_tensor_value_info(name) for name in outputs]
    graph = helper.make_graph([helper.make_node(op, names, outputs, **attributes)], "one node", given, made)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=9)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found: list[Array] = session.run(None, dict(zip(names, inputs, strict=True)))
    return found


def count_outputs(op: str, inputs: Sequence[Array], attributes: dict[str, Any]) -> int:
    if op == "Split":
        return attributes.get("num_outputs") or len(inputs[1])
    return 2 if op == "TopK" else 1


def described(case: Case, hidden: tuple[int, int] | None = None) -> NodeSizes:
    """The node with all shapes and numbers; `hidden` is an input and an axis or number of it that is not known."""
    op, inputs, attributes = case
    kept = {name: AttributeProto.FromString(helper.make_attribute(name, value).SerializeToString())
            for name, value in attributes.items()}  # fmt: skip

    def known(index: int, sizes: Sequence[int]) -> list[int | None]:
        return [None if (index, at) == hidden else int(size) for at, size in enumerate(sizes)]

    def numbers(index: int) -> list[int | None] | None:
        array = inputs[index]
        return known(index, array.ravel().tolist()) if array.dtype.kind in "ib" else None

    names = [f"x{index}" for index in range(len(inputs))]
    outputs = count_outputs(op, inputs, attributes)
    return NodeSizes(op, names, outputs, kept.get, lambda index: known(index, inputs[index].shape), numbers)


def name(case: Case) -> str:
    return f"{case[0]} {case[2]}" if case[2] else case[0]


@pytest.mark.parametrize("case", AXES, ids=name)
def test_axes_are_those_of_the_runtime(case: Case) -> None:
    node = described(case)
    made = axes_of(node)
    assert made is not None
    assert [shape_from(node, sizes) for sizes in made] == [array.shape for array in run(*case)][: len(made)]


@pytest.mark.parametrize("case", LISTED, ids=name)
def test_numbers_are_those_of_the_runtime(case: Case) -> None:
    node = described(case)
    made = numbers_of(node)
    assert made is not None
    assert shape_from(node, made) == tuple(run(*case)[0].ravel().tolist())


@pytest.mark.parametrize("case", [*AXES, *LISTED], ids=name)
def test_what_is_known_of_a_part_of_the_sizes_is_right(case: Case) -> None:
    outputs, decided = run(*case), 0
    for index, array in enumerate(case[1]):
        for at in range(max(array.ndim, array.size if array.dtype.kind == "i" else 0)):
            node = described(case, (index, at))
            for sizes, output in zip(axes_of(node) or (), outputs, strict=False):
                shape = shape_from(node, sizes)
                assert len(shape) == output.ndim
                assert all(size in (None, real) for size, real in zip(shape, output.shape, strict=True))
                decided += sum(size is not None for size in shape)
            listed = shape_from(node, numbers_of(node) or ()) if outputs[0].dtype.kind in "ib" else ()
            assert all(number in (None, real) for number, real in zip(listed, outputs[0].ravel(), strict=False))
            decided += sum(number is not None for number in listed)
    assert decided or case[0] in NEEDS_ALL or all(array.size == 1 for array in outputs)


def test_an_axis_keeps_its_place_where_it_is_cut_or_repeated() -> None:
    sliced = axes_of(described(("Slice", [size(6, 7), row(2), row(4), row(1)], {})))
    joined = axes_of(described(("Concat", [size(2, 3), size(2, 5)], {"axis": 1})))
    assert sliced is not None
    assert joined is not None
    assert [axis_within(one, 0) for one in sliced[0]] == [0, 1]
    assert [axis_within(one, 1) for one in joined[0]] == [0, 1]


def test_every_rule_is_tried() -> None:
    tried = {case[0] for case in AXES}
    assert set(OWN) - {"MatMulNBits"} <= tried, "MatMulNBits is in no opset of ONNX"
    assert {entry.axes for name, entry in OPERATORS.items() if name in tried} == {"", *KINDS}
    assert set(NUMBERS) <= {case[0] for case in LISTED}
