"""`speed`: figures that are measured here, and compared with others by arithmetic alone; no test depends on a clock."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.isolated import EXPORTS, FIXTURES, kvdoctor
from support.sampling import sampled
from support.text_fixtures import FOLDER, read

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.api import WRITES_SPEED
from kvdoctor.decode.speed import LEAK_BYTES, SpeedPoint, find_worse, spread
from kvdoctor.diagnose.checks.memory_grows import memory_grows
from kvdoctor.diagnose.context import SpeedContext, extend_context
from kvdoctor.diagnose.inspection import build_context
from kvdoctor.diagnose.speed import _find_before
from kvdoctor.errors import UsageError
from kvdoctor.options import Options
from kvdoctor.report.facts import SpeedFacts
from kvdoctor.report.json_format import report_of

STEADY = (1.0, 1.0, 1.0, 1.0, 1.0)
POINT = SpeedPoint(past=16, first=STEADY, step=STEADY, peak_bytes=1 << 30, written=1000)
Rounds = st.lists(st.floats(1e-4, 10), min_size=5, max_size=5).map(tuple)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of GPT-2, measured here."""
    done = kvdoctor("speed", EXPORTS / "gpt2", "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def against(earlier: dict[str, Any], tmp_path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps(earlier))
    done = kvdoctor("speed", EXPORTS / "gpt2", "--against", file, "--format", "json", *options)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def scaled(report: dict[str, Any], factor: float) -> dict[str, Any]:
    """The report with all times multiplied, each round the same: an earlier one that was that much slower."""
    changed: dict[str, Any] = json.loads(json.dumps(report))
    for point in changed["speed"][0]["points"]:
        for what in ("first", "step"):
            point[what] = [factor * sorted(point[what])[2]] * 5
    return changed


# --- by arithmetic ----------------------------------------------------------------------------------------------------


@given(Rounds, Rounds)
def test_a_model_is_not_slower_than_itself(first: tuple[float, ...], step: tuple[float, ...]) -> None:
    point = replace(POINT, first=first, step=step)
    assert all(found.noisy for found in find_worse((point,), (point,)))


@given(st.floats(1.11, 100), st.floats(1e-5, 10))
def test_steady_rounds_that_are_a_tenth_slower_are_worse(factor: float, unit: float) -> None:
    before = replace(POINT, step=(unit,) * 5)
    now = replace(POINT, step=(unit * factor,) * 5)
    assert [(found.what, found.noisy) for found in find_worse((now,), (before,))] == [("time of a step", False)]
    assert not list(find_worse((before,), (now,)))


def test_rounds_that_lie_apart_widen_the_tolerance_and_then_decide_nothing() -> None:
    uneven = replace(POINT, step=(0.9, 0.95, 1.0, 1.05, 1.1))
    assert spread(uneven.step) == pytest.approx(0.1)
    assert not list(find_worse((replace(uneven, step=tuple(1.15 * one for one in uneven.step)),), (uneven,)))
    assert [one.noisy for one in find_worse((replace(uneven, step=tuple(2 * x for x in uneven.step)),), (uneven,))] == [
        False
    ]
    wild = replace(POINT, step=(0.5, 0.6, 1.0, 1.4, 9.0))
    assert [found.noisy for found in find_worse((replace(wild, step=(90.0,) * 5),), (wild,))] == [True]


def test_one_round_of_five_in_which_the_machine_did_something_else_hides_nothing() -> None:
    assert spread((1.0, 1.0, 1.0, 1.0, 50.0)) == 0


def test_memory_and_written_bytes_are_compared() -> None:
    larger = replace(POINT, peak_bytes=POINT.peak_bytes * 2, written=POINT.written + 1)
    assert [found.what for found in find_worse((larger,), (POINT,))] == ["peak memory", "cache written per step"]
    assert not list(find_worse((replace(POINT, peak_bytes=POINT.peak_bytes + (8 << 20)),), (POINT,)))


@pytest.mark.parametrize(("grown", "findings"), [(LEAK_BYTES, 0), (LEAK_BYTES + 1, 1)])
def test_memory_that_equal_steps_take_is_a_leak(grown: int, findings: int) -> None:
    folder = open_folder(str(EXPORTS / "gpt2"))
    stack = folder.stacks[0]
    context = build_context(folder, stack, read_contract(stack, folder.side_cars), Options())
    facts = SpeedFacts(stack.name, "a processor", 2, "CPUExecutionProvider", (POINT,), 2000, grown)
    assert len(list(memory_grows(extend_context(context, SpeedContext, speed=facts)))) == findings


# --- by a run ---------------------------------------------------------------------------------------------------------


def test_each_length_that_fits_is_measured(measured: dict[str, Any]) -> None:
    (stack,) = measured["speed"]
    assert [point["past"] for point in stack["points"]] == [16, 63]
    assert stack["steps"] == 2000
    per_token = 2 * 2 * 32 * 4  # layers, keys and values, width, bytes
    assert [point["written"] for point in stack["points"]] == [17 * per_token, 64 * per_token]
    assert all(
        len(point[what]) == 5 and min(point[what]) > 0 for point in stack["points"] for what in ("first", "step")
    )
    assert measured["verdict"] == "nothing-found"


@pytest.mark.slow
def test_a_model_that_was_a_thousand_times_as_fast_is_slower_now(measured: dict[str, Any], tmp_path: Path) -> None:
    code, report = against(scaled(measured, 1e-3), tmp_path)
    judged = {one["where"] for one in report["findings"] if one["code"] == "KV503"}
    unclear = [one["reason"] for one in report["not_checked"]]
    assert (code == 1 and judged) or (code == 3 and unclear), report
    assert judged or all("vary too much" in reason for reason in unclear)


@pytest.mark.slow
def test_a_model_that_was_a_thousand_times_as_slow_is_not(measured: dict[str, Any], tmp_path: Path) -> None:
    _, report = against(scaled(measured, 1e3), tmp_path)
    assert not report["findings"]


def test_a_length_and_a_stack_that_are_not_there_any_more_are_not_as_fast(
    measured: dict[str, Any], tmp_path: Path
) -> None:
    earlier = scaled(measured, 1000.0)
    (stack,) = earlier["speed"]
    stack["points"].append({**stack["points"][-1], "past": 128})
    earlier["speed"].append({**stack, "stack": "merged"})
    code, report = against(earlier, tmp_path)
    assert (code, report["verdict"]) == (3, "incomplete")
    reasons = " ".join(one["reason"] for one in report["not_checked"])
    assert "the earlier report has a past of 128, which was not measured now" in reasons
    assert "it was measured in the earlier report, and is not there any more" in reasons


def test_a_report_of_another_machine_is_not_compared(measured: dict[str, Any], tmp_path: Path) -> None:
    other = scaled(measured, 1.0)
    other["speed"][0]["processor"] = "another"
    code, report = against(other, tmp_path)
    assert code == 3
    assert "from another machine" in report["not_checked"][0]["reason"]


@pytest.mark.slow
def test_a_report_of_another_model_is_called_that(measured: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "gpt2.json"
    file.write_text(json.dumps(measured))
    done = kvdoctor("speed", EXPORTS / "t5", "--against", file)
    assert done.returncode == 3
    assert f"the earlier report is of another model, {EXPORTS / 'gpt2'}: " in done.stdout
    assert f"kvdoctor speed {EXPORTS / 't5'} --output speed.json" in done.stdout
    assert "not there any more" not in done.stdout


def test_a_report_of_another_model_with_the_same_names_is_not_compared(
    measured: dict[str, Any], tmp_path: Path
) -> None:
    other = scaled(measured, 1e-3)
    other["stacks"][0]["contract"]["vocabulary"] += 1
    code, report = against(other, tmp_path)
    assert (code, report["findings"]) == (3, [])
    assert "of another model" in report["not_checked"][0]["reason"]


def test_a_model_with_other_heads_is_another_one(measured: dict[str, Any], tmp_path: Path) -> None:
    earlier = report_of(measured, "earlier.json")
    folder = open_folder(str(EXPORTS / "llama-gqa"))
    reason = _find_before(earlier, folder.stacks[0].name, read_contract(folder.stacks[0], folder.side_cars))
    assert isinstance(reason, str)
    assert f"of another model, {EXPORTS / 'gpt2'}: caches of 4 key-value heads; this one has caches of 2" in reason


@pytest.mark.parametrize("rounds", [[], [-1.0, 0, 0], [0.0], [1e400]])
def test_an_earlier_report_with_times_that_are_none_is_refused(measured: dict[str, Any], rounds: list[float]) -> None:
    changed = scaled(measured, 1.0)
    changed["speed"][0]["points"][1]["step"] = rounds
    with pytest.raises(
        UsageError, match=r"Report\.speed\[0\]\.points\[1\]\.step: expected seconds above 0.*writes one"
    ):
        report_of(changed, "earlier.json", WRITES_SPEED)


@pytest.mark.parametrize("name", sampled(["right", "right-rotary"], 2))
def test_the_longest_past_that_fits_is_measured_where_only_the_graph_says_which(name: str) -> None:
    done = kvdoctor("speed", FIXTURES / "from_scratch" / f"{name}.onnx", "--format", "json")
    assert done.returncode == 0, done.stdout + done.stderr
    (stack,) = json.loads(done.stdout)["speed"]
    assert [point["past"] for point in stack["points"]] == [16, 63]
    (reason,) = stack["left_out"]
    assert reason.startswith("no past of 128 or 1,024 tokens was measured: 64 tokens run, and 65 fail; 64 is a length")


def test_a_past_at_which_the_runtime_fails_is_said_in_short(tmp_path: Path) -> None:
    """No threshold of the graph says where: 100 minus the length is the size of a tensor."""
    names = "int64[2] heads_and_rows"
    breaks = "  left = Sub (hundred, total)\n  empty = ConstantOfShape (left)\n  none = ReduceSum (empty)\n"
    healthy = read(FOLDER / "decoder-only-healthy.onnxtxt")
    text = healthy.files["model.onnx"].replace(names, f"int64 hundred = {{100}}, {names}")
    text = text.replace(
        "  bias = Mul (seen_less, hide)\n", f"{breaks}  less = Add (seen_less, none)\n  bias = Mul (less, hide)\n"
    )
    replace(healthy, files={"model.onnx": text}).write(tmp_path)
    done = kvdoctor("speed", tmp_path / "model.onnx")
    assert "no past of 128 or 1,024 tokens was measured: the runtime fails (" in done.stdout
    assert f"kvdoctor step-test {tmp_path / 'model.onnx'} looks for the cause" in done.stdout
    assert "Non-zero status code" not in done.stdout


def test_lengths_beyond_the_declared_context_are_named(measured: dict[str, Any]) -> None:
    assert measured["speed"][0]["left_out"] == [
        "no past of 128 or 1,024 tokens was measured: the config allows 64 tokens"
    ]


def test_a_report_without_speed_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(kvdoctor("inspect", EXPORTS / "gpt2", "--format", "json").stdout)
    for path, words in ((file, "holds no speed"), (tmp_path / "missing.json", "missing.json")):
        done = kvdoctor("speed", EXPORTS / "gpt2", "--against", path)
        assert done.returncode == 2
        assert words in done.stderr


def test_what_cannot_be_run_is_not_measured(tmp_path: Path) -> None:
    done = kvdoctor("speed", EXPORTS / "t5" / "encoder_model.onnx")
    assert done.returncode == 3, done.stdout


@pytest.mark.parametrize("name", sampled(["text", "markdown", "html"], 3))
def test_the_table_is_in_every_format(name: str) -> None:
    done = kvdoctor("speed", EXPORTS / "llama-gqa", "--format", name)
    assert done.returncode == 0
    for words in (
        "first token",
        "cache written per step",
        "equal steps" if name != "markdown" else "tokens per second",
    ):
        assert words in done.stdout
