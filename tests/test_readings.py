"""What a file leaves open of a port is settled by runs: one decoder under many readings, right and with a fault."""

from pathlib import Path

import numpy as np
import pytest
from support.bad_contracts import Edit, decoder
from support.bad_models import saved
from support.sampling import sampled

from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.errors import UsageError
from kvdoctor.options import Options
from kvdoctor.runtime.client import Runtime

MASK = 'int64[batch_size, "past_sequence_length + sequence_length"] attention_mask'
REAL = "real = Cast <to = 1> (attention_mask)"
POSITIONS = "  int64[batch_size, sequence_length] position_ids,\n"
PLACES = "places = Gather (w_positions, position_ids)"
LOGITS = "float[batch_size, sequence_length, 16] logits"
HEAD = "logits = MatMul (x2, w_logits)"
FIRST = "int64[batch_size, sequence_length] input_ids,"
LAST = "out1 = Einsum"


def with_input(port: str, old: str, new: str) -> tuple[Edit, ...]:
    """Another input, and the line that reads it."""
    return (FIRST, f"{FIRST}\n  {port},"), (old, new)


def counted(expression: str) -> tuple[Edit, ...]:
    """Positions that are made of one number, from which `expression` makes the first one."""
    nodes = f"""begin = {expression}
  zero = Constant <value_int = 0> ()
  step = Constant <value_int = 1> ()
  news = Squeeze (new)
  end = Add (begin, news)
  places_of = Range (begin, end, step)
  {PLACES.replace("position_ids", "places_of")}"""
    return (POSITIONS, ""), (PLACES, nodes)


READINGS: dict[str, tuple[Edit, ...]] = {
    "attention_mask: padding_mask": ((REAL, f"raw = {REAL[7:]}\n  real = Sub (one, raw)"),),
    "blank: padding_mask": (
        (MASK, MASK.replace("int64", "bool").replace("attention_mask", "blank")),
        (REAL, "shown = Not (blank)\n  real = Cast <to = 1> (shown)"),
    ),
    "extra: additive_mask": (
        (MASK, MASK.replace("int64", "float").replace("attention_mask", "extra")),
        (REAL, "real = Identity (extra)"),
        ("seen = Mul (causal, real4)", "seen = Identity (causal)"),
        ("bias = Mul (seen_less, hide)", "below = Mul (seen_less, hide)\n  bias = Add (below, real4)"),
    ),
    "logits: batch vocabulary new": (
        (LOGITS, "float[a, b, c] logits"),
        (HEAD, f"straight = {HEAD[9:]}\n  logits = Transpose <perm = [0, 2, 1]> (straight)"),
    ),
    "logits: batch_new vocabulary": (
        (LOGITS, "float[rows, 16] logits"),
        (HEAD, "straight = MatMul (x2, w_logits)\n  logits = Reshape (straight, wide)"),
        ("float hide", "int64[2] wide = {-1, 16}, float hide"),
    ),
    "chosen: logits": (
        (LOGITS, "int64[batch_size, sequence_length] chosen"),
        (HEAD, f"straight = {HEAD[9:]}\n  chosen = ArgMax <axis = -1, keepdims = 0> (straight)"),
    ),
    "t: past_length": (*counted("Identity (t)"), (FIRST, f"{FIRST}\n  int64 t,")),
    "n: total_length": (
        *counted("Sub (n, count)"),
        (FIRST, f"{FIRST}\n  int64 n,"),
        ("total = Add (past, new)", "total = Add (past, new)\n  count = Squeeze (new)"),
    ),
    "gain: setting": with_input("float gain", HEAD, f"plain = {HEAD[9:]}\n  logits = Mul (plain, gain)"),
    "origin: row_index": (
        *with_input("int32[batch_size] origin", "mixed1 = MatMul", "mixed1_of = MatMul"),
        (LAST, "mixed1 = Gather <axis = 0> (mixed1_of, origin)\n  " + LAST),
    ),
}
"""The port and its role or its axes: the edits that give the healthy decoder this port."""
FAULT: Edit = ("offset = Squeeze (past)", "offset = Constant <value_int = 0> ()")
"""The causal mask is not offset by the past."""


ADDED = with_input("float[1, sequence_length, 8] more", "x0 = Add (", "x0 = Sum (more, ")
BY_SHAPE: dict[str, tuple[Edit, ...]] = {
    "codes: batch new codebooks": (
        (FIRST, "int64[batch_size, sequence_length, 4] codes,"),
        ("1> (input_ids)", "1, end = 2> (codes)"),
        ("tokens = Gather (w_tokens, input_ids)", "books = Gather (w_tokens, codes)"),
        (PLACES, f"tokens = ReduceSum <keepdims = 0> (books, two)\n  {PLACES}"),
        ("float hide", "int64[1] two = {2}, float hide"),
    ),
    "ids: batch new": ((FIRST, "int64[batch_size, 4] ids,"), ("input_ids", "ids")),
    "more: batch new hidden": (*ADDED, ("batch_size", "1")),
    "more: fixed new hidden": ADDED,
}
"""Inputs with something for each token: four of it, a fixed number of tokens, a single sequence, one row for all."""


