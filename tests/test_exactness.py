"""What the arithmetic of a graph allows: from its operators and types, never from its name."""

import pytest
from onnx import TensorProto, parser

from kvdoctor.model.precision import exactness_of
from kvdoctor.model.view import GraphView

GRAPH = """
<ir_version: 10, opset_import: ["" : 21, "com.microsoft" : 1]>
g (float[1, 2] x, uint8[2, 1, 8] n, float[2] b) => (float[1, 2] y)
<float[2, 2] w = {1, 2, 3, 4}, int8[2, 2] q = {1, 2, 3, 4}, float s = {0.5}, int8 z = {0}>
{ NODES }
"""


@pytest.mark.parametrize(
    ("nodes", "expected"),
    [
        ("y = MatMul(x, w)", "float"),
        ("p = DequantizeLinear(q, s, z) y = Add(x, p)", "float"),
        ("p = DequantizeLinear(q, s, z) y = MatMul(x, p)", "static-quantization"),
        ("p = DequantizeLinear(q, s, z) t = Transpose(p) y = MatMul(x, t)", "static-quantization"),
        ("y = com.microsoft.MatMulNBits<K = 2, N = 2, bits = 4, block_size = 16>(x, n, b)", "float"),
        (
            "y = com.microsoft.MatMulNBits<K = 2, N = 2, bits = 4, block_size = 16, accuracy_level = 4>(x, n, b)",
            "static-quantization",
        ),
        ("i = QuantizeLinear(x, s, z) y = DequantizeLinear(i, s, z)", "static-quantization"),
        ("i = QuantizeLinear(w, s, z) p = DequantizeLinear(i, s, z) y = Add(x, p)", "float"),
        (
            "i, j, k = DynamicQuantizeLinear(x) m = MatMulInteger(i, q, k) f = Cast<to = 1>(m) y = Mul(f, j)",
            "dynamic-quantization",
        ),
    ],
    ids=["float", "weights", "fused", "transposed", "4 bits", "level 4", "activations", "own weights", "dynamic"],
)
def test_what_is_rounded_decides(nodes: str, expected: str) -> None:
    view = GraphView(parser.parse_model(GRAPH.replace("NODES", nodes)))
    assert exactness_of([view], []) == expected


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_the_float_type_decides_where_nothing_else_rounds(kind: str) -> None:
    outputs = GraphView(
        parser.parse_model(GRAPH.replace("NODES", "y = MatMul(x, w)").replace("(float[1, 2] y)", f"({kind}[1, 2] y)"))
    )
    weights = GraphView(parser.parse_model(GRAPH.replace("NODES", "y = MatMul(x, w)")))
    weights.model.graph.initializer[0].data_type = TensorProto.DataType.Value(kind.upper())
    assert exactness_of([outputs], []) == kind
    assert exactness_of([weights], []) == kind
    assert exactness_of([weights], [], without_rounding=True) == "float"


def test_what_a_runtime_would_fuse_is_not_fused_in_a_float32_copy() -> None:
    nodes = "p = DequantizeLinear(q, s, z) y = MatMul(x, p)"
    view = GraphView(parser.parse_model(GRAPH.replace("NODES", nodes)))
    assert exactness_of([view], [], without_rounding=True) == "float"
