"""Layouts: merged decoders taken apart and put together again, and what they must survive on the way."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import parser
from support.isolated import EXPORTS, kvdoctor
from support.proofs import repair_of
from support.text_fixtures import load_all

from kvdoctor.addons.conversions import api as conversions
from kvdoctor.addons.conversions.convert_layout import ConvertedStack, convert_layouts, convert_stack
from kvdoctor.addons.conversions.layouts.merging import MergePlan, merge
from kvdoctor.addons.conversions.layouts.pair import split_halves
from kvdoctor.addons.conversions.layouts.registry import DoesNotFit, FileSizeLimit, load, read_located, write_models
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.addons.conversions.pipeline import ConvertRequest, convert
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.contract import CacheContract
from kvdoctor.errors import UsageError
from kvdoctor.options import Options
from kvdoctor.report.document import Report

FIRST = """
<ir_version: 9, opset_import: ["" : 18]>
no_past (float[b, n] x, float[b, e] states) => (float[b, m] logits, float[b, m] present, float[b, e] cross)
<float[2, 2] W = {1, 2, 3, 4}, float[2] same = {7, 8}, float[2] one_name = {5, 6}, int64[1] small = {2}>
{
  use_cache_branch = MatMul (x, W)
  taken = Add (use_cache_branch, same)
  V = Add (taken, one_name)
  logits = Identity (V)
  present = Mul (V, V)
  cross = Identity (states)
}
"""
"""A value has the name of the switch, another the name of a weight of the other half (V)."""

LATER = """
<ir_version: 9, opset_import: ["" : 18]>
with_past (float[b, n] x, float[b, m] past, float[b, e] cross_past) => (float[b, m] logits, float[b, m] present)
<float[2, 2] V = {1, 2, 3, 4}, float[2] W = {9, 10}, float[2] one_name = {15, 16}, float[2] same_too = {7, 8}>
{
  same = MatMul (x, V)
  first = Add (same, W)
  cross = Add (first, same_too)
  small = ReduceSum <keepdims = 1> (cross_past)
  all = Add (cross, small)
  yes = Constant <value = bool {1}> ()
  logits = If (yes) <
    then_branch = inner () => (float[b, m] out) { taken = Add (all, one_name)  out = Add (taken, past) },
    else_branch = other () => (float[b, m] out) { out = Identity (all) }
  >
  present = Add (past, one_name)
}
"""
"""One name for weights of other content (W, one_name), values with names of the other half's weights (same, small), one
with the name of an output that only the other half has (cross), and a body with a name of the other half (taken)."""


def run(path: Path, feeds: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The outputs of a model for the feeds that it takes."""
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    wanted = {port.name for port in session.get_inputs()}
    outputs = session.run(None, {name: array for name, array in feeds.items() if name in wanted})
    return dict(zip((port.name for port in session.get_outputs()), outputs, strict=True))


