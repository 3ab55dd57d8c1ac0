"""Help, usage errors, completion and color of the command line, as a user calls it."""

import os
import re
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from unittest.mock import patch

import click
import pytest
from click.shell_completion import BashComplete
from support import text_fixtures
from support.command_line import ROOT, Done, kvdoctor, run
from support.text_fixtures import load_all

from kvdoctor import inspect
from kvdoctor.addons.comparison.results_diff import compare_findings
from kvdoctor.addons.loops.languages import LANGUAGES
from kvdoctor.api import schemas
from kvdoctor.choices import FAIL_ON
from kvdoctor.cli.main import GROUPS, cli, find_command, list_commands, main
from kvdoctor.cli.options import GroupedOption
from kvdoctor.findings import SEVERITIES, Finding, reaches
from kvdoctor.options import OTHER, options_of
from kvdoctor.report.document import exit_code

MARIAN = "fixtures/exports/marian-4.46.3"
GPT2 = "fixtures/exports/gpt2"


def call(*arguments: str, **environment: str) -> Done:
    return run(*arguments, cwd=ROOT, env={**os.environ, **environment})


def test_a_path_alone_is_step_tested() -> None:
    code, out = kvdoctor(MARIAN, "-q")
    assert (code, out) == kvdoctor("step-test", MARIAN, "-q") == kvdoctor("-q", MARIAN)
    assert kvdoctor("--select", "KV2", "inspect", GPT2)[0] == 0
    assert "KV203" in out


@pytest.mark.parametrize("name", list_commands())
def test_every_option_stands_under_a_heading_and_every_command_has_a_whole_line(name: str) -> None:
    command = find_command(name)
    assert command is not None
    groups = {one.name: one.group for one in command.params if isinstance(one, GroupedOption)}
    assert OTHER not in groups.values()
    assert {one.name for one in command.params if one.param_type_name == "option"} == set(groups)
    assert len(command.get_short_help_str(limit=200)) + len("  re-export  ") <= 80


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("stp-test", GPT2), "there is no command and no path 'stp-test'; did you mean 'step-test'?"),
        (("x" * 300, GPT2), "there is no command and no path 'xxx"),
        (("inspect", f"{'x' * 300}.onnx"), "cannot be a path: File name too long"),
        (("missing/model.onnx",), "'missing/model.onnx' does not exist; give an .onnx file or the folder of an export"),
        (("step-test", GPT2, "--fail-on", "eror"), "got 'eror'; did you mean 'error'?"),
        (("step-test", GPT2, "--require", "beems"), "got 'beems'; did you mean 'beam'?"),
        (("step-test", GPT2, "--select", "cross-cash-emptied"), "did you mean 'cross-cache-emptied'?"),
        (("step-test", GPT2, "--provider", "cuda"), "did you mean CUDAExecutionProvider? the package onnxruntime-gpu"),
        (("step-test", GPT2, "--output", "report.doc"), "or a FILE that ends in .txt, .json, .md, .html"),
        (("step-test", GPT2, "-o", "page.html"), "--output FILE writes a report, `kvdoctor re-export PATH -o OUT`"),
        (("-o", "page.html", GPT2), "--output FILE writes a report, `kvdoctor re-export PATH -o OUT`"),
        (("inspect", GPT2, "--open"), "--open opens a page that is written; give --output FILE.html as well"),
        (("step-test",), "`python -m kvdoctor step-test --help` lists what it takes"),
    ],
)
def test_a_usage_error_says_what_was_probably_meant(arguments: tuple[str, ...], said: str) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvdoctor: ")
    assert said in done.stderr


def test_the_help_has_every_command_in_one_group() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(list_commands())


@pytest.mark.parametrize(("environment", "opened"), [({}, 1), ({"CI": "true"}, 0)])
def test_what_is_written_is_said_and_opened(environment: dict[str, str], opened: int, tmp_path: Path) -> None:
    without_ci = {name: value for name, value in os.environ.items() if name != "CI"}
    with patch("webbrowser.open") as browser:
        page = tmp_path / "page.html"
        done = run("inspect", GPT2, "--report", page, "--open", cwd=ROOT, env=without_ci | environment)
    assert done.stderr == f"written: {page}\n"
    assert [call.args for call in browser.call_args_list] == [(page.as_uri(),)] * opened


def test_a_folder_of_exports_is_sent_to_the_gate() -> None:
    code, out = kvdoctor("inspect", "fixtures/exports", "-v")
    assert code == 3
    assert "`kvdoctor gate fixtures/exports` checks the exports below it" in out


