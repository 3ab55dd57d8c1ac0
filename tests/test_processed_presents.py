"""Presents that a graph rounds on their way out, and those that it only casts to a wider type."""

import pytest
from onnx import parser

from kvdoctor.analysis.processed_presents import MOST_NODES, ProcessedPresent, find_processed
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
    found = find_behind(body, "float16" if name == "wider" else "float")
    assert (found is not None and found.rounds) == rounds


def test_the_nodes_that_round_are_named_from_the_attention_on() -> None:
    found = find_behind(
        "logits = Identity (x) t = Mul (x, s) r = Round (t) half = Cast <to = 10> (r) present = Cast <to = 1> (half)"
    )
    assert found is not None
    assert found.words == ('Round "r"', 'Cast "half"')
    assert found.operators == {"Mul", "Round", "Cast", "Identity"}


def test_a_long_chain_behind_a_present_is_not_followed_to_its_end() -> None:
    assert find_behind(chain(MOST_NODES - 1)) is not None
    assert find_behind(chain(MOST_NODES)) is None


def chain(count: int) -> str:
    """The body of a graph whose present is negated that often, and rounded."""
    steps = [f"x{number + 1} = Neg (x{number})" for number in range(count)]
    return f"x0 = Abs (x) logits = Identity (x0) {' '.join(steps)} present = Round (x{count})"


def find_behind(body: str, logits: str = "float") -> ProcessedPresent | None:
    """What stands behind the present of a graph with that body."""
    text = f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[1, 2] x) => ({logits}[1, 2] logits, float[1, 2] present)
        <float s = {{0.1}}, int8 z = {{0}}> {{ {body} }}"""
    model = ModelProto()
    model.ParseFromString(parser.parse_model(text).SerializeToString())
    return find_processed(GraphView(model), "present", "logits", cached=True)
