"""A cache for a decoder that has none: converted and proved, or refused by the node that stands in the way."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.isolated import FIXTURES, call, give_up, kvdoctor
from support.proofs import claims, repair_of
from support.text_fixtures import compile_text

from kvdoctor.addons.conversions import api as conversions
from kvdoctor.addons.conversions.graphs.cache_axes import Mixes, multiply, regroup, spell_product
from kvdoctor.errors import UsageError

SCRATCH = Path(__file__).parents[1] / "fixtures" / "from_scratch" / "cacheless.onnx"

LAYER = """
  q{i} = Einsum <equation = "bsh,hnd->bnsd"> (x{i}, w_q{i})
  k{i} = Einsum <equation = "bsh,hnd->bnsd"> (x{i}, w_k{i})
  v{i} = MatMul (x{i}, w_v{i})
  shape{i} = Shape (v{i})
  lead{i} = Slice (shape{i}, from_first, to_second)
  apart{i} = Concat <axis = 0> (lead{i}, heads)
  split{i} = Reshape (v{i}, apart{i})
  values{i} = Transpose <perm = [0, 2, 1, 3]> (split{i})
  turned{i} = Transpose <perm = [0, 1, 3, 2]> (k{i})
  scores{i} = MatMul (q{i}, turned{i})
  masked{i} = Add (scores{i}, bias)
  shares{i} = Softmax <axis = -1> (masked{i})
  mixed{i} = MatMul (shares{i}, values{i})
  back{i} = Transpose <perm = [0, 2, 1, 3]> (mixed{i})
  joined{i} = Reshape (back{i}, flat)
  out{i} = MatMul (joined{i}, w_o{i})
  x{j} = Add (x{i}, out{i})
"""
DECODER = (
    """
< ir_version: 8, opset_import: ["" : 17] >
decoder (int64[batch, length] input_ids, int64[batch, length] attention_mask) => (float[batch, length, 16] logits)
<
  float[16, 8] w_tokens, float[96, 8] w_places, float[8, 16] w_logits,
  float[8, 2, 4] w_q0, float[8, 2, 4] w_k0, float[8, 8] w_v0, float[8, 8] w_o0,
  float[8, 2, 4] w_q1, float[8, 2, 4] w_k1, float[8, 8] w_v1, float[8, 8] w_o1,
  int64[2] heads = {2, 4}, int64[3] flat = {0, 0, 8}, int64[1] from_first = {0}, int64[1] to_second = {2},
  int64[2] heads_and_rows = {1, 2}, float one = {1}, float hide = {10000}, int64 second = {1}, int64 zero = {0},
  int64[1] rows = {1}