@pytest.mark.parametrize(("place", "out"), [(".", "../FIXED"), ("onnx", "../../FIXED"), ("..", "FIXED")])
def test_the_printed_command_works_where_it_was_printed(place: str, out: str, tmp_path: Path) -> None:
    """A copy inside the folder of the model would be refused."""
    model = load_all()["past-without-present"].write(tmp_path / "model")
    (model / "onnx").mkdir()
    path = os.path.relpath(model, model / place)
    here = model / place

    (printed,) = (line for line in run(path, cwd=here).stdout.splitlines() if "kvdoctor re-export" in line)
    words = shlex.split(printed)
    assert words == ["fix", "kvdoctor", "re-export", path, "-o", out]
    assert run(*words[2:], cwd=here).returncode == 0
    assert (here / out / "model.onnx").is_file()


def test_the_suffix_of_a_file_names_its_format(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("a.html", "b.json", "c.sarif", "d.xml", "e.md")}
    code, _ = kvdoctor("inspect", GPT2, *(f"--output={file}" for file in files.values()), f"--report=json={tmp_path}/f")
    assert code == 0
    assert files["a.html"].read_text().startswith("<!doctype html>")
    assert files["b.json"].read_text() == (tmp_path / "f").read_text()
    assert '"$schema"' in files["c.sarif"].read_text()
    assert "<testsuite" in files["d.xml"].read_text()
    assert files["e.md"].read_text().startswith("#")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("kvdoctor step-test --require batch,le", "plain,batch,left-padding"),
        ("kvdoctor step-test --select cross-cache-em", "plain,cross-cache-emptied"),
        ("kvdoctor step-test --consumer h", "plain,held"),
        ("kvdoctor re-", "plain,re-export"),
        ("kvdoctor explain cross-cache-em", "plain,cross-cache-emptied"),
        ("kvdoctor step-test fixt", "file,fixt"),
    ],
)
def test_a_shell_completes_commands_codes_and_uses(words: str, offered: str) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    with patch.dict(os.environ, asked):
        answer = BashComplete(cli, {}, "kvdoctor", "_KVDOCTOR_COMPLETE").complete()
    assert offered in answer.splitlines()


@pytest.mark.parametrize(
    ("environment", "colored"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"CLICOLOR_FORCE": "1"}, True), ({"CLICOLOR_FORCE": "0"}, False)],
)
def test_color_can_be_forced_in_a_pipe(environment: dict[str, str], colored: bool) -> None:
    assert ("\x1b[" in call("inspect", MARIAN, TERM="xterm", **environment).stdout) is colored


def test_a_pipe_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LINES", raising=False)
    for command in ("inspect", MARIAN), ("explain", "KV203"):
        wide, narrow = (call(*command, COLUMNS=columns).stdout for columns in ("", "80"))
        assert max(map(len, wide.splitlines())) > 100
        assert max(map(len, narrow.splitlines())) <= 80
        assert "\x1b[" not in narrow


def test_a_ci_job_without_a_terminal_sees_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from kvdoctor.cli import output

    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(output, "CI_SECONDS", 0.01)
    with output.progress_line(quiet=False) as line:
        assert line is not None
        line("plain-loop", 3, 27)
        said = ""
        while "3 of 27: plain-loop" not in said:
            said += capsys.readouterr().err
    with output.progress_line(quiet=True) as line:
        assert line is None


@pytest.mark.parametrize("command", ["inspect", "contract", "step-test", "re-export", "repro", "gate", "diff", "loop"])
def test_every_command_that_reads_a_model_takes_offline(command: str) -> None:
    """A script that must not use the network gives `--offline` to all of them."""
    options = {option.keyword for option in options_of(command)}
    assert "offline" in options
    assert {"providers", "timeout", "max_memory"} <= options or command in ("inspect", "contract")


