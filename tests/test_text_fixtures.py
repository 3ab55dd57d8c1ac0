"""Every hand-written model brings exactly the findings that it states: unexpected and missing ones both fail."""

import platform
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.text_fixtures import Expected, Fixture, load_all

from kvdoctor.diagnose.build_report import LEAST
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.findings import all_checks
from kvdoctor.options import Options, read_options
from kvdoctor.report import text
from kvdoctor.report.document import Report
from kvdoctor.report.facts import UNDIAGNOSED
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.targets import parse_targets

FIXTURES = load_all()
FAULTY = [fixture for fixture in FIXTURES.values() if not fixture.healthy]


def sampled_fixtures() -> Iterator[object]:
    """Every faulty fixture, and one in three of the healthy ones; the others are run by the slow tests."""
    right = [name for name, one in FIXTURES.items() if one.healthy]
    for name, one in FIXTURES.items():
        later = one.healthy and right.index(name) % 3 > 0
        yield pytest.param(one, id=name, marks=pytest.mark.slow if later else ())


@pytest.fixture(params=sampled_fixtures())
def fixture(request: pytest.FixtureRequest) -> Fixture:
    chosen: Fixture = request.param
    if chosen.platform not in (None, platform.machine()):
        pytest.skip(f"only on {chosen.platform}")
    return chosen


def test_inspection(fixture: Fixture, tmp_path: Path) -> None:
    options = read_options(Options, {"targets": fixture.targets, "require": fixture.require})
    report = inspect(str(fixture.write(tmp_path)), options)
    _demand(fixture.expect_inspect, report)
    if fixture.healthy:  # nothing is predicted that a run does not show
        predicted = {finding.name for finding in report.findings if finding.predicted}
        assert predicted <= {expected.name for expected in fixture.expect}