>
{
  sizes = Shape (input_ids)
  count = Gather (sizes, second)
  counted = Unsqueeze (count, from_first)
  square = Concat <axis = 0> (counted, counted)
  ones = ConstantOfShape <value = float[1] {1}> (square)
  causal = Trilu <upper = 0> (ones)
  real = Cast <to = 1> (attention_mask)
  real4 = Unsqueeze (real, heads_and_rows)
  seen = Mul (causal, real4)
  seen_less = Sub (seen, one)
  bias = Mul (seen_less, hide)
  numbers = CumSum (attention_mask, second)
  index = Sub (numbers, second)
  least = Max (index, zero)
  places = Gather (w_places, least)
  tokens = Gather (w_tokens, input_ids)
  x0 = Add (tokens, places)
"""
    + LAYER.format(i=0, j=1)
    + LAYER.format(i=1, j=2)
    + "  logits = MatMul (x2, w_logits)\n}\n"
)


def write(folder: Path, *edits: tuple[str, str]) -> Path:
    """The decoder after replacements in its text."""
    text = DECODER
    for old, new in edits:
        assert old in text, old
        text = text.replace(old, new)
    folder.mkdir(exist_ok=True)
    path = folder / "model.onnx"
    onnx.save(compile_text(text), path)
    return path


def decode(session: ort.InferenceSession, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens of a loop that feeds presents back where the graph has pasts."""
    names = [one.name for one in session.get_outputs()]
    pasts = {one.name: one.shape for one in session.get_inputs() if one.name.startswith("past_")}
    held = {
        name: np.zeros([1, *(0 if isinstance(s, str) else s for s in shape[1:])], "f4") for name, shape in pasts.items()
    }
    tokens, fed = list(prompt), 0
    for _ in range(count):
        given: dict[str, Any] = {"input_ids": np.array([tokens[fed if pasts else 0 :]])}
        if "attention_mask" in [one.name for one in session.get_inputs()]:
            given["attention_mask"] = np.ones((1, len(tokens)), np.int64)
        found = dict(zip(names, session.run(None, given | held), strict=True))
        held = {name: found[name.replace("past_key_values", "present")] for name in held}
        fed = len(tokens)
        tokens.append(int(found["logits"][0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_decoder_gets_a_cache_that_step_test_calls_healthy(tmp_path: Path) -> None:
    source = write(tmp_path / "model")
    before = source.read_bytes()
    report = conversions.convert(source.parent, tmp_path / "out", cache="growing")
    assert report.verdict == "healthy"
    assert all(claims(report).values())
    assert len(claims(report)) == 4
    assert source.read_bytes() == before
    made = onnx.load(tmp_path / "out" / "model.onnx")
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in made.graph.input}
    assert shapes["attention_mask"] == ["batch", "past_sequence_length + length"]
    for layer in (0, 1):
        for part in ("key", "value"):
            assert shapes[f"past_key_values.{layer}.{part}"] == ["batch", 2, "past_sequence_length", 4]
    old, new = (ort.InferenceSession(folder / "model.onnx") for folder in (source.parent, tmp_path / "out"))
    assert decode(new, [3, 1, 4], 20) == decode(old, [3, 1, 4], 20)
    (compared,) = (entry for entry in repair_of(report).proof if "new rows" in entry.claim)
    assert "prompts of 1, 2, 3, 4, 5," in compared.detail
    assert "padding on the left" in compared.detail
    assert set(report.measured["cost"]["decoding"]["decoder"]) >= {"10", "50"}


@pytest.mark.parametrize(
    ("edits", "node"),
    [
        ([("causal = Trilu <upper = 0> (ones)", "causal = Identity (ones)")], 'Softmax "shares0"'),
        ([("causal = Trilu <upper = 0> (ones)", "causal = Trilu <upper = 1> (ones)")], 'Softmax "shares0"'),
        ([("logits = MatMul (x2, w_logits)", "mean = ReduceMean <axes = [1]> (x2)\n"
           "  all = Add (x2, mean)\n  logits = MatMul (all, w_logits)")], 'ReduceMean "mean"'),
        ([("x0 = Add (tokens, places)", "over = Softmax <axis = 1> (tokens)\n  x0 = Add (over, places)")],
         'Softmax "over"'),
        ([("x0 = Add (tokens, places)", "sums = CumSum (tokens, second)\n  x0 = Add (sums, places)")], 'CumSum "sums"'),
        ([("out0 = MatMul (joined0, w_o0)", "first = Slice (joined0, from_first, rows, rows)\n  "
           "out0 = MatMul (first, w_o0)")], 'Slice "first"'),
        ([("x0 = Add (tokens, places)", "turned = Transpose <perm = [0, 2, 1]> (tokens)\n  wide = Conv "
           "<kernel_shape = [3], pads = [2, 0]> (turned, w_conv)\n  flipped = Transpose <perm = [0, 2, 1]> (wide)\n  "
           "x0 = Add (flipped, places)"), ("int64[1] rows = {1}", "int64[1] rows = {1}, float[8, 8, 3] w_conv")],
         'Conv "wide"'),
        ([("real = Cast <to = 1> (attention_mask)", "real = Cast <to = 1> (input_ids)")], 'Mul "seen"'),
    ],
    ids=["not-causal", "one-too-far", "pooling", "softmax-over-time", "cumulative", "first-token", "convolution",
         "mask-from-tokens"],
)  # fmt: skip
def test_what_mixes_positions_otherwise_is_refused_by_name(
    edits: list[tuple[str, str]], node: str, tmp_path: Path
) -> None:
    source = write(tmp_path / "model", *edits)
    with pytest.raises(UsageError, match=re.escape(f"the node {node} stands in the way")):
        conversions.convert(source, tmp_path / "out", cache="growing")
    assert not (tmp_path / "out").exists()


def test_what_only_a_run_can_tell_is_not_proved_and_not_written(tmp_path: Path) -> None:
    """Keys that are scaled by the length of the sequence change with each token, so a cache holds wrong ones."""
    scaled = "length = Cast <to = 1> (count)\n  k0 = Mul (plain0, length)"
    source = write(tmp_path / "model", ("  k0 = Einsum", "  plain0 = Einsum"), ("  v0 =", f"  {scaled}\n  v0 ="))
    report = conversions.convert(source, tmp_path / "out", cache="growing")
    assert not (tmp_path / "out").exists()
    assert not all(claims(report).values())
    assert "the copy was not proved, so it was not written" in report.notes


def test_queries_may_be_the_second_operand(tmp_path: Path) -> None:
    """Scores of keys by queries, of which the softmax runs over the first."""
    edits = []
    for i in "01":
        edits += [
            (f"[0, 1, 3, 2]> (k{i})", f"[0, 1, 3, 2]> (q{i})"),
            (f"scores{i} = MatMul (q{i}, turned{i})", f"columns{i} = MatMul (k{i}, turned{i})"),
            (f"masked{i} = Add (scores{i}, bias)", f"masked{i} = Add (columns{i}, columnar)"),
            (f"shares{i} = Softmax <axis = -1> (masked{i})", f"weights{i} = Softmax <axis = 2> (masked{i})\n  "
             f"shares{i} = Transpose <perm = [0, 1, 3, 2]> (weights{i})"),
        ]  # fmt: skip
    edits.append(("  numbers =", "  columnar = Transpose <perm = [0, 1, 3, 2]> (bias)\n  numbers ="))
    report = conversions.convert(write(tmp_path / "model", *edits), tmp_path / "out", cache="growing")
    assert report.verdict == "healthy"
    assert all(claims(report).values())


def test_int8_weights_are_proved_without_their_rounding(tmp_path: Path) -> None:
    edits = [
        ("logits = MatMul (x2, w_logits)", "q, scale, point = DynamicQuantizeLinear (x2)\n  "
         "product = MatMulInteger (q, w_small, point)\n  wide = Cast <to = 1> (product)\n  logits = Mul (wide, scale)"),
        ("float[8, 16] w_logits", "int8[8, 16] w_small"),
    ]  # fmt: skip
    source = write(tmp_path / "model", *edits)
    model = onnx.load(source)
    (small,) = (one for one in model.graph.initializer if one.name == "w_small")
    drawn = np.random.default_rng(0).integers(-90, 90, (8, 16)).astype(np.int8)
    small.CopyFrom(onnx.numpy_helper.from_array(drawn, "w_small"))
    onnx.save(model, source)
    report = conversions.convert(source, tmp_path / "out", cache="growing")
    assert all(claims(report).values())
    assert any("one scale from all tokens" in line for line in repair_of(report).loop)


def test_a_hand_written_gpt_and_the_command_that_is_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = kvdoctor("step-test", SCRATCH, "--format", "json")
    (entry,) = json.loads(done.stdout)["not_checked"]
    assert f"kvdoctor convert {SCRATCH} --cache growing -o CACHED makes a copy" in entry["reason"]
    assert "each token costs a pass over all tokens before" in entry["reason"]
    made = kvdoctor("convert", SCRATCH, "--cache", "growing", "-o", tmp_path / "CACHED")
    assert (made.returncode, (tmp_path / "CACHED" / SCRATCH.name).is_file()) == (0, True)
    assert "times as fast" in made.stdout
    old, new = (ort.InferenceSession(path) for path in (SCRATCH, tmp_path / "CACHED" / SCRATCH.name))
    assert decode(new, [5, 6], 30) == decode(old, [5, 6], 30)
    monkeypatch.chdir(SCRATCH.parent)  # a copy there would be refused
    assert "--cache growing -o ../CACHED makes a copy" in kvdoctor("inspect", SCRATCH.name).stdout


def test_where_it_would_be_refused_the_reason_is_said_instead(tmp_path: Path) -> None:
    source = write(tmp_path / "model", ("causal = Trilu <upper = 0> (ones)", "causal = Identity (ones)"))
    done = kvdoctor("inspect", source, "--format", "json")
    (entry, *_) = json.loads(done.stdout)["not_checked"]
    assert "--cache growing would refuse it" in entry["reason"]
    assert 'Softmax "shares0"' in entry["reason"]


@pytest.mark.parametrize(
    ("edits", "reason"),
    [
        ([("int64[batch, length] input_ids", "int64[batch, 8] input_ids")], "takes a fixed number of tokens"),
        ([("int64[batch, length] attention_mask", "int64[batch, length] attention_mask, float[batch] mood")], "'mood'"),
        ([('opset_import: ["" : 17]', 'opset_import: ["" : 10]')], "opset 10"),
    ],
    ids=["frozen", "unknown-input", "old-opset"],
)
def test_inputs_that_cannot_be_followed_are_named(edits: list[tuple[str, str]], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        conversions.convert(write(tmp_path / "model", *edits), tmp_path / "out", cache="growing")


def test_it_is_the_only_conversion_of_its_call(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--cache growing alone"):
        conversions.convert(write(tmp_path / "model"), tmp_path / "out", cache="growing", logits="last")


EXPORTED = (*("gpt2", "llama-gqa", "opt", "bloom", "neox"), *("marian-4.57.6", "t5", "whisper", "bart"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_of_optimum_without_a_cache_gets_one(name: str, tmp_path: Path) -> None:
    done = call([sys.executable, FIXTURES / "make_exports.py", f"cacheless-{name}", "--out", tmp_path])
    if done.returncode and "No solution found" in done.stderr:
        give_up(done.stderr[-500:])
    assert done.returncode == 0, done.stderr
    source = tmp_path / f"cacheless-{name}"
    report = conversions.convert(source, tmp_path / "out", cache="growing")
    assert report.verdict == "healthy"
    assert all(claims(report).values())
    assert "greedy decoding chooses the tokens of the original" in claims(report)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=4), st.integers(0, 4), st.data())
def test_an_axis_keeps_its_label_under_every_shape_that_keeps_it(sizes: list[int], at: int, data: Any) -> None:
    tokens = 23
    at = min(at, len(sizes))
    before = (*sizes[:at], tokens, *sizes[at:])
    front, back = int(np.prod(sizes[:at])), int(np.prod(sizes[at:]))
    after = data.draw(st.sampled_from([(front, tokens, back), (front, 1, tokens, back), (front * tokens, back)]))
    labels = tuple("new" if index == at else "" for index in range(len(before)))
    found = regroup(labels, before, after, tokens)  # type: ignore[arg-type]
    axis = next(index for index, size in enumerate(after) if size % tokens == 0)
    whole = after[axis] == tokens
    assert found == tuple(("new" if whole else "folded") if index == axis else "" for index in range(len(after)))


def test_the_key_side_is_the_operand_that_a_product_mixes() -> None:
    letters, result = spell_product(4, 4)
    assert multiply(letters, result, [("", "", "new", ""), ("", "", "", "new")], False) == (
        ("", "", "new", "total"),
        (1,),
    )
    assert multiply(letters, result, [("", "", "new", "total"), ("", "", "new", "")], False) == (
        ("", "", "new", ""),
        (1,),
    )
    for one, other in ((("", "", "", "new"), ("", "", "new", "")), (("", "", "", ""), ("", "", "total", ""))):
        with pytest.raises(Mixes):
            multiply(letters, result, [one, other], False)
