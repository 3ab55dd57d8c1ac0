"""Why a check or an experiment has no result: each question has one answer, and the report gives it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from support.text_fixtures import load_all

from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.contract import SlotKind
from kvdoctor.decode.experiments import load
from kvdoctor.diagnose.build_report import find_short_ground
from kvdoctor.diagnose.context import RunContext, extend_context
from kvdoctor.diagnose.inspection import build_context, inspect
from kvdoctor.diagnose.not_checked import REPORTED_REQUESTS, why_unfit
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.findings import NotChecked, all_checks
from kvdoctor.options import Options
from kvdoctor.report import formats, text
from kvdoctor.report.document import Report
from kvdoctor.runtime.client import Runtime

FIXTURES = load_all()


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with Runtime(Options().limits) as one:
        yield one


@pytest.fixture(scope="module")
def nondeterministic(tmp_path_factory: pytest.TempPathFactory, runtime: Runtime) -> Report:
    return step_test(str(FIXTURES["nondeterministic"].write(tmp_path_factory.mktemp("model"))), runtime=runtime)


def answers(report: Report, code: str) -> list[NotChecked]:
    return [entry for entry in (*report.not_checked, *report.absent) if entry.code == code]


@pytest.mark.parametrize(
    ("code", "kind", "reason"),
    [
        ("KV301", "explained", "explained by nondeterministic"),
        ("KV315", "explained", "explained by nondeterministic"),
        ("KV208", "not-run", "only with --trace"),
        ("KV320", "not-run", "against-checkpoint was skipped: only with --reference"),
        ("KV401", "not-run", "only with --target"),
        ("paged-loop", "not-run", "the cache has no blocks"),
    ],
)
def test_each_absent_result_has_its_reason(nondeterministic: Report, code: str, kind: str, reason: str) -> None:
    assert [(entry.kind, entry.reason) for entry in answers(nondeterministic, code)] == [(kind, reason)]


def test_every_experiment_is_a_run_or_absent(nondeterministic: Report) -> None:
    known = {one.name for one in load() if one.on_request in REPORTED_REQUESTS}
    listed = {run.experiment for run in nondeterministic.runs}
    absent = {entry.code for entry in nondeterministic.absent} & known
    assert listed | absent == known
    assert not listed & absent


def test_a_finding_is_not_absent(nondeterministic: Report) -> None:
    found = {finding.code for finding in nondeterministic.findings}
    assert found
    assert found.isdisjoint(entry.code for entry in nondeterministic.absent)


def test_a_check_that_ran_and_found_nothing_is_not_absent(nondeterministic: Report) -> None:
    assert not answers(nondeterministic, "KV101")
    assert not answers(nondeterministic, "KV203")


def test_another_check_names_the_cause_of_one_use(tmp_path: Path, runtime: Runtime) -> None:
    report = step_test(str(FIXTURES["mask-not-offset"].write(tmp_path)), runtime=runtime)
    assert [entry.reason for entry in answers(report, "KV309")] == ["chunk is explained by mask-not-offset"]


def test_a_check_that_is_not_selected_is_listed(tmp_path: Path) -> None:
    options = Options(select=("KV1",))
    report = inspect(str(FIXTURES["mask-not-offset"].write(tmp_path)), options)
    assert [entry.kind for entry in answers(report, "KV203")] == ["not-selected"]
    assert not answers(report, "KV102")


def test_an_inspection_says_what_only_runs_show(tmp_path: Path) -> None:
    report = inspect(str(FIXTURES["mask-not-offset"].write(tmp_path)))
    assert [entry.reason for entry in answers(report, "KV2-KV5")] == ["only `kvdoctor step-test` runs decode steps"]


def test_without_runs_the_checks_of_runs_are_absent(tmp_path: Path, runtime: Runtime) -> None:
    report = step_test(str(FIXTURES["readings-open-one-token"].write(tmp_path)), runtime=runtime)
    missing = {entry.code for entry in report.absent if entry.reason == "no decode step was run"}
    assert {one.code for one in all_checks() if one.rounds == ("runs",) and not one.needs} <= missing


def test_the_answer_is_on_the_screen_and_in_the_json(nondeterministic: Report) -> None:
    page = StringIO()
    text.print_report(nondeterministic, Console(file=page, width=300), verbosity=2)
    lines = page.getvalue().splitlines()
    assert any(
        line.lstrip().startswith("no result: ") and "KV315" in line and "nondeterministic" in line for line in lines
    )
    document = json.loads(formats.render(nondeterministic, "json"))
    found = [entry["reason"] for entry in document["absent"] if entry["code"] == "KV315"]
    assert found == ["explained by nondeterministic"]


def test_one_experiment_drives_a_paged_cache(tmp_path: Path, runtime: Runtime) -> None:
    report = step_test(str(FIXTURES["layout-paged-pool-healthy"].write(tmp_path)), runtime=runtime)
    contract = next(stack.contract for stack in report.stacks)
    assert contract is not None
    assert [one.name for one in load() if why_unfit(one, contract) is None] == ["paged-loop"]


@pytest.mark.parametrize(("kind", "enough"), [("self-attention", True), ("hidden-memory", False)])
def test_few_tokens_are_no_ground_unless_attention_takes_no_more(kind: SlotKind, enough: bool, tmp_path: Path) -> None:
    """A buffer of another kind may only be read as one with a place for each token."""
    report = step_test(str(FIXTURES["layout-window-in-mask-healthy"].write(tmp_path)))
    contract = report.stacks[0].contract
    assert contract is not None
    slots = tuple(replace(slot, kind=kind) for slot in contract.slots)
    folder = open_folder(str(tmp_path))
    context = build_context(folder, folder.stacks[0], replace(contract, slots=slots), Options())
    found = list(find_short_ground(extend_context(context, RunContext, runs=report.runs)))
    assert [entry.essential for entry in found] == ([] if enough else [True])
