"""`kvdoctor explain TEXT`: an error message is found, with the question that decides between its causes, and issues."""

import json
import re
import runpy
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.famous_error import FIRST_TO_FAIL
from support.isolated import EXPORTS, give_up, kvdoctor
from support.sampling import first, sampled

from kvdoctor import step_test
from kvdoctor.cli.main import cli, list_commands
from kvdoctor.findings import all_checks
from kvdoctor.report.json_format import read_report
from kvdoctor.report.known_messages import KnownIssue, find_issues, find_texts, list_issues, list_texts

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
RELEASES = ("1.16.3", "1.20.1", "1.23.2", "1.31.1")


TEXTS = [line.split("\t") for line in (ROOT / "tests" / "known_texts.tsv").read_text("utf-8").splitlines()[1:]]
"""Texts of public issues in other language, each with the entries that it may lead to (`-`: none) and its source."""


def explain(text: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["explain", text])
    return done.exit_code, done.output


def emptied(text: str) -> bool:
    """Whether a message leads to the repair of an emptied cross-attention cache."""
    return any("(KV203)" in then for entry in find_texts(text).entries for _, then in entry.answers)


@pytest.mark.parametrize("name", ["faq", "glossary"])
def test_the_page_is_current(name: str) -> None:
    made = runpy.run_path(str(DOCS / "make_faq.py"))
    content = (made["page"] if name == "faq" else made["glossary"])()
    assert (DOCS / f"{name}.md").read_text(encoding="utf-8") == content


def test_every_text_and_symptom_of_the_table_leads_to_its_entry() -> None:
    entries = list_texts()
    assert len({entry.name for entry in entries}) == len(entries) >= 80
    for entry in entries:
        assert all(cause.question.endswith("?") and cause.then for cause in entry.causes), entry.name
        for text in (*entry.texts, *entry.symptoms):
            assert find_texts(text).entries[:1] == (entry,), text
        for text in entry.texts:
            log = f"[ONNXRuntimeError] : 1 : FAIL : Non-zero status code. Name:'/x/{text[:3]}' {text} (at some place)"
            assert entry in find_texts(log).entries, text


def test_texts_of_public_issues_lead_to_the_right_entry_or_to_none() -> None:
    assert len(TEXTS) >= 450
    names = {entry.name for entry in list_texts()}
    wrong = []
    for wanted, source, text in TEXTS:
        allowed = set() if wanted == "-" else set(wanted.split(","))
        found = {entry.name for entry in find_texts(text).entries}
        assert allowed <= names, source
        if not found <= allowed or bool(found) != bool(allowed):
            wrong.append(f"{text}: {found}, not {wanted}")
    assert not wrong, "\n".join(wrong)


def test_the_commands_of_the_table_exist() -> None:
    answers = " ".join(then for entry in list_texts() for _, then in entry.answers)
    called = set(re.findall(r"`kvdoctor ([a-z-]+)", answers))
    assert len(called) > 6
    assert called <= {*list_commands()}
    assert all((DOCS / page).exists() for page in re.findall(r"docs/([\w-]+\.md)", answers))


@pytest.mark.parametrize("name", sampled(FIRST_TO_FAIL, 4))
def test_the_message_of_an_emptied_cache_leads_to_its_repair(name: str) -> None:
    runs = step_test(str(ROOT / "fixtures" / "exports" / name)).runs
    (text,) = (run.error for run in runs if run.experiment == "plain-loop" and run.error)
    assert emptied(text), text


@pytest.mark.slow
@pytest.mark.parametrize("release", first([RELEASES[0], RELEASES[-1], *RELEASES[1:-1]], 2))
def test_the_message_of_each_release_leads_to_the_repair(release: str) -> None:
    for name in FIRST_TO_FAIL:
        target = f"onnxruntime=={release}"
        report = step_test(str(ROOT / "fixtures" / "exports" / name), targets=[target])
        if any(facts.not_run for facts in report.targets):
            give_up(f"{target} cannot be installed here")
        texts = [run.error for run in report.runs if run.target == target and run.experiment == "plain-loop"]
        assert any(texts), name
        assert all(emptied(text) for text in texts if text), texts


def test_a_message_is_answered_with_questions_and_commands() -> None:
    code, output = explain("matmul_helper.h:59 Compute MatMul  dimension mismatch")
    assert code == 0
    assert "encoder_attn" in output
    assert "kvdoctor re-export MODEL -o FIXED" in output
    assert explain("seqlens_k[2] = 17 is out of range")[0] == 0


def test_part_of_a_code_or_name_lists_the_checks() -> None:
    code, output = explain("KV31")
    assert code == 0
    assert all(line.startswith("KV31") for line in output.splitlines())
    assert "KV315  mask-not-offset" in output
    assert "cross-cache-emptied" in explain("emptied")[1]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("quantum flux", "no entry"),
        ("bfloat tricks for my phone", "no entry; closest:\n- `Opset"),
        ("shared buffer", "past and present are the same memory"),
        ("Shared Buffer", "shared buffer (term)"),
        ("hold", "Give the value of the prefill"),
        ("chunk", "chunk (experiment): "),
        ("fix", "kvdoctor re-export (command)"),
        ("compare", "kvdoctor diff (command)"),
        ("bench", "kvdoctor speed (command)"),
        ("gate", "kvdoctor gate (command)"),
        ("KV2", "KV201"),
    ],
)
def test_names_terms_and_unknown_texts_are_answered(text: str, shown: str) -> None:
    code, output = explain(text)
    assert code == 0
    assert shown in output
    if "no entry" in output:
        assert "kvdoctor step-test MODEL" in output


def test_a_synonym_of_a_command_is_answered_with_the_command() -> None:
    done = kvdoctor("validate", "model")
    assert done.returncode == 2
    assert "did you mean 'step-test'?" in done.stderr


MERGE = "https://github.com/huggingface/optimum/pull/926"
SCALE = "https://github.com/microsoft/onnxruntime/issues/28306"


@pytest.mark.parametrize("known", list_issues(), ids=lambda known: known.issue.url.rpartition("/")[2])
def test_each_entry_has_its_source_and_names_checks_that_exist(known: KnownIssue) -> None:
    assert re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(issues|pull)/\d+", known.issue.url)
    assert known.checks
    assert {*known.checks} <= {check.name for check in all_checks()}


def test_the_page_of_issues_is_current() -> None:
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
