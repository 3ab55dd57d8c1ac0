"""`--cache static`: growing caches become buffers that decode as before up to their last token; and the way back."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.isolated import EXPORTS
from support.proofs import repair_of
from support.sampling import sampled
from test_conversions import DECODER, Spoil, not_proved, proved, refusal, without_cache, write

import kvdoctor
from kvdoctor.addons.conversions import api as conversions
from kvdoctor.errors import UsageError
from kvdoctor.report.document import Report

OPSET_24 = (("ir_version: 8", "ir_version: 11"), ('["" : 17]', '["" : 24]'))


def check_static(report: Report, capacity: int) -> None:
    assert report.verdict == "healthy"
    claims = {entry.claim: entry.detail for entry in repair_of(report).proof}
    assert f"has {capacity} tokens" in claims[f"a buffer of {capacity} tokens was filled"]
    assert "fails" in claims[f"a buffer of {capacity} tokens is not written beyond its end"]
    for stack in report.stacks:
        assert stack.contract is not None
        slots = stack.contract.of_kind("self-attention")
        assert {(slot.growth, slot.carry, slot.size("capacity")) for slot in slots} == {
            ("static", "feed-back", capacity)
        }


@pytest.mark.parametrize(
    ("name", "edits"),
    [
        (DECODER, ()),
        (DECODER, OPSET_24),
        pytest.param("layout-attention-23-masked-healthy", (), marks=pytest.mark.slow),
        pytest.param("layout-bloom-transposed-healthy", (), marks=pytest.mark.slow),
        ("layout-llama2-msft-layers-healthy", ()),
        pytest.param("layout-cut-positions-healthy", (), marks=pytest.mark.slow),
        pytest.param("layout-ort-t5-healthy", (), marks=pytest.mark.slow),
        pytest.param("layout-dynamo-anonymous-grouped-healthy", (), marks=pytest.mark.slow),
        ("decoder-only-last-token-healthy", ()),
        ("pair-healthy", ()),
    ],
)
def test_a_buffer_decodes_as_the_growing_cache(name: str, edits: tuple[tuple[str, str], ...], tmp_path: Path) -> None:
    source, out = write(tmp_path / "model", name, *edits), tmp_path / "out"
    report = proved(source, out, cache="static=12")
    check_static(report, 12)
    (file,) = (path for path in out.glob("*.onnx") if path.name == report.stacks[0].contract.graph("decode").file)
    model = onnx.load(str(file))
    onnx.checker.check_model(model, full_check=True)
    writes = {node.op_type for node in model.graph.node if node.op_type in ("ScatterND", "TensorScatter")}
    assert writes == ({"TensorScatter"} if edits else {"ScatterND"})
    with pytest.raises(UsageError, match="is a static buffer already"):
        conversions.convert(out, tmp_path / "again", cache="static=12")


def test_a_buffer_of_an_operator_is_declared_and_grows_again(tmp_path: Path) -> None:
    """GroupQueryAttention writes in place by itself: the declared length alone changes, there and back."""
    source, out = write(tmp_path / "model", "layout-gqa-growing-healthy"), tmp_path / "out"
    report = proved(source, out, cache="static=12")
    assert (report.verdict, report.findings) == ("healthy", ())
    claims = {entry.claim: entry.detail for entry in repair_of(report).proof}
    assert "returns" in claims["a buffer of 12 tokens is not written beyond its end"]
    assert {slot.growth for slot in report.stacks[0].contract.slots} == {"static"}
    grown = proved(out, tmp_path / "grown", cache="growing")
    assert {slot.growth for slot in grown.stacks[0].contract.slots} == {"shared"}


@pytest.mark.parametrize("name", sampled(["llama-gqa", "gpt2"], 2))
def test_real_exports_become_buffers_of_their_context(name: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = proved(EXPORTS / name, out, cache="static")
    check_static(report, 64)
    model = onnx.load(str(out / "model.onnx"))
    onnx.checker.check_model(model, full_check=True)
    shapes = {value.name: value.type.tensor_type.shape.dim for value in (*model.graph.input, *model.graph.output)}
    assert shapes["attention_mask"][1].dim_value == 64
    assert shapes["cache_position"][0].dim_param == shapes["input_ids"][1].dim_param
    assert shapes["present.1.value"][2].dim_value == 64
    written = kvdoctor.loop(out, tmp_path / "loop", language="python")
    assert written.out is not None, written.reason


def feed_buffer(start: int, tokens: list[int], past: dict[str, Any], capacity: int) -> dict[str, Any]:
    """One call, by the rules of the fix report."""
    places = np.arange(start, start + len(tokens))
    mask = (np.arange(capacity) < start + len(tokens)).astype(np.int64)[None]
    return {
        "input_ids": np.array([tokens]),
        "attention_mask": mask,
        "position_ids": places[None],
        "cache_position": places,
        **past,
    }


def test_the_rules_of_the_fix_report_decode_up_to_the_last_row(tmp_path: Path) -> None:
    """N - 1 and N tokens are right, whatever the rows behind them hold; token N + 1 is refused."""
    source, tokens, capacity = write(tmp_path / "model"), [3, 7, 5, 9, 4, 8], 6
    conversions.convert(source, tmp_path / "out", cache=f"static={capacity}")
    want, names = without_cache(source, tokens)
    static = ort.InferenceSession(str(tmp_path / "out" / "model.onnx"), providers=["CPUExecutionProvider"])
    returned = ["logits", *(name.replace("past_key_values", "present") for name in names)]
    past = {name: np.full((1, 2, capacity, 4), 7, np.float32) for name in names}
    for start, stop in ((0, 3), (3, 5), (5, 6)):
        logits, *presents = static.run(returned, feed_buffer(start, tokens[start:stop], past, capacity))
        past = dict(zip(names, presents, strict=True))
        np.testing.assert_allclose(logits, want[:, start:stop], atol=1e-5)
    with pytest.raises(Exception, match="indice"):
        static.run(returned, feed_buffer(6, [5], past, capacity))


def test_the_context_of_the_config_limits_the_buffer(tmp_path: Path) -> None:
    source = write(tmp_path / "model", "decoder-only-short-context-healthy")
    check_static(proved(source, tmp_path / "out", cache="static"), 9)
    with pytest.raises(UsageError, match="allows 9 tokens, so a buffer of 10"):
        conversions.convert(source, tmp_path / "more", cache="static=10")
    with pytest.raises(UsageError, match="give a number"):
        conversions.convert(write(tmp_path / "other"), tmp_path / "none", cache="static")


ENCODERS = ("marian-4.46.3/decoder_model_merged", "t5/decoder_model_merged", "marian-4.57.6/decoder_with_past_model")


@pytest.mark.parametrize("file", ["", *sampled(ENCODERS, 3)])
def test_all_sizes_are_numbers_with_fixed_sizes(file: str, tmp_path: Path) -> None:
    """Of an encoder-decoder as well, whose encoder then makes the cross-attention cache that the loop holds."""
    sizes = ("batch=1", "new=1", "past=12", *(["encoder=9"] if file else []))
    source, out = EXPORTS / f"{file}.onnx" if file else write(tmp_path / "model"), tmp_path / "out"
    report = proved(source, out, cache="static=12", sizes=sizes)
    check_static(report, 12)
    for path in out.glob("*.onnx"):
        model = onnx.load(str(path))
        onnx.checker.check_model(model, full_check=True)
        for value in (*model.graph.input, *model.graph.output):
            assert all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim), value.name
    slots = report.stacks[0].contract.of_kind("cross-attention")
    assert {(slot.filled_in, slot.size("encoder")) for slot in slots} == ({("encode", 9)} if file else set())
    assert kvdoctor.loop(out, tmp_path / "loop", language="python", check=True).exit_code == 0


def test_the_traced_inputs_of_the_original_are_not_those_of_the_copy(tmp_path: Path) -> None:
    source, out = write(tmp_path / "model", "config-agrees-healthy"), tmp_path / "out"
    check_static(proved(source, out, cache="static=12"), 12)
    assert "kwargs" in json.loads((source / "export.json").read_text())["components"]["model"]["metadata"]
    assert "kwargs" not in json.loads((out / "export.json").read_text())["components"]["model"]["metadata"]


STATIC, GROWING = {"cache": "static=12"}, {"cache": "growing"}


@pytest.mark.parametrize(
    ("name", "choices", "named"),
    [
        ("merged-healthy", STATIC, "the encoder, which would return its cross-attention cache, is not next to it"),
        ("layout-attention-23-healthy", STATIC, 'the node Attention "mixed0" has no mask'),
        ("layout-multihead-attention-healthy", STATIC, "the node com.microsoft.MultiHeadAttention"),
        ("layout-canary-healthy", STATIC, 'the node Slice "ids" reads'),
        ("layout-scatter-static-healthy", STATIC, "is a static buffer already"),
        ("decoder-only-half-cache-healthy", STATIC, 'the node Cast "past_k0" reads'),
        pytest.param(
            *("cache-not-faster", STATIC, 'the node Expand "large" uses the length of the past in an unknown way'),
            marks=pytest.mark.slow,  # its steps take long on purpose
        ),
        ("layout-lstm-states-healthy", STATIC, "no past has a variable length"),
        (DECODER, GROWING, "it has no static buffer"),
        ("layout-ring-healthy", GROWING, "is a ring, where new rows replace the oldest"),
        (DECODER, {"sizes": ("batch=1", "encoder=4")}, "no input, output or cache has an axis of encoder states"),
        ("layout-retained-state-healthy", GROWING, "the node Where .* where a write of new rows is expected"),
        ("layout-decoder-masked-mha-healthy", GROWING, "the node com.microsoft.DecoderMaskedMultiHeadAttention"),
        ("layout-delta-healthy", GROWING, "is not written in place by the graph"),
        ("layout-scatter-static-pair-healthy", GROWING, "its first step is another graph"),
        *(
            (DECODER, {"cache": words}, "--cache")
            for words in ("static=4", "static=x", "static=", "dynamic", "static=12,static=13")
        ),
        (DECODER, {**STATIC, "sizes": ("new=1", "past=13")}, "another length of the cache"),
    ],
)
def test_what_is_of_another_form_is_refused_with_the_node(name: str, choices: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=named):
        conversions.convert(write(tmp_path / "model", name), tmp_path / "out", **choices)
    assert not (tmp_path / "out").exists()


SQUARE = "square = Concat <axis = 0> (new, total)\n  ones = ConstantOfShape <value = float[1] {1}> (square)"
CAUSAL = "causal = Trilu <upper = 0> (ones, offset)"
OTHER_USES = {
    "a block of past columns": (
        (
            SQUARE,
            "before = Concat <axis = 0> (new, past)\n  seen_all = ConstantOfShape <value = float[1] {1}> (before)\n"
            "  own = Concat <axis = 0> (new, new)\n  own_ones = ConstantOfShape <value = float[1] {1}> (own)",
        ),
        (CAUSAL, "own_causal = Trilu <upper = 0> (own_ones)\n  causal = Concat <axis = 1> (seen_all, own_causal)"),
    ),
    "columns behind the first": (
        (
            "real = Cast <to = 1> (attention_mask)",
            "cut = Slice (attention_mask, new, total, new)\n  real = Cast <to = 1> (cut)",
        ),
    ),
}


@pytest.mark.parametrize(("uses", "node"), list(zip(OTHER_USES, ("ConstantOfShape", "Slice"), strict=True)))
def test_an_unknown_use_of_the_length_is_refused_with_the_node(uses: str, node: str, tmp_path: Path) -> None:
    source = write(tmp_path / "model", DECODER, *OTHER_USES[uses])
    text = refusal(source, tmp_path / "out", cache="static=12")
    assert f"the node {node} " in text
    assert "uses the length of the past in an unknown way" in text


ROWS = "rows = Slice (all_causal, past, total)\n  causal = Slice (rows, nought, total, column)"
KNOWN_USES = {
    "rows of a square mask": (
        (SQUARE, "square = Concat <axis = 0> (total, total)\n  ones = ConstantOfShape <value = float[1] {1}> (square)"),
        (CAUSAL, f"all_causal = Trilu <upper = 0> (ones)\n  {ROWS}"),
        ("float one = {1}", "float one = {1}, int64[1] nought = {0}, int64[1] column = {1}"),
    ),
    "the last rows": (
        (SQUARE, "square = Concat <axis = 0> (total, total)\n  ones = ConstantOfShape <value = float[1] {1}> (square)"),
        (CAUSAL, "back = Neg (new)\n  all_causal = Trilu <upper = 0> (ones)\n  causal = Slice (all_causal, back, end)"),
        ("float one = {1}", "float one = {1}, int64[1] end = {9223372036854775807}"),
    ),
}


@pytest.mark.parametrize("uses", KNOWN_USES)
def test_masks_of_other_forms_are_converted(uses: str, tmp_path: Path) -> None:
    source = write(tmp_path / "model", DECODER, *KNOWN_USES[uses])
    check_static(proved(source, tmp_path / "out", cache="static=12"), 12)


def always_at_the_start(graph: onnx.GraphProto) -> None:
    """Every call writes at row 0."""
    for node in graph.node:
        if node.op_type == "Reshape" and node.input[0] == "cache_position":
            node.input[0] = "static_zeros"
    graph.node.insert(0, onnx.helper.make_node("Sub", ["cache_position", "cache_position"], ["static_zeros"]))


def mask_of_the_start(graph: onnx.GraphProto) -> None:
    """The rows of the causal mask are those of the first tokens."""
    next(node for node in graph.node if node.op_type == "Trilu").input[1] = ""


def last_row_again(graph: onnx.GraphProto) -> None:
    """Behind its end a buffer is written in its last row."""
    for node in graph.node:
        if node.op_type == "Reshape" and node.input[0] == "cache_position":
            node.input[0] = "static_bounded"
    graph.initializer.append(onnx.numpy_helper.from_array(np.array(11, np.int64), "static_last"))
    graph.node.insert(0, onnx.helper.make_node("Min", ["cache_position", "static_last"], ["static_bounded"]))


def sees_later(graph: onnx.GraphProto) -> None:
    """The graph of later steps, which has no mask of later tokens, gets none."""
    next(node for node in graph.node if node.output[0] == "causal.later").op_type = "Less"


def joined_in_front(graph: onnx.GraphProto) -> None:
    """New rows stand in front of the past."""
    for node in graph.node:
        if node.op_type == "Concat" and node.output[0].startswith("updated"):
            node.input[:] = [node.input[1], node.input[0]]


@pytest.mark.parametrize(
    ("spoil", "difference"),
    [
        (always_at_the_start, "first difference: batch 1, prompt of 2 tokens"),
        (mask_of_the_start, "first difference: batch 1, prompt of "),
        (last_row_again, "a buffer of 12 tokens is not written beyond its end: it runs"),
        (joined_in_front, "first difference: batch 1, prompt of"),
        (sees_later, "first difference: batch 1, prompt of 2 tokens"),
    ],
)
def test_a_cache_that_is_not_proved_is_not_written(spoil: Spoil, difference: str, tmp_path: Path) -> None:
    name = "layout-tensor-scatter-heads-healthy" if spoil is joined_in_front else DECODER
    source = EXPORTS / f"{ENCODERS[0]}.onnx" if spoil is sees_later else write(tmp_path / "model", name)
    choices = GROWING if spoil is joined_in_front else STATIC
    found = not_proved(source, tmp_path / "out", spoil, **choices)
    assert any(difference in text for text in found), found


@pytest.mark.parametrize("choice", ["static=65", "static"])
def test_a_buffer_is_no_longer_than_the_table_of_positions(choice: str, tmp_path: Path) -> None:
    """No config says how many tokens a sequence has, and a row for each is looked up in a table of 64."""
    with pytest.raises(UsageError, match=r"table of positions has 64 rows") as refused:
        conversions.convert("fixtures/from_scratch/right.onnx", tmp_path / "out", cache=choice)
    assert "static=64" in str(refused.value)
    assert not (tmp_path / "out").exists()


def check_growing(report: Report) -> None:
    assert report.verdict == "healthy"
    for stack in report.stacks:
        assert stack.contract is not None
        slots = stack.contract.of_kind("self-attention")
        assert {(slot.growth, slot.carry, slot.first) for slot in slots} == {("grow", "feed-back", "empty")}


@pytest.mark.parametrize(
    "name", ["layout-scatter-static-healthy", "layout-tensor-scatter-heads-healthy", "layout-tensor-scatter-healthy"]
)
def test_a_static_cache_grows(name: str, tmp_path: Path) -> None:
    source, out = write(tmp_path / "model", name), tmp_path / "out"
    check_growing(proved(source, out, cache="growing"))
    model = onnx.load(str(out / "model.onnx"))
    onnx.checker.check_model(model, full_check=True)
    assert not [node.op_type for node in model.graph.node if "Scatter" in node.op_type]
    assert "write_indices" not in [value.name for value in model.graph.input]