def test_the_options_for_all_commands_are_those_of_contract(tmp_path: Path) -> None:
    model, file = ROOT / "fixtures" / "exports" / "gpt2", tmp_path / "contract.json"
    _, out = kvdoctor("contract", str(model), "-q", "--offline", "--color", "never", "--output", str(file))
    assert out.splitlines() == ["decoder", "  layout     optimum-decoder-only: model.onnx"]
    assert file.read_text() == kvdoctor("contract", str(model), "--format", "json")[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("schema",), "Choose from: report, gate, contract, diff, baseline, explain, env"),
        (("inspect", "-dash"), "The path is written ./-dash"),
        (("inspect", "loop"), "is a link that leads to no file"),
        (("inspect", ".", "-q", "-v"), "give --quiet or --verbose, not both"),
        (("step-test", ".", "--prompt-ids", ""), "it takes whole numbers, as in 1,2,3; got ''"),
        (("loop", ".", "-l", "js", "-o", "out"), "did you mean 'javascript'?"),
    ],
)
def test_a_wrong_call_says_what_to_do(
    words: tuple[str, ...],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "-dash").mkdir()
    (tmp_path / "file").write_text("# no JSON")
    (tmp_path / "loop").symlink_to("loop")
    monkeypatch.setattr(sys, "argv", ["kvdoctor", *words])
    monkeypatch.setattr("kvdoctor.cli.main._end_in_order", lambda: None)  # it is for a process of its own
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("command", "names"), [("loop", LANGUAGES), ("schema", schemas())])
def test_help_lists_every_name_that_can_be_given(command: str, names: Iterable[str]) -> None:
    found = find_command(command)
    assert found is not None
    text = " ".join(found.get_help(click.Context(found, info_name=command)).split())
    assert all(re.search(rf"\b{name}\b", text) for name in names)


FAILS_ON = {"suspected": {"error:suspected", "warning", "warning:suspected", "note", "note:suspected"}}
"""The values that make the exit code 1 for a suspected warning."""


@pytest.fixture(scope="module")
def doubtful(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of which an inspection suspects one warning and finds nothing else."""
    folder = tmp_path_factory.mktemp("doubtful")
    text_fixtures.read(text_fixtures.FOLDER / "mask-not-offset.onnxtxt").write(folder)
    (found,) = inspect(str(folder)).findings
    assert (found.severity, found.confidence) == ("warning", "suspected")
    return folder


@pytest.fixture(scope="module")
def suspicion(doubtful: Path) -> Finding:
    return inspect(str(doubtful)).findings[0]


@pytest.mark.parametrize("fail_on", FAIL_ON)
def test_a_suspected_warning_counts_where_it_is_asked_to(fail_on: str, suspicion: Finding, doubtful: Path) -> None:
    expected = fail_on in FAILS_ON["suspected"]
    assert reaches(suspicion, fail_on) == expected
    report = inspect(str(doubtful), fail_on=fail_on)
    assert exit_code(report, fail_on) == int(expected)
    assert (suspicion.name in str(report)) == expected


def test_certainty_changes_nothing_for_what_is_confirmed(suspicion: Finding) -> None:
    from dataclasses import replace

    for severity in SEVERITIES:
        finding = replace(suspicion, severity=severity, confidence="confirmed")
        for lowest in SEVERITIES:
            plain = reaches(finding, lowest)
            assert plain == reaches(finding, f"{lowest}:confirmed") == reaches(finding, f"{lowest}:suspected")


def test_inspect_gate_and_diff_agree(doubtful: Path, suspicion: Finding) -> None:
    for fail_on, code in (("error:suspected", 1), ("warning:confirmed", 0)):
        given = ("--fail-on", fail_on)
        assert run("inspect", doubtful, *given).returncode == code
        assert run("gate", doubtful, "--static", *given).returncode == code
        (new,) = compare_findings([], [suspicion], {}, fail_on)
        assert (new.effect == "worse") == (code == 1)


def test_a_policy_takes_the_same_words(doubtful: Path, tmp_path: Path) -> None:
    policy = tmp_path / "kvdoctor.toml"
    policy.write_text('fail-on = "error:suspected"\n')
    assert run("inspect", doubtful, "--config", policy).returncode == 1
    policy.write_text('fail-on = "never:suspected"\n')
    done = run("inspect", doubtful, "--config", policy)
    assert done.returncode == 2
    assert ":suspected" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("re-export", "fixtures/exports/gpt2", "--logits", "last"), "`kvdoctor convert` has it"),
        (("re-export", "fixtures/exports/gpt2", "--layout", "genai"), "`kvdoctor convert` has it"),
        (("inspect", "fixtures/exports/gpt2", "--reference", "x"), " have it"),
        (("re-export", "fixtures/exports/gpt2", "--fix", "batch=1", "--dry-run"), "convert PATH --sizes batch=1"),
        (("inspect", "fixtures/exports/gpt2", "--bogus"), "No such option '--bogus'"),
    ],
)
def test_an_option_of_another_command_leads_there(arguments: tuple[str, ...], hint: str) -> None:
    done = run(*arguments, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert hint in " ".join(done.stderr.split())