def test_steps(fixture: Fixture, tmp_path: Path, runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fixture.write(tmp_path / "model")
    if fixture.targets:
        for name in ("XDG_CACHE_HOME", "UV_CACHE_DIR", "LOCALAPPDATA"):
            monkeypatch.setenv(name, str(tmp_path / "empty"))
        monkeypatch.delenv("UV_FIND_LINKS", raising=False)
    trace = str(folder / fixture.trace) if fixture.trace is not None else None
    targets = parse_targets(fixture.targets)
    options = read_options(Options, {"require": fixture.require, "trace": trace})
    options = replace(options, thorough=fixture.thorough, targets=targets, offline=bool(targets))
    report = step_test(str(folder), options, runtime)
    _demand(fixture.expect, report)
    said = [text for f in report.findings for text in (f.cause, f.observed, *f.evidence, *f.effects, f.repair.text)]
    assert not [text for text in fixture.says if not any(text in str(one) for one in said)], said
    assert _count_lines(report) <= 40
    if fixture.not_checked or fixture.healthy:
        assert {entry.code for entry in report.not_checked} == set(fixture.not_checked), report.not_checked
    if fixture.healthy:
        assert report.verdict in ({"healthy", *UNDIAGNOSED} if fixture.not_checked else {"healthy"})
        assert (report.verdict == "not-applicable") >= fixture.name.startswith("bare-")
    if report.verdict == "healthy" and "paged" not in fixture.name:
        limits = [s.contract.usable_length or LEAST for s in report.stacks if s.contract is not None]
        assert report.ground is not None
        assert report.ground.tokens >= min(LEAST, *limits)


@pytest.mark.parametrize("name", [name for name in FIXTURES if name.startswith("cross-cache-emptied")])
def test_a_loop_that_holds_is_not_hurt(name: str, tmp_path: Path, runtime: Runtime) -> None:
    report = step_test(str(FIXTURES[name].write(tmp_path)), Options(consumer="held"), runtime)
    held = [replace(e, severity="note") if e.severity == "error" else e for e in FIXTURES[name].expect]
    _demand(held, report)
    assert report.verdict == "healthy", report.not_checked


@pytest.mark.parametrize("faulty", FAULTY, ids=lambda fixture: fixture.name)
def test_a_faulty_model_has_a_healthy_twin(faulty: Fixture) -> None:
    twin = FIXTURES.get(faulty.twin or "")
    assert twin is not None, f"{faulty.name} names no twin that exists: {faulty.twin}"
    assert twin.name.endswith("healthy")
    assert twin.healthy
    assert not {e.name for e in twin.expect if e.severity != "note"} & {e.name for e in faulty.expect}
    assert set(faulty.files) <= set(twin.files)


ASKED_FOR = {
    "golden-differs",
    "memory-grows",
    "reference-differs",
    "slower",
    "target-fails",
    "target-differs",
}
"""Checks of what the user gives beside the model, or of other runtimes: their tests are elsewhere."""


@pytest.mark.parametrize("name", [c.name for c in all_checks() if "file" not in c.rounds and c.name not in ASKED_FOR])
def test_every_check_has_a_model_that_makes_it_fire(name: str) -> None:
    assert any(expected.name == name for fixture in FIXTURES.values() for expected in fixture.expect), name


def _demand(expected: "tuple[Expected, ...] | list[Expected]", report: Report) -> None:
    """Match findings and expectations one to one."""
    missing, unexpected = list(expected), []
    for finding in report.findings:
        subject = finding.subject[0] if finding.subject else ""
        alike = [e for e in missing if (e.name, e.severity) == (finding.name, finding.severity)]
        match = next((e for e in alike if _means(e.subject, subject)), None)
        if match is None:
            unexpected.append(f"{finding.name} {finding.severity} {subject}\n    ({finding.cause}; {finding.observed})")
        else:
            missing.remove(match)
    crashed = [entry.reason for entry in report.not_checked if "crashed" in entry.reason]
    lines = [f"missing:    {e}" for e in missing] + [f"unexpected: {u}" for u in unexpected]
    if lines or crashed:
        pytest.fail("\n".join(lines + crashed), pytrace=False)


def _count_lines(report: Report) -> int:
    """The lines of the first screen on a terminal of 80 columns."""
    page = StringIO()
    text.print_report(report, Console(file=page, width=80, force_terminal=True, color_system=None, highlight=False))
    return len(page.getvalue().splitlines())


def _means(expected: str, subject: str) -> bool:
    """A subject is a name, or a sentence that has the name in quotes."""
    return expected == subject or f"'{expected}'" in subject


@pytest.mark.parametrize(
    ("name", "first", "later"),
    [("merged-healthy", "false", "true"), ("merged-first-step-switch-healthy", "true", "false")],
)
def test_words_go_by_the_switch_of_the_graph(name: str, first: str, later: str, tmp_path: Path) -> None:
    report = step_test(str(FIXTURES[name].write(tmp_path)), Options())
    (note,) = (finding for finding in report.findings if finding.name == "cached-branch-first")
    assert note.declared == f"{first} on the first step"
    assert note.repair.text == f"feed {first} on the first step and {later} on every later one"


def test_a_loop_that_is_only_held_against_itself_says_so(tmp_path: Path) -> None:
    """One token at a time: there is no call without a cache, and the first pass is no reference run."""
    own = {"its own first pass", "the loop in the first session", "other histories"}
    for name, words in (("layout-rwkv-healthy", own), ("merged-healthy", {"the reference run"})):
        folder = tmp_path / name
        folder.mkdir()
        report = step_test(str(FIXTURES[name].write(folder)), Options())
        compared = (run for run in report.runs if run.experiment != "growing-states")
        assert {run.yardstick for run in compared if run.outcome == "passed"} == words


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("keys-change-with-length", "empty the cache at 21 tokens and prefill all of them again"),
        ("keys-change-with-each-length", "use no cache from 21 tokens on, or export with a fixed rotary base"),
    ],
)
def test_a_second_prefill_is_advised_where_it_helps(name: str, advice: str, tmp_path: Path, runtime: Runtime) -> None:
    (finding,) = step_test(str(FIXTURES[name].write(tmp_path)), None, runtime).findings
    assert finding.repair.text.startswith(advice)
    assert finding.cause.endswith("no loop with this cache gives the logits of such a call") == ("each" in name)


@pytest.mark.parametrize(
    ("name", "place"),
    [("wrong-at-lengths", 'correct Mul "scaled0", where the two calls first differ, or '), ("paged-pool-slot-off", "")],
)
def test_a_cause_that_no_run_proved_is_not_invented(name: str, place: str, tmp_path: Path, runtime: Runtime) -> None:
    report = step_test(str(FIXTURES[name].write(tmp_path)), None, runtime)
    text = report.findings[0].repair.text
    assert f"{place}export again; test the result" in text
    assert ("the runs do not show the cause" in text) == (not place)


def test_the_step_that_meets_the_fixed_length_is_shown(tmp_path: Path, runtime: Runtime) -> None:
    report = step_test(str(FIXTURES["past-axis-frozen-pair"].write(tmp_path)), None, runtime)
    (finding,) = report.findings
    assert finding.name == "past-axis-frozen"
    assert "step 2, fed a past of length 2, fails" in finding.effects[0]
    assert "sample inputs of different sizes, all 2 or more" in finding.repair.text
    (run,) = (run for run in report.runs if run.outcome != "skipped")
    assert (run.experiment, run.outcome, run.failed_step) == ("frozen-past", "failed", 2)
    assert [step.past_length for step in run.steps] == [0, 1, 2]


def test_a_first_step_that_cannot_fill_it_is_not_run(tmp_path: Path, runtime: Runtime) -> None:
    report = step_test(str(FIXTURES["past-axis-frozen"].write(tmp_path)), None, runtime)
    assert not report.runs
    assert any("fixed at 5" in entry.reason for entry in report.not_checked)
