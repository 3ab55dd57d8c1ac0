"""Known issues: a table of public issues, which findings, `explain` and SARIF point to without a network."""

import json
import re
import runpy
from pathlib import Path

import pytest
from support.isolated import EXPORTS, kvdoctor

from kvdoctor.diagnose.known_issues import KnownIssue, find_issues, list_issues
from kvdoctor.findings import all_checks
from kvdoctor.report.json_format import read_report

DOCS = Path(__file__).parents[1] / "docs"
MERGE = "https://github.com/huggingface/optimum/pull/926"
SCALE = "https://github.com/microsoft/onnxruntime/issues/28306"


@pytest.mark.parametrize("known", list_issues(), ids=lambda known: known.issue.url.rpartition("/")[2])
def test_each_entry_has_its_source_and_names_checks_that_exist(known: KnownIssue) -> None:
    assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", known.issue.url)
    assert known.checks
    assert {*known.checks} <= {check.name for check in all_checks()}


def test_the_page_is_current() -> None:
    made = runpy.run_path(str(DOCS / "make_known_issues.py"))["page"]()
    assert (DOCS / "known-issues.md").read_text(encoding="utf-8") == made


def test_a_finding_names_the_issue_that_may_explain_it_in_every_format(tmp_path: Path) -> None:
    names = ("json", "sarif", "markdown")
    more = [option for name in names for option in ("--output", f"{name}={tmp_path / name}")]
    done = kvdoctor("step-test", EXPORTS / "marian-4.57.6", "-v", *more)
    assert done.returncode == 1
    assert "optimum/pull/926" in done.stdout
    for name in names:
        assert MERGE in (tmp_path / name).read_text(encoding="utf-8"), name


def test_a_healthy_model_names_none() -> None:
    done = kvdoctor("step-test", EXPORTS / "gpt2", "--format", "json")
    assert "/issues/" not in done.stdout + done.stderr


def test_an_entry_wants_its_operators_and_its_quote(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text(kvdoctor("step-test", EXPORTS / "marian-4.57.6", "--format", "json").stdout)
    finding = next(one for one in read_report(str(file)).findings if one.name == "cross-cache-emptied")
    assert [issue.url for issue in find_issues(finding, {"If", "MatMul"}, "pytorch")][-1] == MERGE
    assert not find_issues(finding, {"MatMul"}, "pytorch")


def test_a_message_leads_to_its_issue() -> None:
    done = kvdoctor("explain", "qdq_actions.cc:137 Missing required scale: decoder.embed_scale for node: x")
    assert done.returncode == 0
    assert SCALE in done.stdout
    assert "fixed in onnxruntime 1.27.0" in done.stdout


def test_a_code_lists_the_issues_of_its_check() -> None:
    assert MERGE in kvdoctor("explain", "KV203").stdout
    assert "Known issues" not in kvdoctor("explain", "KV306").stdout


def test_a_report_without_issues_is_read_all_the_same(tmp_path: Path) -> None:
    """Reports of earlier versions have no such field."""
    document = json.loads(kvdoctor("inspect", EXPORTS / "marian-4.57.6", "--format", "json").stdout)
    for finding in document["findings"]:
        del finding["issues"]
    file = tmp_path / "old.json"
    file.write_text(json.dumps(document))
    assert [one.issues for one in read_report(str(file)).findings] == [()] * len(document["findings"])
