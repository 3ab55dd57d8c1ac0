"""The baseline of a gate: what is known, whose it is, until when, and what of it is to be repaired."""

import datetime as dt
import io
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import jsonschema
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.text_fixtures import load_all

from kvdoctor.api import schemas
from kvdoctor.cli.main import cli
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.errors import UsageError
from kvdoctor.findings import NotChecked
from kvdoctor.gating.baseline import (
    Baseline,
    BaselineEntry,
    MatchedReports,
    match_baseline,
    read_baseline,
    render_baseline,
    update_baseline,
)
from kvdoctor.gating.verdict import judge
from kvdoctor.options import BaselineChoices
from kvdoctor.report import formats, text
from kvdoctor.report.document import Report

DAY = dt.date(2026, 6, 1)
SICK = "cross-cache-emptied"


@pytest.fixture(scope="module")
def sick(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of a model with one error."""
    model = load_all()[SICK].write(tmp_path_factory.mktemp("sick"))
    report = replace(step_test(str(model)), command="gate")
    assert [finding.code for finding in report.findings if finding.severity == "error"] == ["KV203"]
    return report


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder with the folders of two models."""
    for name in ("a", "b"):
        (tmp_path / "models" / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def at(report: Report, path: str) -> Report:
    """The report as that of a model at another place, with the same graph."""
    return replace(report, model=replace(report.model, path=path))


def found(report: Report) -> tuple[Any, ...]:
    """What a baseline holds of a report: all its errors."""
    return tuple(finding for finding in report.findings if finding.severity == "error")


def known(*reports: Report, until: str | None = None, file: str = "baseline.json") -> Baseline:
    """A baseline with the errors of some reports."""
    empty = Baseline(file)
    wish = BaselineChoices("we hold it in our loop", until)
    return Baseline(file, update_baseline(empty, match_baseline(empty, reports, DAY), wish).entries)


def codes(result: MatchedReports) -> list[list[str]]:
    """What counts still, by report."""
    return [[f.code for f in found(report) if f.known is None] for report in result.reports]


# Whose it is


def test_a_known_finding_does_not_count_and_stays_in_sight(sick: Report, here: Path) -> None:
    a = at(sick, "models/a")
    result = match_baseline(known(a, until="2026-06-01"), [a], DAY)
    (report,) = result.reports
    assert (a.verdict, report.verdict) == ("unhealthy", "healthy")
    (finding,) = found(report)
    assert (finding.known.reason, finding.known.until) == ("we hold it in our loop", "2026-06-01")
    assert replace(finding, known=None) == found(a)[0]
    assert (result.status.known, list(result.status.lines())) == (1, [])
    assert judge(result.reports).exit_code == 0
    assert judge([a]).exit_code == 1


def test_the_entry_of_one_model_hides_nothing_of_another_with_the_same_fault(sick: Report, here: Path) -> None:
    a, b = at(sick, "models/a"), at(sick, "models/b")
    assert found(a)[0].fingerprint == found(b)[0].fingerprint
    for reports in ([a, b], [b, a]):
        result = match_baseline(known(a), reports, DAY)
        counting = dict(zip((r.model.path for r in reports), codes(result), strict=True))
        assert counting == {"models/a": [], "models/b": ["KV203"]}
    alone = match_baseline(known(a), [b], DAY)
    assert codes(alone) == [["KV203"]]
    assert list(alone.status.lines()) == []  # `a` was no part of this run


def test_a_folder_and_the_file_in_it_are_one_model(sick: Report, here: Path) -> None:
    folder, file, deeper = at(sick, "models/a"), at(sick, "models/a/m.onnx"), at(sick, "./models/a/onnx/m.onnx")
    for entry in (folder, file, deeper):
        for report in (folder, entry):
            assert codes(match_baseline(known(entry), [report], DAY)) == [[]]
    assert codes(match_baseline(known(folder), [at(sick, "models/b/m.onnx")], DAY)) == [["KV203"]]
    assert codes(match_baseline(known(folder), [at(sick, "models")], DAY)) == [["KV203"]]


def test_paths_are_those_from_the_folder_of_the_baseline(
    sick: Report, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "ci").mkdir()
    baseline = known(at(sick, "models/a"), file="ci/baseline.json")
    assert [entry.model for entry in baseline.entries] == ["../models/a"]
    monkeypatch.chdir(here / "models")
    assert codes(match_baseline(replace(baseline, file="../ci/baseline.json"), [at(sick, "a")], DAY)) == [[]]


# Until when


@pytest.mark.parametrize(("until", "counts"), [("2026-06-01", False), ("2026-05-31", True), (None, False)])
def test_an_expired_entry_counts_again(until: str | None, counts: bool, sick: Report, here: Path) -> None:
    a = at(sick, "models/a")
    result = match_baseline(known(a, until=until), [a], DAY)
    assert codes(result) == [["KV203"] if counts else []]
    assert [entry.until for entry in result.status.expired] == ([until] if counts else [])
    if counts:
        assert result.reports[0].verdict == "unhealthy"
        (line,) = result.status.lines()
        assert line.startswith("KV203 of models/a was known until 2026-05-31; it counts again")
        renewed = update_baseline(known(a, until=until), result, BaselineChoices("still so", "2027-01-01"))
        assert [(entry.reason, entry.until) for entry in renewed.entries] == [("still so", "2027-01-01")]
        kept = update_baseline(known(a, until=until), result, BaselineChoices(prune=True))
        assert kept.entries == known(a, until=until).entries


# What is to be repaired


def test_an_entry_is_stale_only_where_it_would_have_shown(sick: Report, here: Path) -> None:
    a = at(sick, "models/a")
    well = replace(a, findings=(), verdict="healthy")

    def stale(report: Report) -> list[str]:
        return [entry.code for entry in match_baseline(known(a), [report], DAY).status.stale]

    assert stale(well) == ["KV203"]
    assert stale(a) == []
    assert stale(at(well, "models/b")) == []
    assert stale(at(well, "models/a/m.onnx")) == []
    assert stale(replace(well, arguments={**a.arguments, "ignore": ["KV2"]})) == []
    assert stale(replace(well, arguments={**a.arguments, "select": ["KV3"]})) == []
    assert stale(replace(well, not_checked=(NotChecked(None, "KV203", "control failed"),))) == []
    assert stale(replace(well, not_checked=(NotChecked(None, "KV2*", "control failed"),))) == []
    assert stale(replace(well, not_checked=(NotChecked(None, "KV301", "control failed"),))) == ["KV203"]
    assert stale(replace(well, not_checked=(NotChecked(None, "KV2-KV3", "died", essential=True),))) == []


def test_what_a_run_that_looked_further_found_is_not_stale_in_one_that_does_not(sick: Report, here: Path) -> None:
    further = {**sick.arguments, "thorough": True}
    a = at(replace(sick, arguments=further), "models/a")
    baseline = known(a)
    assert {entry.found_with for entry in baseline.entries} == {("thorough", "full-context")}
    well = replace(a, findings=(), verdict="healthy")
    assert [entry.code for entry in match_baseline(baseline, [well], DAY).status.stale] == ["KV203"]
    assert match_baseline(baseline, [replace(well, arguments=sick.arguments)], DAY).status.stale == ()


def test_what_one_target_cannot_run_is_not_stale_under_another(sick: Report, here: Path) -> None:
    (error,) = found(sick)
    under = {name: {**sick.arguments, "target": [f"onnxruntime=={name}"]} for name in ("1.16.3", "1.22.0")}
    old = at(replace(sick, arguments=under["1.16.3"], findings=(replace(error, code="KV402"),)), "models/a")
    baseline = known(old)
    assert [entry.found_with for entry in baseline.entries] == [("target onnxruntime==1.16.3",)]
    well = replace(old, findings=(), verdict="healthy", targets=())
    assert match_baseline(baseline, [replace(well, arguments=under["1.22.0"])], DAY).status.stale == ()


def test_what_only_the_full_context_shows_is_not_stale_without_it(sick: Report, here: Path) -> None:
    a = at(replace(sick, arguments={**sick.arguments, "require": ["full-context"]}), "models/a")
    assert {entry.found_with for entry in known(a).entries} == {("full-context",)}
    well = replace(a, findings=(), verdict="healthy")
    assert match_baseline(known(a), [replace(well, arguments=sick.arguments)], DAY).status.stale == ()
    thorough = replace(well, arguments={**sick.arguments, "thorough": True})
    assert [entry.code for entry in match_baseline(known(a), [thorough], DAY).status.stale] == ["KV203"]


def test_pruning_takes_out_what_is_no_more_and_nothing_else(sick: Report, here: Path) -> None:
    a, b, gone = at(sick, "models/a"), at(sick, "models/b"), at(sick, "models/gone")
    baseline = known(a, b, gone)
    well = replace(a, findings=(), verdict="healthy")
    result = match_baseline(baseline, [well], DAY)
    looked = update_baseline(baseline, result, BaselineChoices())
    assert looked.entries == baseline.entries
    assert [line.partition(":")[0] for line in looked.left] == ["stale", "stale"]
    pruned = update_baseline(baseline, result, BaselineChoices(prune=True))
    assert [entry.model for entry in pruned.entries] == ["models/b"]
    assert pruned.changes == (
        "removed: KV203 of models/a: not found any more",
        "removed: KV203 of models/gone: the model is gone",
    )


def test_nothing_is_taken_in_silently_and_reasons_stay(sick: Report, here: Path) -> None:
    a, b = at(sick, "models/a"), at(sick, "models/b")
    baseline = known(a, until="2026-12-31")
    result = match_baseline(baseline, [a, b], DAY)
    asked = update_baseline(baseline, result, BaselineChoices(prune=True))
    assert asked.entries == baseline.entries
    assert [line[:25] for line in asked.left] == ["counts: models/b: error[K"]
    taken = update_baseline(baseline, result, BaselineChoices("new in the last release"))
    assert [(entry.model, entry.reason, entry.until) for entry in taken.entries] == [
        ("models/a", "we hold it in our loop", "2026-12-31"),
        ("models/b", "new in the last release", None),
    ]
    assert [line[:15] for line in taken.changes] == ["added: models/b"]


def test_what_could_not_be_checked_is_never_known(sick: Report, here: Path) -> None:
    a = at(sick, "models/a")
    died = replace(found(a)[0], code="KV001", name="unreadable", fingerprint="other")
    broken = replace(a, findings=(died,), verdict="incomplete")
    assert (
        update_baseline(
            Baseline("b"), match_baseline(Baseline("b"), [broken], DAY), BaselineChoices("let it be")
        ).entries
        == ()
    )
    baseline = known(a)
    entry = replace(baseline.entries[0], fingerprint="other")
    result = match_baseline(replace(baseline, entries=(entry,)), [broken], DAY)
    assert result.reports[0] == broken
    assert judge(result.reports).exit_code == 3
    assert update_baseline(baseline, result, BaselineChoices(prune=True)).open == ("models/a",)


# The file

WORDS = st.text(min_size=1, max_size=8).filter(str.strip)
ENTRIES = st.lists(
    st.builds(
        BaselineEntry,
        *(WORDS, st.sampled_from(["KV203", "KV301"]), st.text(max_size=8), WORDS),
        *(st.none() | st.dates().map(dt.date.isoformat), st.text("0123456789abcdef", min_size=4, max_size=16)),
    ),
    unique_by=lambda entry: (entry.model, entry.fingerprint),
    max_size=5,
)


VALIDATOR = jsonschema.Draft202012Validator(schemas()["baseline"])


@settings(max_examples=40, deadline=None)
@given(ENTRIES, st.randoms())
def test_a_baseline_comes_back_as_it_was_in_one_order(
    tmp_path_factory: pytest.TempPathFactory, entries: list[BaselineEntry], chance: Any
) -> None:
    text = render_baseline(entries)
    assert text.isascii()
    chance.shuffle(entries)
    assert render_baseline(entries) == text
    VALIDATOR.validate(json.loads(text))
    file = tmp_path_factory.getbasetemp() / "round-trip.json"
    file.write_text(text, encoding="utf-8")
    assert sorted(read_baseline(str(file)).entries, key=str) == sorted(entries, key=str)


ENTRY = {"model": "a", "code": "KV203", "where": "w", "reason": "r", "until": None, "fingerprint": "f"}


def body(**changes: Any) -> str:
    entry = {name: value for name, value in {**ENTRY, **changes}.items() if value is not ...}
    return json.dumps({"schema": "kvdoctor/baseline/1", "entries": [entry]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read: it is not JSON, Expecting value"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "its schema is None, not 'kvdoctor/baseline/1'"),
        ('{"schema": "kvdoctor/baseline/2"}', "upgrade kvdoctor, or write a new baseline"),
        ('{"schema": "kvdoctor/report/1"}', "its schema is 'kvdoctor/report/1', not"),
        ('{"schema": "kvdoctor/baseline/1"}', "got None, expected a list"),
        ('{"schema": "kvdoctor/baseline/1", "schema": 1}', "the key 'schema' occurs twice"),
        ('{"schema": "kvdoctor/baseline/1", "entries": [], "more": 1}', "an unknown key 'more'"),
        (body(reason=""), "entry 1 (KV203 of a) has no reason"),
        (body(reason=" \n"), "has no reason"),
        (body(reason=...), "entries[0]: field reason is missing"),
        (body(reason=3), "[0].reason: got 3, expected str"),
        (body(until="tomorrow"), "until takes a date, as in 2026-12-31, or null; got 'tomorrow'"),
        (body(until="2026-02-30"), "until takes a date"),
        (body(until="20261231"), "until takes a date"),
        (body(code="KV001"), "unreadable says that the model could not be diagnosed"),
        (body(why="x"), "unknown field 'why'"),
        (body().replace('"r"', "NaN"), "NaN is not a number"),
        (json.dumps({"schema": "kvdoctor/baseline/1", "entries": [ENTRY, {**ENTRY, "reason": "2"}]}), "occurs twice"),
    ],
)
def test_what_is_no_baseline_is_refused(text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "baseline.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError) as caught:
        read_baseline(str(file))
    assert words in str(caught.value)
    assert str(file) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file or directory; `kvdoctor baseline` writes one"):
        read_baseline(str(tmp_path / "lost.json"))
    file = tmp_path / "baseline.json"
    with file.open("wb") as sparse:
        sparse.truncate(65 << 20)
    with pytest.raises(UsageError, match="larger than 64 MiB"):
        read_baseline(str(file))
    file.write_bytes(b"\xef\xbb\xbf" + body().encode())
    assert len(read_baseline(str(file)).entries) == 1
    file.write_bytes(b"\xff\xfe{}")
    with pytest.raises(UsageError, match="cannot be read"):
        read_baseline(str(file))


# Every format


def test_every_format_shows_what_is_known(sick: Report, here: Path) -> None:
    a, b = at(sick, "models/a"), at(sick, "models/b")
    baseline = known(a, until="2026-12-31")
    hostile = replace(baseline.entries[0], reason="<b>]]>\n::error::\x1b[31m it")
    result = match_baseline(replace(baseline, entries=(hostile,)), [a, b], DAY)
    done = replace(judge(result.reports), baseline=result.status)
    render_baseline, reports = done.to_dict, list(done.reports)
    pages = {name: "".join(formats.write_gate(render_baseline, reports, (), name)) for name in formats.FORMATS}
    for name, page in pages.items():
        assert "it" in page, name
        assert "\x1b" not in page, name
        assert "2026-12-31" in page, name
    gate = json.loads(pages["json"])
    jsonschema.validate(gate, schemas()["gate"])
    assert [report["findings"][0]["known"] is not None for report in gate["reports"]] == [True, False]
    assert gate["verdict"] == "unhealthy"
    assert gate["baseline"]["known"] == 1
    results = json.loads(pages["sarif"])["runs"][0]["results"]
    errors = [result for result in results if result["level"] == "error"]
    assert [[s["kind"] for s in one["suppressions"]] for one in errors] == [["external"], []]
    assert all("suppressions" in one for one in results)
    suites = ET.fromstring(pages["junit"])  # noqa: S314 - our own
    cases = [case for case in suites.iter("testcase") if "KV203" in str(case.get("name"))]
    assert [(case.get("classname", "")[:8], len(case.findall("failure"))) for case in cases] == [
        ("models/a", 0),
        ("models/b", 1),
    ]
    told = [line for line in pages["github"].splitlines() if "KV203" in line]
    assert [line.split()[0] for line in told] == ["::error", "::notice"]


def test_a_known_finding_is_dim_on_a_terminal(sick: Report, here: Path) -> None:
    a = at(sick, "models/a")
    (report,) = match_baseline(known(a), [a], DAY).reports
    for one, line in ((report, "\x1b[2m\u00b7 known: error[KV203]"), (a, "\x1b[1;31m\u2717 error[KV203]")):
        page = io.StringIO()
        text.print_report(one, Console(file=page, width=100, force_terminal=True, color_system="standard"), -1)
        assert line in page.getvalue()


# The whole life, through the command line


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, arguments)
    refused = isinstance(result.exception, UsageError)
    return (2 if refused else result.exit_code), result.output + (str(result.exception) if refused else "")


@pytest.fixture
def project(here: Path) -> str:
    """The one model of a project that has a policy, and no baseline yet."""
    shutil.rmtree("models")
    written = load_all()[SICK].write(here / "models" / "sick")
    policy = "models = ['models/*']\nbaseline = 'known.json'\nselect = ['KV2']\ncache = false\n"
    Path("kvdoctor.toml").write_text(policy)
    return str((written if written.is_dir() else written.parent).relative_to(here))


def test_a_finding_is_written_down_and_the_gate_is_green(project: str) -> None:
    model = project
    code, said = run("gate")
    assert (code, "known.json cannot be read: No such file" in said) == (2, True)
    code, said = run("baseline", "--reason", "held in our loop", "--until", "2199-12-31")
    assert (code, said.splitlines()[-1]) == (0, "known.json: was written, 1 entry")
    text = Path("known.json").read_text()
    assert json.loads(text)["entries"][0]["model"] == model
    code, said = run("gate", "-q")
    assert code == 0
    assert "known: error[KV203] cross-cache-emptied (merged): until 2199-12-31: held in our loop" in said
    assert f"{model}: healthy but for known findings (1 error, " in said
    assert said.splitlines()[-2:] == [
        "gate: healthy; 1 of 1 model healthy, 1 of them with known findings alone; 1 known finding",
        "policy: kvdoctor.toml",
    ]


@pytest.mark.slow
def test_the_life_of_a_known_finding(project: str) -> None:
    model = project
    assert run("baseline", "--reason", "held in our loop", "--until", "2199-12-31")[0] == 0
    text = Path("known.json").read_text()
    assert run("baseline", "--check") == (0, "known.json: up to date, 1 entry\n")
    code, said = run("gate", "--ignore", "KV203", "--format", "json")
    gate = json.loads(said)
    assert (code, gate["policy"], gate["baseline"]["stale"]) == (0, "kvdoctor.toml", [])
    Path("known.json").write_text(text.replace("2199-12-31", "2020-01-01"))
    code, said = run("gate", "-q")
    assert code == 1
    assert f"baseline known.json: KV203 of {model} was known until 2020-01-01; it counts again" in said
    shutil.rmtree(model)
    shutil.copytree(Path(__file__).parent.parent / "fixtures" / "exports" / "gpt2", model)
    code, said = run("baseline", "--check")
    assert (code, said.splitlines()[0]) == (1, f"stale: KV203 of {model}: not found any more")
    assert run("baseline", "--prune")[0] == 0
    assert Path("known.json").read_text() == render_baseline(())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give --reason TEXT to add the findings that count"),
        (("--reason", " "), "it takes the reason why the findings may stay"),
        (("--until", "2199-01-01", "--prune"), "--until goes with --reason TEXT"),
        (("--until", "2020-01-01", "--reason", "r"), "--until 2020-01-01 is in the past"),
        (("--until", "soon", "--reason", "r"), "it takes a date, as in 2026-12-31; got 'soon'"),
        (("--prune", "-o", "no/where.json"), "the folder of 'no/where.json' does not exist"),
    ],
)
def test_wrong_calls_write_nothing(arguments: tuple[str, ...], words: str, here: Path) -> None:
    code, said = run("baseline", "models/a", *arguments)
    assert (code, words in " ".join(said.split())) == (2, True), said
    assert sorted(path.name for path in here.iterdir()) == ["models"]