def feeds() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    sizes = {"x": (1, 2), "states": (1, 5), "past": (1, 2), "cross_past": (1, 5)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """The two halves with names that collide, in a folder."""
    for name, text in (("first", FIRST), ("later", LATER)):
        model = parser.parse_model(text)
        onnx.checker.check_model(model, full_check=True)
        onnx.save(model, str(tmp_path / f"{name}.onnx"))
    return tmp_path


def merged(folder: Path, held: dict[str, str], room: FileSizeLimit | None = None) -> Path:
    """Merges the pair of a folder into one file beside it."""
    models = [read_located(folder / f"{name}.onnx", folder) for name in ("first", "later")]
    model = merge(*models, MergePlan(folder, held))
    write_models({"merged.onnx": model}, folder, folder / "out", room or FileSizeLimit())
    onnx.checker.check_model(str(folder / "out" / "merged.onnx"), full_check=True)
    return folder / "out" / "merged.onnx"


def test_halves_with_hostile_names_are_one_graph_after_merging(pair: Path) -> None:
    path = merged(pair, {"cross": "cross_past"})
    given = feeds()
    for cached, half in ((False, "first"), (True, "later")):
        found = run(path, {**given, "use_cache_branch": np.array([cached])})
        for name, value in run(pair / f"{half}.onnx", given).items():
            np.testing.assert_array_equal(found[name], value)
    np.testing.assert_array_equal(found["cross"], given["cross_past"])  # passed through, so that a plain loop works


def test_no_name_of_a_branch_stands_in_front_of_an_outer_one(pair: Path) -> None:
    graph = onnx.load(str(merged(pair, {"cross": "cross_past"}))).graph
    outer = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    weights = [onnx.numpy_helper.to_array(tensor).tolist() for tensor in graph.initializer]
    assert len(weights) == len(outer) - len(graph.input) == 5, (
        "W and V of one content, `same` and `same_too`: stored once"
    )
    for branch in (attribute.g for attribute in graph.node[0].attribute):
        inner = {name for node in branch.node for name in node.output} | {t.name for t in branch.initializer}
        assert not inner & outer
        assert {value.name for value in branch.output} <= inner, "a branch returns only what it makes"


def test_a_merged_graph_is_taken_apart_again(pair: Path) -> None:
    merged(pair, {"cross": "cross_past"})
    model = read_located(pair / "out" / "merged.onnx", pair)
    contract = CacheContract("", {}, {}, (), "no-past-branch")
    first, later = split_halves(model, contract)
    write_models({"first.onnx": first, "later.onnx": later}, pair, pair / "again")
    for name in ("first", "later"):
        onnx.checker.check_model(str(pair / "again" / f"{name}.onnx"), full_check=True)
        again = run(pair / "again" / f"{name}.onnx", feeds())
        for output, value in run(pair / f"{name}.onnx", feeds()).items():
            np.testing.assert_array_equal(again[output], value)
    assert [value.name for value in onnx.load(str(pair / "again" / "first.onnx")).graph.input] == ["x", "states"]


def test_what_stands_around_the_branches_goes_into_both_halves(tmp_path: Path) -> None:
    text = """
    <ir_version: 9, opset_import: ["" : 18]>
    merged (float[b, 2] x, float[b, 2] past, bool[1] use_cache_branch) => (float[b, 2] logits, float[b, 2] same)
    <float[1, 2] W = {1, 2}>
    {
      doubled = Add (x, x)
      flag = Cast <to = 1> (use_cache_branch)
      a, b = If (use_cache_branch) <
        then_branch = cached () => (float[b, 2] s, float[b, 2] s) { s = Add (doubled, past) },
        else_branch = first () => (float[b, 2] W, float[b, 2] t) { t = Add (doubled, W) }
      >
      logits = Add (a, flag)
      same = Identity (b)
    }
    """
    model = parser.parse_model(text)
    path = tmp_path / "merged.onnx"
    onnx.save(model, str(path))
    first, later = split_halves(read_located(path, tmp_path), CacheContract("", {}, {}, (), "no-past-branch"))
    write_models({"first.onnx": first, "later.onnx": later}, tmp_path, tmp_path / "out")
    given = {"x": np.array([[1, 2]], np.float32), "past": np.array([[5, 7]], np.float32)}
    found = [run(tmp_path / "out" / f"{name}.onnx", given) for name in ("first", "later")]
    assert [one["logits"].tolist() for one in found] == [[[1, 2]], [[8, 12]]]
    assert [one["same"].tolist() for one in found] == [[[3, 6]], [[7, 11]]]


def test_halves_that_do_not_fit_are_refused(pair: Path) -> None:
    def refusal(change: Any) -> str:
        models = [read_located(pair / f"{name}.onnx", pair) for name in ("first", "later")]
        change(models[1])
        with pytest.raises(UsageError) as caught:
            merge(*models, MergePlan(pair, {}))
        return str(caught.value)

    def other_opset(model: Any) -> None:
        model.opset_import[0].version = 17

    def other_type(model: Any) -> None:
        model.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.DOUBLE

    assert "opsets of 'ai.onnx', 18 and 17" in refusal(other_opset)
    assert "'x' is float of rank 2 for the first step and double of rank 2 later" in refusal(other_type)


def test_weights_beyond_the_limit_go_beside_the_model(pair: Path) -> None:
    for name, text in (("first", FIRST), ("later", LATER)):
        model = parser.parse_model(text)
        wide = onnx.numpy_helper.from_array(np.full((1, 1024), 0.5, np.float32), f"wide_{name}")
        model.graph.initializer.append(wide)
        model.graph.node.add(op_type="ReduceSum", input=[wide.name], output=["half_sum"])
        model.graph.node.add(op_type="Add", input=["logits", "half_sum"], output=["more"])
        model.graph.output[0].name = "more"
        onnx.save(model, str(pair / f"{name}.onnx"))
    inside = merged(pair, {"cross": "cross_past"})
    expected = run(inside, {**feeds(), "use_cache_branch": np.array([True])})
    shutil.rmtree(pair / "out")
    beside = merged(pair, {"cross": "cross_past"}, FileSizeLimit(most=5000))
    data = beside.with_name("merged.onnx_data")
    assert data.stat().st_size == 4096, "the weight of both halves once"
    found = run(beside, {**feeds(), "use_cache_branch": np.array([True])})
    np.testing.assert_array_equal(found["more"], expected["more"])


def converted(path: Path, out: Path, layout: str | None, **more: Any) -> Report:
    return convert(ConvertRequest(str(path), str(out), ConvertChoices(layout=layout, **more), ()), Options())


def claims(report: Report) -> set[str]:
    assert all(proof.holds for proof in repair_of(report).proof), repair_of(report).proof
    return {proof.claim for proof in repair_of(report).proof}


def test_both_halves_have_every_branch_of_the_switch_and_its_value(tmp_path: Path) -> None:
    """The switch is true at the first step, and a node outside of its five `If`s reads it."""
    folder = load_all()["merged-many-branches-healthy"].write(tmp_path)
    contract = CacheContract("", {}, {}, (), "no-past-branch")
    halves = [half.graph for half in split_halves(read_located(folder / "model.onnx", folder), contract)]
    assert not any(node.op_type == "If" for half in halves for node in half.node)
    assert [one.raw_data for half in halves for one in half.initializer if one.name == "is_first"] == [b"\1", b"\0"]


PAIR = ["decoder_model.onnx", "decoder_model.onnx_data", "decoder_with_past_model.onnx"]


@pytest.mark.slow
def test_merged_to_pair_and_back(tmp_path: Path) -> None:
    """Weights beside the model, as large models have them: one data file, as large as before, for both graphs."""
    source = shutil.copytree(EXPORTS / "t5", tmp_path / "source")
    for name in ("decoder_model.onnx", "decoder_with_past_model.onnx"):
        (source / name).unlink()
    decoder = source / "decoder_model_merged.onnx"
    onnx.save(
        onnx.load(str(decoder)), str(decoder), save_as_external_data=True, location="weights.bin", size_threshold=256
    )
    pair = tmp_path / "pair"
    report = converted(source, pair, "pair")
    assert "the loop's logits are those of the source, bit for bit" in claims(report)
    assert report.verdict == "healthy"
    files = {path.name for path in pair.iterdir() if path.suffix not in {".json", ".md", ".html"}}
    assert files == {*PAIR, "encoder_model.onnx"}
    assert (pair / "decoder_model.onnx_data").stat().st_size == (source / "weights.bin").stat().st_size
    later = onnx.load(str(pair / "decoder_with_past_model.onnx"), load_external_data=False).graph
    assert not [value.name for value in later.output if ".encoder." in value.name], "the caller holds these"
    assert "encoder_hidden_states" not in {value.name for value in later.input}, "nothing takes them"

    again = tmp_path / "again"
    report = converted(pair, again, "merged")
    assert "the loop's logits are those of the source, bit for bit" in claims(report)
    assert (again / f"{decoder.name}_data").stat().st_size <= (source / "weights.bin").stat().st_size
    old, new = (onnx.load(str(path), load_external_data=False) for path in (decoder, again / decoder.name))
    assert (new.ir_version, new.opset_import) == (old.ir_version, old.opset_import)
    assert {value.name for value in new.graph.input} == {value.name for value in old.graph.input}
    assert [value.name for value in new.graph.output] == [value.name for value in old.graph.output]


@pytest.mark.slow
def test_a_sick_merged_decoder_is_repaired_before_it_is_taken_apart(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = converted(EXPORTS / "whisper" / "decoder_model_merged.onnx", out, "pair", axes="readable")
    found = claims(report)
    assert {"cross-cache-emptied is gone", "the loop's logits are those of the source, bit for bit"} <= found
    assert sorted(path.name for path in out.glob("*.onnx*")) == [PAIR[0], PAIR[2], "encoder_model.onnx"]
    assert [one.name for one in repair_of(report).repairs] == ["pass-through", "layout pair"]
    assert json.loads((out / "kvdoctor-report.json").read_text())["repair"]["proved"]


def test_names_of_another_exporter_become_those_of_optimum(tmp_path: Path) -> None:
    """The text fixture of a pair as fastT5 writes it: numbered inputs, names that say nothing."""
    out = tmp_path / "out"
    report = converted(load_all()["layout-fastt5-healthy"].write(tmp_path / "source"), out, "optimum")
    assert any(claim.startswith("the loop's logits are those of the source") for claim in claims(report))
    graph = onnx.load(str(out / "decoder_model_merged.onnx")).graph
    pasts = [value.name for value in graph.input if value.name.startswith("past_key_values.")]
    kinds = [f"past_key_values.0.{kind}.{part}" for kind in ("decoder", "encoder") for part in ("key", "value")]
    assert pasts[:4] == kinds, "Optimum pairs them by their order"
    assert graph.input[-1].name == "use_cache_branch"


@pytest.mark.parametrize("beside", [False, True], ids=["weights-inside", "weights-beside"])
def test_a_pair_shares_its_weights(beside: bool, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    for name in ("decoder_model.onnx", "decoder_with_past_model.onnx"):
        model = onnx.load(str(EXPORTS / "t5" / name))
        onnx.save(model, str(source / name), save_as_external_data=beside, location=f"{name}_data", size_threshold=64)
    report = converted(source, out, "shared")
    assert "the loop's logits are those of the source, bit for bit" in claims(report)
    later = onnx.load(str(out / "decoder_with_past_model.onnx"), load_external_data=False).graph
    files = {entry.value for one in later.initializer for entry in one.external_data if entry.key == "location"}
    assert files == {"decoder_model.onnx_data"}
    before, after = (sum(file.stat().st_size for file in path.glob("decoder*")) for path in (source, out))
    assert before - after > 100_000, "the weights of one of them"
    assert sorted(file.name for file in out.glob("decoder*")) == PAIR
    with pytest.raises(UsageError, match="share their weights already"):
        converted(out, tmp_path / "again", "shared")


def test_one_graph_becomes_two_that_share_their_weights(tmp_path: Path) -> None:
    source, out = EXPORTS / "gpt2" / "model.onnx", tmp_path / "pair"
    report = converted(EXPORTS / "gpt2", out, "pair")
    assert "the loop's logits are those of the source, bit for bit" in claims(report)
    assert (report.verdict, [stack.name for stack in report.stacks]) == ("healthy", ["pair"])
    assert not any("no logits to compare" in note for note in report.notes)
    first, later = (
        onnx.load(str(out / f"decoder{half}_model.onnx"), load_external_data=False) for half in ("", "_with_past")
    )
    assert [value.name for value in first.graph.input] == ["input_ids", "attention_mask", "position_ids"]
    assert {value.name for value in first.graph.output} == {value.name for value in later.graph.output}
    places = [
        {tuple((e.key, e.value) for e in t.external_data) for t in half.graph.initializer if t.external_data}
        for half in (first, later)
    ]
    assert places[0] == places[1] != set()
    files = sorted(path.name for path in out.glob("decoder*"))
    assert files == PAIR
    assert (out / files[1]).stat().st_size < 1.1 * source.stat().st_size
    assert source.read_bytes() == (EXPORTS / "gpt2" / "model.onnx").read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "layout-bloom-transposed-healthy",
        "layout-hybrid-recurrent-healthy",
        "layout-delta-appended-healthy",
        "layout-heads-first-healthy",
        "layout-gqa-growing-healthy",
        "layout-fused-key-value-healthy",
        "merged-many-branches-healthy",
        "decoder-only-embeds-language-healthy",
    ],
)
def test_other_caches_of_one_graph(name: str, tmp_path: Path) -> None:
    """Batch and heads in one axis, states of zeros, new entries alone, other orders of axes, attention operators."""
    report = converted(load_all()[name].write(tmp_path / "model"), tmp_path / "out", "pair")
    assert any(claim.startswith("the loop's logits are those of the source") for claim in claims(report))
    assert report.verdict == "healthy", report.not_checked


@pytest.mark.parametrize(
    ("name", "layout", "says"),
    [
        ("gpt2", "shared", "it is one file"),
        ("gpt2", "merged", "one graph serves the first and the later steps, so there is nothing to merge"),
        ("gpt2", "optimum", "it already has Optimum's names"),
        ("t5", "pair", "already holds 'decoder_model.onnx' next to 'decoder_model_merged.onnx'"),
        ("t5", "single", "'decoder_with_past_model.onnx' would be written to the same files as 'decoder_model_merged"),
        ("t5/decoder_with_past_model.onnx", "pair", "it is already a pair"),
        ("t5/encoder_model.onnx", "pair", "it holds no decoder with a cache"),
        ("t5", "tower", "there is no layout 'tower'"),
        ("layout-tensor-scatter-healthy", "pair", "is a buffer that the loop allocates"),
        ("layout-paged-healthy", "pair", "no input with a batch axis"),
        ("layout-shift-left-healthy", "pair", "is a buffer"),
        ("layout-delta-healthy", "pair", "is a buffer"),
        ("layout-scatter-static-pair-healthy", "optimum", "does not grow with each step"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_the_reason(name: str, layout: str, says: str, tmp_path: Path) -> None:
    texts = load_all()
    source = texts[name].write(tmp_path / "model") if name in texts else EXPORTS / name
    with pytest.raises(UsageError, match=re.escape(says)):
        converted(source, tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("choices", [{"cache": "static=16"}, {"layout": "single"}], ids=["cache", "layout"])
def test_no_decoder_is_lost_where_two_would_be_model_onnx(choices: Any, tmp_path: Path) -> None:
    source = tmp_path / "mixed"
    source.mkdir()
    for name in ("gpt2/model", "marian-4.57.6/decoder_model_merged", "marian-4.57.6/encoder_model"):
        shutil.copy(EXPORTS / f"{name}.onnx", source)
    with pytest.raises(UsageError, match=r"already holds 'model.onnx' next to .*: kvdoctor convert .*merged.onnx --"):
        conversions.convert(source, tmp_path / "out", **choices)
    assert not (tmp_path / "out").exists()


def as_single(source: Path) -> ConvertedStack:
    """A decoder as its graph of later steps alone, in memory."""
    folder, layout = open_folder(str(source)), next(one for one in load() if one.name == "single")
    (stack,) = folder.stacks
    return convert_stack(folder, stack, read_contract(stack, folder.side_cars), layout)


@pytest.mark.parametrize(("name", "count"), [("marian-4.57.6", 0), ("marian-4.46.3", 2)])
@pytest.mark.parametrize("file", ["decoder_model_merged", "decoder_with_past_model"])
def test_later_tokens_are_hidden_where_the_proof_finds_no_mask(name: str, file: str, count: int) -> None:
    made = as_single(EXPORTS / name / f"{file}.onnx").made
    listed = [one.before for one in made.changes if "self-attention" in one.where]
    assert listed == ["no proved mask of later tokens"] * (count > 0)
    masks = [node for node in made.models["model.onnx"].graph.node if node.output[0].startswith("causal.scores")]
    assert len(masks) == count


def fuse(graph: onnx.GraphProto) -> None:
    """One operator is the whole attention over the first past."""
    next(node for node in graph.node if "past_key_values.0.decoder.key" in node.input).op_type = "MultiHeadAttention"


def freeze(graph: onnx.GraphProto) -> None:
    """The past of tokens has one length."""
    for value in graph.input:
        if ".decoder." in value.name:
            value.type.tensor_type.shape.dim[2].dim_value = 4


@pytest.mark.parametrize(
    ("change", "why"), [(fuse, "the node MultiHeadAttention"), (freeze, "the past of its later graph has the fixed")]
)
def test_a_later_graph_that_cannot_serve_the_first_step(change: Any, why: str, tmp_path: Path) -> None:
    source = shutil.copytree(EXPORTS / "marian-4.46.3", tmp_path / "model") / "decoder_with_past_model.onnx"
    model = onnx.load(str(source))
    change(model.graph)
    onnx.save(model, str(source))
    with pytest.raises(DoesNotFit, match=why):
        as_single(source)


def test_a_refusal_of_a_faulty_model_shows_its_findings(tmp_path: Path) -> None:
    report = conversions.convert(EXPORTS / "t5" / "decoder_model_merged.onnx", tmp_path / "out", layout="merged")
    assert "KV203" in {finding.code for finding in report.findings}
    assert any("it is already a merged decoder" in note for note in report.notes)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_readable_axes_alone(tmp_path: Path) -> None:
    source = shutil.copytree(EXPORTS / "gpt2", tmp_path / "source")
    model = onnx.load(str(source / "model.onnx"))
    names: dict[str, str] = {}
    for value in (*model.graph.input, *model.graph.output):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_param = names.setdefault(dim.dim_param, f"s{len(names)}")
    onnx.save(model, str(source / "model.onnx"))
    out = tmp_path / "out"
    claims(converted(source, out, None, axes="readable"))
    old, new = (onnx.load(str(path / "model.onnx")).graph for path in (EXPORTS / "gpt2", out))
    for one, other in zip((*old.input, *old.output), (*new.input, *new.output), strict=True):
        assert one == other, "Optimum's own names come back"
    with pytest.raises(UsageError, match="already"):
        converted(out, tmp_path / "again", None, axes="readable")
    assert not (tmp_path / "again").exists()


def test_the_command_line_writes_a_pair_and_a_merged_decoder_but_nothing_in_a_dry_run(tmp_path: Path) -> None:
    load_all()["merged-healthy"].write(tmp_path / "model")
    shown = kvdoctor("convert", tmp_path / "model", "--layout", "pair", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "decoder_model.onnx: no-past branch, inputs" in shown.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    for source, layout in (("model", "pair"), ("pair", "merged")):
        done = kvdoctor("convert", tmp_path / source, "--layout", layout, "-o", tmp_path / layout, "-v")
        assert done.returncode == 0, done.stderr
        assert "the loop's logits are those of the source, bit for bit" in done.stdout
    assert (tmp_path / "pair" / "decoder_with_past_model.onnx").is_file()
    assert (tmp_path / "merged" / "decoder_model_merged.onnx").is_file()


def test_all_layouts_are_told_in_the_documentation() -> None:
    text = (Path(__file__).parents[1] / "docs" / "layouts.md").read_text(encoding="utf-8")
    for layout in load():
        assert f"`{layout.name}`" in text


def test_a_broken_contract_is_no_reason_to_guess(tmp_path: Path) -> None:
    load_all()["bad-key-without-value"].write(tmp_path / "model")
    folder = open_folder(str(tmp_path / "model"))
    contracts = {stack.name: read_contract(stack, folder.side_cars) for stack in folder.stacks}
    with pytest.raises(UsageError, match="cannot be given the layout 'optimum'"):
        convert_layouts(folder, contracts, ConvertChoices(layout="optimum"))


def test_scales_in_front_of_products_stay_where_the_runtime_looks_for_them(tmp_path: Path) -> None:
    """Weights of 8 bits, shared by both halves: around the branches no session of onnxruntime 1.25 to 1.31 opens."""
    text = """
    <ir_version: 9, opset_import: ["" : 21]>
    half (float[b, 64] x) => (float[b, 64] logits)
    { w = DequantizeLinear (weight, scales, zeros)  logits = MatMul (x, w) }
    """
    rng = np.random.default_rng(0)
    tensors = {
        "weight": rng.integers(0, 255, (64, 64)).astype(np.uint8),
        "scales": rng.uniform(0.01, 0.02, 64).astype(np.float32),
        "zeros": np.full(64, 128, np.uint8),
    }
    model = parser.parse_model(text)
    model.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in tensors.items())
    for name in ("first", "later"):
        onnx.save(model, str(tmp_path / f"{name}.onnx"))
    given = {"x": rng.standard_normal((1, 64)).astype(np.float32)}
    path = merged(tmp_path, {})
    assert not onnx.load(str(path)).graph.initializer
    for cached in (False, True):
        found = run(path, {**given, "use_cache_branch": np.array([cached])})
        np.testing.assert_array_equal(found["logits"], run(tmp_path / "first.onnx", given)["logits"])
