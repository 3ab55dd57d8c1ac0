"""The axes and sizes of a cache, as the graph shows them: where it is taken apart, and what is joined to it."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from support.text_fixtures import Fixture, load_all

from kvdoctor.analysis import abstract_step
from kvdoctor.analysis.axes import slot_axes
from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.dataflow.states import StateFlow
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.contract import CacheContract, Dim, Slot
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.report.document import Report, exit_code

PARTS = load_all()["layout-parts-behind-length-healthy"]


def read_one(text: str, folder: Path) -> CacheContract:
    read = open_folder(str(replace(PARTS, files={"model.onnx": text}).write(folder)))
    return read_contract(read.stacks[0], read.side_cars)


def read_slots(text: str, folder: Path) -> tuple[Slot, ...]:
    return read_one(text, folder).slots


def step_tested(text: str, folder: Path, fixture: Fixture = PARTS) -> tuple[Report, CacheContract]:
    """The report of a graph, and the contract of its stack."""
    report = step_test(str(replace(fixture, files={"model.onnx": text}).write(folder)))
    contract = report.stacks[0].contract
    assert contract is not None
    return report, contract


def test_key_and_value_have_an_axis_behind_the_length(tmp_path: Path) -> None:
    """Parts and heads are both 2: which is which is seen where the past is taken apart into a key and a value."""
    slots = read_slots(PARTS.files["model.onnx"], tmp_path)
    assert [(slot.part, slot.growth) for slot in slots] == [("key-value", "grow")] * 2
    assert {slot.axes for slot in slots} == {("batch", "past", "parts", "kv_heads", "head_dim")}


def test_entries_of_another_rank_give_the_sizes_of_the_axes_that_they_have(tmp_path: Path) -> None:
    """What is joined has no axis of parts; the widths, which the past leaves open, are those of the weights."""
    text = PARTS.files["model.onnx"].replace(", 2, 2, 6]", ", 2, heads, width]")
    assert text.count("2, heads, width]") == 4
    assert {slot.shape[2:] for slot in read_slots(text, tmp_path)} == {(2, 2, 6)}


@pytest.mark.parametrize(
    ("shape", "at", "parts", "expected"),
    [
        (("b", "p", 2, 4, 8), 1, None, "batch past parts kv_heads head_dim"),
        (("b", "p", 4, 2, 8), 1, None, "batch past kv_heads parts head_dim"),
        (("b", "p", 2, 2, 8), 1, 3, "batch past kv_heads parts head_dim"),
        (("b", 4, "p", 2, 8), 2, None, "batch kv_heads past parts head_dim"),
        (("b", 2, 2, "p", 8), 3, 1, "batch parts kv_heads past head_dim"),
        (("b", 2, 2, "p", 8), 3, 2, "batch kv_heads parts past head_dim"),
        ((2, "b", 4, "p", 8), 3, 0, "parts batch kv_heads past head_dim"),
        (("b", 2, "p", 8), 2, 1, "batch kv_heads past head_dim"),
    ],
)
def test_the_axis_of_parts(shape: tuple[Dim, ...], at: int, parts: int | None, expected: str) -> None:
    state = StateFlow("past", growth="grow", axis=at, joined=True, parts=parts)
    assert " ".join(slot_axes(shape, "self-attention", "grow", None, state)) == expected


USUAL = load_all()["decoder-only-healthy"].files["model.onnx"]
TIME_FIRST = USUAL.replace("[batch_size, sequence_length] input_ids", "[sequence_length, batch_size] input_ids")
"""The names alone: the graph still takes the batch first."""


def take_time_first(text: str) -> str:
    """A decoder whose token ids are turned within the graph, and its logits turned back."""
    turned = "  rows = Transpose <perm = [1, 0]> (input_ids)\n"
    text = text.replace("(input_ids)", "(rows)").replace("{\n  #", "{\n" + turned + "  #", 1)
    text = text.replace("w_tokens, input_ids", "w_tokens, rows")
    text = text.replace(
        "float[batch_size, sequence_length, 16] logits", "float[sequence_length, batch_size, 16] logits"
    )
    return text.replace("  logits = MatMul (x2,", "  x3 = Transpose <perm = [1, 0, 2]> (x2)\n  logits = MatMul (x3,")


def test_tokens_in_front_of_the_batch_are_run(tmp_path: Path) -> None:
    """Tokens and logits have time first, as the graph shows, and the runs feed them so."""
    report, contract = step_tested(take_time_first(TIME_FIRST), tmp_path)
    assert not inspect(str(tmp_path)).findings
    graph = contract.graph("decode")
    assert [(p.role, p.axes[:2]) for p in (graph.port("token_ids"), graph.port("logits")) if p is not None] == [
        ("token_ids", ("new", "batch")),
        ("logits", ("new", "batch")),
    ]
    assert (report.verdict, report.findings) == ("healthy", ())


def test_names_alone_do_not_put_the_tokens_in_front_of_the_batch(tmp_path: Path) -> None:
    """The graph decides: on tokens [batch, new] it returns caches of as many sequences."""
    report, contract = step_tested(TIME_FIRST, tmp_path)
    assert contract.graph("decode").declared_new_tokens == "batch_size"
    assert not report.findings
    assert report.verdict == "healthy", report.not_checked


ONE_SEQUENCE = """
<ir_version: 8, opset_import: ["" : 17]>
decoder (
  int64[new] input_ids, float[2, past, 4] "past_key_values.0.key", float[2, past, 4] "past_key_values.0.value"
) => (
  float[new, 16] logits, float[2, total, 4] "present.0.key", float[2, total, 4] "present.0.value"
)
<
  float[16, 8] w_tokens, float[32, 8] w_positions, float[8, 2, 4] w_q, float[8, 2, 4] w_k, float[8, 2, 4] w_v,
  float[2, 4, 8] w_o, float[8, 16] w_logits, int64[1] behind = {1}, int64 zero = {0}, int64 one = {1},
  float far = {-9999}
