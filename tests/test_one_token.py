"""Graphs that take one token a call, states over many tokens, and caches in one buffer."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from support.isolated import FIXTURES as SOURCES
from support.isolated import kvdoctor
from support.text_fixtures import load_all
from test_experiments import Scripted, named

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Call, Scenario, as_array
from kvdoctor.decode.experiments.cache_entries import keep_entries
from kvdoctor.decode.experiments.long_states import LAST, PLACES, _find_amplified
from kvdoctor.decode.experiments.one_token import KEPT, LOOP
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.options import Options
from kvdoctor.report.document import Report
from kvdoctor.runtime.client import Runtime

FIXTURES = load_all()
ONE_TOKEN = ("mamba-states", "canary")
OTHERS = ("rwkv", "rwkv-mobile", "lstm-plain", "shift-left", "aihub-opus", "aihub-whisper", "ort-t5-init")
TOKENS = 8


def diagnosed(name: str, folder: Path, runtime: Runtime, **options: Any) -> Report:
    return step_test(str(FIXTURES[name].write(folder)), Options(**options), runtime)


@pytest.mark.parametrize("name", [*ONE_TOKEN, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)])
def test_a_healthy_one_is_healthy_and_says_what_was_compared(name: str, tmp_path: Path, runtime: Runtime) -> None:
    report = diagnosed(f"layout-{name}-healthy", tmp_path, runtime)
    assert report.verdict == "healthy", report.not_checked
    (entry,) = report.not_checked
    assert not entry.essential
    batch = any(run.experiment == "batch" and run.outcome == "passed" for run in report.runs)
    assert "when run again, in a fresh session" in entry.reason
    assert "others after other tokens" in entry.reason
    assert ("for each batch row alone" in entry.reason) == batch


def test_a_suspicion_that_no_comparison_refutes_keeps_it_open(tmp_path: Path, runtime: Runtime) -> None:
    report = diagnosed("layers-swapped-states", tmp_path, runtime)
    assert report.verdict == "unhealthy"
    assert any("nothing else refutes KV307 layers-swapped" in entry.reason for entry in report.not_checked)


def test_a_model_of_several_tokens_does_not_list_them(tmp_path: Path, runtime: Runtime) -> None:
    report = diagnosed("decoder-only-healthy", tmp_path, runtime)
    assert not {"history", "own-session"} & {run.experiment for run in report.runs}


def test_a_required_batch_is_proved_by_rows_alone(tmp_path: Path, runtime: Runtime) -> None:
    report = diagnosed("layout-mamba-states-healthy", tmp_path, runtime, require=("batch", "beam"))
    assert (report.verdict, [entry.code for entry in report.not_checked]) == ("healthy", ["KV301"])


def read_contract(name: str, folder: Path) -> CacheContract:
    contract = inspect(str(FIXTURES[name].write(folder))).stacks[0].contract
    assert contract is not None
    return contract


class Decoder:
    """Answers calls of the Mamba fixture: a state that adds up token ids, with faults by name."""

    def __init__(self, contract: CacheContract, fault: str = "") -> None:
        self.contract, self.fault, self.called, self.seen = contract, fault, 0, 0.0

    def answer(self, call: Call) -> Answer:
        self.called += 1
        token = float(as_array(call.feeds["input_ids"]).sum())
        self.seen += token
        outputs, total = dict[str, Any](), 0.0
        for index, slot in enumerate(self.contract.slots):
            past = as_array(call.feeds[slot.past]).astype(np.float64)
            reads = not (self.fault == "unread" and index == 1)
            takes = not (self.fault == "untouched" and index == 1)
            total += float(past.mean()) * (index + 1) if reads else 0.0
            outputs[slot.present or ""] = Scripted(past * 0.5 + (token * (index + 1) if takes else 1.0))
        hidden = self.seen if self.fault == "remembers" else 0.0
        outputs["logits"] = Scripted(np.sin(np.arange(16.0) * (1 + total + token + hidden)).reshape(1, 1, 16))
        return Answer(outputs, "logits", call.past, call.new)


def drive(name: str, builder: FeedBuilder, decoder: Decoder) -> tuple[list[tuple[Call, Answer]], Cause | None]:
    done: list[tuple[Call, Answer]] = []
    running = named(name).calls(builder)
    try:
        call = next(running)
        while True:
            done.append((call, decoder.answer(call)))
            call = running.send(done[-1][1])
    except StopIteration as end:
        return done, end.value


@pytest.mark.parametrize(
    ("fault", "cause"), [("", None), ("unread", "past-ignored"), ("untouched", "present-does-not-grow")]
)
def test_a_history_decides_by_bits(fault: str, cause: str | None, tmp_path: Path) -> None:
    contract = read_contract("layout-mamba-states-healthy", tmp_path)
    _, decided = drive("history", FeedBuilder(contract, Scenario(prompt=1, steps=TOKENS)), Decoder(contract, fault))
    assert (decided.name if decided is not None else None) == cause
    assert decided is None or ".0.ssm_state" in decided.evidence


@pytest.mark.parametrize("fault", ["", "remembers"])
def test_a_session_of_its_own_shows_what_a_session_remembers(fault: str, tmp_path: Path) -> None:
    contract = read_contract("layout-mamba-states-healthy", tmp_path)
    builder = FeedBuilder(contract, Scenario(prompt=1, steps=TOKENS), scratch=tmp_path)
    drive("plain-loop", builder, Decoder(contract, fault))
    assert (tmp_path / KEPT).exists()
    done, _ = drive("own-session", builder, Decoder(contract, fault))
    assert not (tmp_path / KEPT).exists()
    steps = [(call, answer) for call, answer in done if call.kind == "step"]
    between = [call for call, _ in done if call.kind == "probe"]
    assert (len(steps), len(between)) == (LOOP, LOOP)
    same = all(np.array_equal(answer.logits, call.expected) for call, answer in steps if call.expected is not None)
    assert same == (fault == "")


def test_a_long_walk_is_compared_at_its_places(tmp_path: Path) -> None:
    contract = read_contract("layout-mamba-states-healthy", tmp_path)
    done, cause = drive("long-states", FeedBuilder(contract, named("long-states").scenario), Decoder(contract))
    assert cause is None
    assert [call.past + call.new for call, _ in done if call.kind == "step"] == list(PLACES)
    assert all(call.expected is not None for call, _ in done if call.kind == "step")


def test_many_entries_are_matched_by_norms_of_which_one_makes_place() -> None:
    fed = np.logspace(-6, 140, 10_000)[:, None]
    kept = [keep_entries(fed, np.concatenate([fed[at:], np.full((at, 1), 1e149)])) for at in range(3)]
    assert kept == [True, True, False]


@pytest.mark.parametrize(
    ("sizes", "decided"),
    [((1.0, 1.0, 1.0), False), ((1.0, 4.0, 16.0), False), ((1.0, 20.0, 400.0), True), ((1.0, 2.0, np.inf), True)],
)
def test_what_each_step_amplifies_is_told_from_what_adds_up(sizes: tuple[float, ...], decided: bool) -> None:
    cause = _find_amplified({length: {"state": size} for length, size in zip(LAST, sizes, strict=True)})
    assert (cause is not None) == decided


def test_one_buffer_binds_each_present_onto_its_past(tmp_path: Path) -> None:
    contract = read_contract("layout-gqa-growing-healthy", tmp_path)
    assert {slot.growth for slot in contract.slots} == {"shared"}
    assert (experiment := named("one-buffer")).applies(contract) is None
    grown = replace(contract, slots=tuple(replace(slot, growth="grow") for slot in contract.slots))
    assert experiment.applies(grown) == "no present has the shape of its past"


RIGHT = SOURCES / "from_scratch" / "right.onnx"
NO_TOKENS, POSITIONS = "wte.weight", "wpe.weight"
QUERIES_KEYS_VALUES = "onnx::MatMul_336"
"""float[32, 96] of layer 1: the columns are queries, keys and values."""


def write(path: Path, weight: str, change: str) -> Path:
    """Write a copy of the healthy decoder with some columns or rows of a weight changed."""
    model = onnx.load(RIGHT)
    tensor = next(tensor for tensor in model.graph.initializer if tensor.name == weight)
    values = numpy_helper.to_array(tensor).copy()
    if change == "zeros":
        values[:] = 0
    elif change == "no values":
        values[:, 64:] = 0
    elif change == "pairs of equal rows":
        values[1::2] = values[::2]
    tensor.CopyFrom(numpy_helper.from_array(values, weight))
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("weight", "reason"),
    [(NO_TOKENS, "no token changes the logits: "), (QUERIES_KEYS_VALUES, "no token changes layer 1 of the cache: ")],
)
def test_what_no_token_changes_is_not_healthy(weight: str, reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx", weight, "zeros")
    done = kvdoctor("step-test", path, "--format", "json")
    document = json.loads(done.stdout)
    assert (done.returncode, document["verdict"], document["findings"]) == (3, "incomplete", [])
    (why,) = (each["reason"] for each in document["not_checked"] if each["essential"])
    assert reason in why
    assert kvdoctor("record", path, "-o", tmp_path / "golden.json").returncode == 3
    assert not (tmp_path / "golden.json").exists()


def test_a_comparison_with_such_a_model_is_no_pass(tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx", NO_TOKENS, "zeros")
    done = kvdoctor("diff", RIGHT, path)
    assert done.returncode == 3
    assert "no token changes the logits" in done.stdout


@pytest.mark.parametrize(
    ("weight", "change"),
    [(QUERIES_KEYS_VALUES, "no values"), (NO_TOKENS, "pairs of equal rows"), (POSITIONS, "zeros"), (NO_TOKENS, "")],
)
def test_constant_values_equal_rows_and_missing_positions_are_healthy(weight: str, change: str, tmp_path: Path) -> None:
    path = write(tmp_path / "model.onnx", weight, change)
    document = json.loads(kvdoctor("step-test", path, "--format", "json").stdout)
    assert document["verdict"] == "healthy", document["not_checked"]