@pytest.mark.parametrize("name", [*READINGS, *BY_SHAPE])
def test_a_right_decoder_is_healthy_under_the_reading_that_runs_settle(
    name: str, tmp_path: Path, runtime: Runtime
) -> None:
    edits = {**READINGS, **BY_SHAPE}[name]
    report = step_test(str(saved(decoder(*edits), tmp_path / "model")), runtime=runtime)
    found = {f.name for f in report.findings if f.severity != "note"}
    frozen = {"batch-axis-frozen", "sequence-axis-frozen"} if name in BY_SHAPE else set()
    assert (report.verdict, found - frozen) == ("healthy", set())
    graph = report.stacks[0].contract.graph("decode")
    read = {f"{one.name}: {said}" for one in (*graph.inputs, *graph.outputs) for said in (one.role, " ".join(one.axes))}
    assert name in read
    assert ("names-mislead" in {f.name for f in report.findings}) == (name == "attention_mask: padding_mask")


@pytest.mark.parametrize("name", sampled(READINGS, 4))
def test_no_reading_hides_a_fault(name: str, tmp_path: Path, runtime: Runtime) -> None:
    report = step_test(str(saved(decoder(*READINGS[name], FAULT), tmp_path / "model")), runtime=runtime)
    assert report.verdict in ("unhealthy", "incomplete")
    assert any(finding.severity == "error" for finding in report.findings) or report.not_checked


ALL_AS_FIRST = """begin_row = Constant <value_ints = [0]> ()
  end_row = Constant <value_ints = [1]> ()
  first_row = Slice (input_ids, begin_row, end_row)
  sizes_of = Shape (input_ids)
  rows_of = Expand (first_row, sizes_of)
  tokens = Gather (w_tokens, rows_of)"""
ODD = """pair = Constant <value_ints = [2]> ()
  odd_count = Mod (past, pair)
  odd = Cast <to = 1> (odd_count)
  plain0 = Add (tokens, places)
  x0 = Add (plain0, odd)"""


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (("tokens = Gather (w_tokens, input_ids)", ALL_AS_FIRST), "batch-rows-interact"),
        (("x0 = Add (tokens, places)", ODD), "new-entries-wrong"),
    ],
)
def test_a_fault_of_batches_or_of_some_lengths_leaves_no_reading_open(
    fault: Edit, name: str, tmp_path: Path, runtime: Runtime
) -> None:
    """One row after a prompt of another length settles what two rows do not."""
    report = step_test(str(saved(decoder(*READINGS["n: total_length"], fault), tmp_path / "model")), runtime=runtime)
    assert report.verdict != "incomplete"
    assert [one.role for one in report.stacks[0].contract.graph("decode").inputs if one.name == "n"] == ["total_length"]
    assert name in {finding.name for finding in report.findings if finding.severity != "note"}


def test_the_caller_gives_the_values_of_any_other_input(tmp_path: Path, runtime: Runtime) -> None:
    values, model = tmp_path / "values.npz", str(saved(decoder(*READINGS["gain: setting"]), tmp_path / "model"))
    for value, healthy in ((2.5, True), (float("nan"), False)):
        np.savez(values, gain=np.array(value, np.float32))
        report = step_test(model, Options(inputs=str(values)), runtime)
        (open_,) = (one for one in report.stacks[0].contract.ambiguities if one.subject == "gain")
        assert (open_.readings[0].port.role, open_.settled) == ("condition", "given by the caller")
        assert (report.verdict == "healthy") == healthy
    np.savez(values, attention_mask=np.ones((1, 4), np.int64))
    with pytest.raises(UsageError, match="is not an input that can be given"):
        step_test(model, Options(inputs=str(values)), runtime)


def test_the_caller_decides_what_to_feed(tmp_path: Path, runtime: Runtime) -> None:
    model = str(saved(decoder(*READINGS["gain: setting"]), tmp_path / "model"))
    (open_,) = (one for one in inspect(model).stacks[0].contract.ambiguities if one.subject == "gain")
    assert (open_.unknown, open_.settled) == (True, "")
    given = step_test(model, Options(feed={"gain": 2.5}), runtime)
    assert given.verdict == "healthy"
    assert given.stacks[0].contract.graph("decode").port("setting").value == 2.5
    for wrong in ({"gains": 1.0}, {"past_key_values.0.key": 1.0}):
        with pytest.raises(UsageError, match="--feed"):
            step_test(model, Options(feed=wrong), runtime)
    with pytest.raises(UsageError, match="--logits-output"):
        step_test(model, Options(logits_output="logit"), runtime)
