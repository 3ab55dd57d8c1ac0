"""The float32 copy of a graph that rounds its cache on the way out: presents as the attention uses them."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser
from onnx.reference import ReferenceEvaluator
from support.text_fixtures import FOLDER, compile_text

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.analysis.processed_presents import MOST_NODES, ProcessedPresent, find_processed
from kvdoctor.diagnose.float32 import write_float32_copy
from kvdoctor.errors import CannotCheck
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.view import GraphView

PRESENT, ENTRIES = '"present.1.key"', "k1_all"
FEEDS = {
    "input_ids": np.array([[3, 5, 7]]),
    "attention_mask": np.ones((1, 3), np.int64),
    "position_ids": np.arange(3)[None],
    **{
        f"past_key_values.{layer}.{part}": np.zeros((1, 2, 0, 4), np.float32)
        for layer in "01"
        for part in ("key", "value")
    },
}

CONSTANTS = (
    "float level = {0.0625}, float[2] levels = {0.0625, 0.1}, int8 middle = {3}, int8[2] middles = {0, 0}, "
    "float low = {-128}, float high = {127}"
)
BY_HAND = f"ratio = Div ({ENTRIES}, level) near = Round (ratio) held = Clip (near, low, high) "
EXACT = {
    "the axis written out": "bits = QuantizeLinear <axis = 1> ({0}, level, middle) {1} = DequantizeLinear <axis = 1> "
    "(bits, level, middle)",
    "a scale for each head": "bits = QuantizeLinear <axis = 1> ({0}, levels, middles) {1} = DequantizeLinear "
    "<axis = 1> (bits, levels, middles)",
    "no zero point": "bits = QuantizeLinear ({0}, level) {1} = DequantizeLinear (bits, level)",
    "a computed scale": "size = Abs ({0}) most = ReduceMax <keepdims = 0> (size) step = Div (most, high) "
    "bits = QuantizeLinear ({0}, step, middle) {1} = DequantizeLinear (bits, step, middle)",
    "a cast to integers": BY_HAND
    + "bits = Cast <to = 3> (held) number = Cast <to = 1> (bits) {1} = Mul (number, level)",
    "integers that are shifted": BY_HAND + "bits = Cast <to = 6> (held) wide = Cast <to = 6> (middle) "
    "up = Add (bits, wide) down = Sub (up, wide) number = Cast <to = 1> (down) {1} = Mul (number, level)",
    "integers with a scale": BY_HAND + "bits = Cast <to = 3> (held) {1} = DequantizeLinear (bits, level)",
    "integers with a zero point": f"ratio = Div ({ENTRIES}, level) near = Round (ratio) back = Cast <to = 1> (middle) "
    "moved = Add (near, back) bits = Cast <to = 3> (moved) {1} = DequantizeLinear (bits, level, middle)",
}
WRONG = {
    "integers without Round": "ratio = Div ({0}, level) bits = Cast <to = 3> (ratio) number = Cast <to = 1> (bits) "
    "{1} = Mul (number, level)",
    "another value": "more = Mul ({0}, high) ratio = Div (more, level) near = Round (ratio) {1} = Mul (near, level)",
}
TWO_SCALES = (
    "bits = QuantizeLinear ({0}, level, middle) twice = Add (level, level) {1} = DequantizeLinear (bits, twice, middle)"
)


@pytest.mark.parametrize("body", EXACT.values(), ids=EXACT)
def test_the_copy_returns_what_the_attention_uses(body: str, tmp_path: Path) -> None:
    found, right = run_copy(body, tmp_path)
    np.testing.assert_allclose(found, right, atol=1e-6)


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG)
def test_what_is_no_rounding_stays_in_the_copy(body: str, tmp_path: Path) -> None:
    found, right = run_copy(body, tmp_path)
    assert np.abs(found - right).max() > 1e-2


def test_a_pair_by_two_scales_has_no_copy(tmp_path: Path) -> None:
    with pytest.raises(CannotCheck, match="still round"):
        run_copy(TWO_SCALES, tmp_path)


def run_copy(body: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The present of the copy of a decoder with that body before it, and the entries that the attention uses."""
    text = (FOLDER / "decoder-only-healthy.onnxtxt").read_text()
    text = text[text.index("<\n") :]
    joined = f'{PRESENT} = Concat <axis = 2> ("past_key_values.1.key", k1)'
    assert joined in text
    after = f"{joined.replace(PRESENT, ENTRIES)}\n  {body.format(ENTRIES, PRESENT)}\n"
    head, _, graph = text.partition(joined)
    text = f"{head}{after}{graph.replace(PRESENT, ENTRIES)}".replace(
        "float one = {1}", f"float one = {{1}}, {CONSTANTS}"
    )
    onnx.save(compile_text(text), folder / "model.onnx")
    opened = open_folder(str(folder))
    contract = read_contract(opened.stacks[0], opened.side_cars)
    (folder / "copy").mkdir()
    write_float32_copy(opened.files, contract, folder / "copy")
    model = onnx.load(folder / "copy" / "model.onnx")
    model.graph.output.append(onnx.helper.make_tensor_value_info(ENTRIES, onnx.TensorProto.FLOAT, None))
    found, right = ReferenceEvaluator(model).run([PRESENT.strip('"'), ENTRIES], FEEDS)
    return np.asarray(found), np.asarray(right)


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
