"""Presents that a graph rounds on their way out, and those that it only casts to a wider type."""

import pytest
from onnx import parser

from kvdoctor.analysis.processed_presents import find_processed
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.view import GraphView

CASES = {
    "wider": ("half = Cast <to = 10> (x) logits = Identity (half) present = Cast <to = 1> (half)", False),
    "narrower": ("logits = Identity (x) half = Cast <to = 10> (x) present = Cast <to = 1> (half)", True),
    "8 bits": ("logits = Identity (x) q = QuantizeLinear (x, s, z) present = DequantizeLinear (q, s, z)", True),
    "8 bits, scale computed": (
        "k = Abs (x) logits = Identity (k) m = ReduceMax <keepdims = 0> (k) t = Div (m, s) "
        "q = QuantizeLinear (k, t, z) present = DequantizeLinear (q, t, z)",
        True,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_drops_bits(name: str) -> None:
    body, rounds = CASES[name]
    logits = "float16" if name == "wider" else "float"
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 2] x) => ({logits}[1, 2] logits, float[1, 2] present)
        <float s = {{0.1}}, int8 z = {{0}}> {{ {body} }}"""
    model = ModelProto()
    model.ParseFromString(parser.parse_model(text).SerializeToString())
    found = find_processed(GraphView(model), "present", "logits", cached=True)
    assert (found is not None and found.rounds) == rounds


def test_the_nodes_that_round_are_named_from_the_attention_on() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 2] x) => (float[1, 2] logits, float[1, 2] present) <float s = {0.1}>
        { logits = Identity (x) t = Mul (x, s) r = Round (t) half = Cast <to = 10> (r)
          present = Cast <to = 1> (half) }"""
    model = ModelProto()
    model.ParseFromString(parser.parse_model(text).SerializeToString())
    found = find_processed(GraphView(model), "present", "logits", cached=True)
    assert found is not None
    assert found.words == ('Round "r"', 'Cast "half"')
    assert found.operators == {"Mul", "Round", "Cast", "Identity"}