>
{
  past = Shape <start = 1, end = 2> ("past_key_values.0.key")
  new = Shape (input_ids)
  total = Add (past, new)
  begin = Squeeze (past)
  end = Squeeze (total)
  query_at = Range (begin, end, one)
  key_at = Range (zero, end, one)
  queries = Unsqueeze (query_at, behind)
  hidden = Greater (key_at, queries)
  tokens = Gather (w_tokens, input_ids)
  places = Gather (w_positions, query_at)
  x = Add (tokens, places)
  q = Einsum <equation = "sh,hnd->nsd"> (x, w_q)
  k = Einsum <equation = "sh,hnd->nsd"> (x, w_k)
  v = Einsum <equation = "sh,hnd->nsd"> (x, w_v)
  "present.0.key" = Concat <axis = 1> ("past_key_values.0.key", k)
  "present.0.value" = Concat <axis = 1> ("past_key_values.0.value", v)
  scores = Einsum <equation = "nqd,nkd->nqk"> (q, "present.0.key")
  masked = Where (hidden, far, scores)
  shares = Softmax <axis = -1> (masked)
  mixed = MatMul (shares, "present.0.value")
  out = Einsum <equation = "nqd,ndh->qh"> (mixed, w_o)
  y = Add (x, out)
  logits = MatMul (y, w_logits)
}
"""
"""Tokens [new] and a cache [heads, past, width]: one sequence, and no batch."""


@pytest.mark.parametrize("fault", [False, True])
def test_a_graph_of_one_sequence_is_not_run(fault: bool, tmp_path: Path) -> None:
    """Its heads are no frozen batch, and it is called neither faulty nor healthy, whether it is or not."""
    text = ONE_SEQUENCE.replace("query_at = Range (begin, end, one)", "query_at = Range (zero, end, one)")
    report, contract = step_tested(text if fault else ONE_SEQUENCE, tmp_path)
    assert not inspect(str(tmp_path)).findings
    assert {slot.axes for slot in contract.slots} == {("kv_heads", "past", "head_dim")}
    assert not contract.last_logits_only
    assert not report.findings
    assert "has a batch axis" in report.not_checked[0].reason
    assert exit_code(report, report.fail_on) == 3


def test_a_frozen_batch_is_no_axis_of_heads(tmp_path: Path) -> None:
    """Tokens of one axis may be those of several sequences: a step on all of them returns as long a cache for each."""
    text = ONE_SEQUENCE.replace("int64[new] input_ids", "int64[all] input_ids")
    text = text.replace("float[new, 16] logits", "float[2, new, 16] logits")
    rows = "rows = Reshape (input_ids, two)\n  new = Shape <start = 1> (rows)"
    text = text.replace("new = Shape (input_ids)", rows).replace("(w_tokens, input_ids)", "(w_tokens, rows)")
    text = text.replace("int64 one = {1},", "int64 one = {1}, int64[2] two = {2, -1},")
    text = text.replace("[8, 2, 4]", "[8, 4]").replace("[2, 4, 8] w_o", "[4, 8] w_o")
    text = text.replace("sh,hnd->nsd", "bsh,hd->bsd").replace("nqd,ndh->qh", "bqd,dh->bqh")
    slots = read_slots(text, tmp_path)
    assert {slot.axes for slot in slots} == {("batch", "past", "head_dim")}


BLOOM = load_all()["layout-bloom-transposed-healthy"]


@pytest.mark.parametrize("fault", [False, True])
def test_the_number_of_heads_in_an_axis_of_batch_times_heads_is_that_of_the_graph(fault: bool, tmp_path: Path) -> None:
    """No config gives it: a step on two sequences agrees with one number of heads alone, also where it is faulty."""
    text = BLOOM.files["model.onnx"]
    report, contract = step_tested(_without_offset(text) if fault else text, tmp_path, BLOOM)
    assert contract.heads == 2
    assert [finding.code for finding in report.findings] == (["KV315"] if fault else [])
    assert exit_code(report, report.fail_on) == (1 if fault else 0)


def test_a_number_of_heads_that_the_graph_does_not_show_is_missing(tmp_path: Path) -> None:
    """Where the sizes of no step agree, none is chosen."""
    text = BLOOM.files["model.onnx"].replace("int64[1] heads = {2}", "int64[1] heads = {3}")
    contract = read_one(text, tmp_path)
    assert contract.heads is None
    assert "number of heads" in contract.missing[0].reason


@pytest.mark.parametrize("most", [100_000, 2000])
def test_a_number_of_heads_is_shown_once_all_others_were_tried(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(abstract_step, "AbstractStep", partial(abstract_step.AbstractStep, left=most))
    contract = read_one(BLOOM.files["model.onnx"], tmp_path)
    assert contract.heads == (2 if most == 100_000 else None)
    assert any("of 1 to 128" in words for words in contract.evidence) == (most == 100_000)


@pytest.mark.parametrize("hidden", ["", "of_queries"])
def test_the_graph_decides_on_the_number_of_heads_of_a_config_and_of_an_unnamed_axis(
    hidden: str, tmp_path: Path
) -> None:
    """A config has the number of heads of the queries, and an axis without the word heads may count them."""
    text = BLOOM.files["model.onnx"].replace("batch_size * num_heads", "batch_size * num_heads" if hidden else "rows")
    files = {
        "model.onnx": text,
        "config.json": BLOOM.files["config.json"].replace('"n_head": 2', '"head_dim": 4, "n_head": 4'),
    }
    report = step_test(str(replace(BLOOM, files=files if hidden else {"model.onnx": text}).write(tmp_path)))
    contract = report.stacks[0].contract
    assert contract is not None
    assert (contract.heads, {slot.axes[0] for slot in contract.slots}) == (2, {"batch_heads"})
    assert not report.findings
    assert report.verdict == "healthy", report.not_checked


CROSS = load_all()["layout-cross-given-healthy"]


@pytest.mark.parametrize("fault", [False, True])
def test_cross_attention_caches_have_rows_of_batch_times_heads(fault: bool, tmp_path: Path) -> None:
    text = _in_rows(CROSS.files["decoder.onnx"])
    report, contract = step_tested(_without_offset(text) if fault else text, tmp_path, CROSS)
    assert (contract.heads, {slot.axes[0] for slot in contract.slots}) == (2, {"batch_heads"})
    assert [finding.code for finding in report.findings] == (["KV315"] if fault else [])
    assert report.verdict == ("unhealthy" if fault else "healthy"), report.not_checked


def _in_rows(text: str) -> str:
    """Caches [batch * heads, length, 4] around a graph whose caches are [batch, 2, length, 4]."""
    head, body = text.split("{\n", 1)
    head = re.sub(r"float\[batch_size, 2, (.*), 4\]", r'float["batch_size * heads", \1, 4]', head)
    head = head.replace(
        "int64[2] heads_and_rows",
        "int64[1] two = {2}, int64[1] four = {4}, int64[1] rest = {-1}, int64[2] heads_and_rows",
    )
    pasts = sorted(set(re.findall(r'"past_key_values[^"]*"', head)))
    body = re.sub(r'"((?:past_key_values|present)[^"]*)"', r'"heads.\1"', body)
    body = body.replace(*PAST_LENGTH)
    begin = ["batch = Shape <end = 1> (input_ids)", "frames = Shape <start = 1> (encoder_attention_mask)"]
    begin.append('past = Shape <start = 1, end = 2> ("past_key_values.0.decoder.key")')
    for kind, length in (("decoder", "past"), ("encoder", "frames")):
        begin.append(f"{kind}_shape = Concat <axis = 0> (batch, two, {length}, four)")
    begin += [f'"heads.{past[1:]} = Reshape <allowzero = 1> ({past}, {past.split(".")[2]}_shape)' for past in pasts]
    end = ["rows_shape = Concat <axis = 0> (rest, total, four)"]
    end += [
        f'"{name}" = Reshape ("heads.{name}", rows_shape)'
        for name in (past[1:-1].replace("past_key_values", "present") for past in pasts)
        if ".decoder." in name
    ]
    return head + "{\n" + "\n".join([*begin, body.rstrip().removesuffix("}"), *end]) + "\n}\n"


PAST_LENGTH = ('  past = Shape <start = 2, end = 3> ("heads.past_key_values.0.decoder.key")\n', "")


@pytest.mark.parametrize("name", ["past", "past_length"])
def test_the_length_is_the_axis_that_is_named_so(name: str) -> None:
    """Where the graph does not show it: tokens may be the first axis, in front of the batch."""
    assert slot_axes((name, "batch", 16), "self-attention", "grow", None, None) == ("past", "batch", "head_dim")
    assert slot_axes(("batch", name, 16), "self-attention", "grow", None, None) == ("batch", "past", "head_dim")


def test_one_sequence_of_one_head_has_no_batch(tmp_path: Path) -> None:
    """Its cache [1, past, width] looks like a batch of 1, and its logits [tokens, vocabulary] do not."""
    text = ONE_SEQUENCE.replace("[2, ", "[1, ").replace("[8, 2, 4]", "[8, 1, 4]")
    report, _ = step_tested(text, tmp_path)
    assert not report.findings
    assert "has a batch axis" in report.not_checked[0].reason


def _without_offset(text: str) -> str:
    """The causal mask begins at the first entry of the past, wherever the new tokens are."""
    assert "offset = Squeeze (past)" in text
    text = text.replace("offset = Squeeze (past)", "offset = Squeeze (none)")
    return text.replace("int64[2] heads_and_rows", "int64[1] none = {0}, int64[2] heads_and_rows")


PASTS = [f"past_key_values.{layer}.{part}" for layer in (0, 1) for part in ("key", "value")]
TAKEN_APART = {
    "gather": "p{n} = Gather <axis = 0> (stack, n{k})",
    "slice": "s{n} = Slice (stack, i{k}, i{after}, i0)\n  p{n} = Squeeze (s{n}, i0)",
    "slice from behind": "s{n} = Slice (stack, b{k}, b{after}, i0)\n  p{n} = Squeeze (s{n}, i0)",
    "halves": "p{n} = Gather <axis = 0> (half{half}, n{rest})",
    "parts": "s{n} = Identity (part{k})\n  p{n} = Squeeze (s{n}, i0)",
}


@pytest.mark.parametrize("form", TAKEN_APART)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1)], ids=["straight", "layers crossed"])
def test_unnamed_pasts_are_followed_through_a_stack(form: str, order: tuple[int, ...], tmp_path: Path) -> None:
    """A past is filled by the output that its own entry of the stack is in, wherever that is taken to."""
    text = load_all()["decoder-only-healthy"].files["model.onnx"]
    head, body = text.split("\n{\n", 1)
    for number, past in enumerate(PASTS):
        body = body.replace(f'("{past}", ', f"(p{number}, ")
    stacked = [f'u{number} = Unsqueeze ("{past}", i0)' for number, past in enumerate(PASTS)]
    stacked += ["stack = Concat <axis = 0> (u0, u1, u2, u3)", "half0, half1 = Split <axis = 0> (stack)"]
    stacked += ["part0, rest = Split <axis = 0> (stack, one_three)", "part1, part2, part3 = Split <axis = 0> (rest)"]
    for number, k in enumerate(order):
        taken = {"n": number, "k": k, "after": k + 1, "half": k // 2, "rest": k % 2}
        stacked.append(TAKEN_APART[form].format(**taken))
    numbers = [f"int64[1] i{n} = {{{n}}}, int64 n{n} = {{{n}}}, int64[1] b{n} = {{{n - 4}}}" for n in range(4)]
    numbers += ["int64[1] i4 = {4}, int64[1] b4 = {100}, int64[2] one_three = {1, 3}"]
    head = head.replace("int64[2] heads_and_rows", ", ".join((*numbers, "int64[2] heads_and_rows")))
    text = "\n{\n".join((head, "\n  ".join(("", *stacked, body))))
    for number, past in enumerate(PASTS):
        text = text.replace(f'"{past}"', f"in_{number}").replace(
            f'"{past.replace("past_key_values", "present")}"', f"out_{number}"
        )
    found = {slot.past: slot.present for slot in read_slots(text, tmp_path)}
    assert found == {f"in_{k}": f"out_{number}" for number, k in enumerate(order)}
