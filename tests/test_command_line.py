"""Help, usage errors, completion and color of the command line, as a user calls it."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import click
import pytest
from support.command_line import ROOT, kvdoctor
from support.text_fixtures import load_all

from kvdoctor.api import schemas
from kvdoctor.cli.main import COMMANDS, find_command, main
from kvdoctor.cli.options import GroupedOption
from kvdoctor.loops.language import languages
from kvdoctor.options import OTHER, options_of

MARIAN = "fixtures/exports/marian-4.46.3"
GPT2 = "fixtures/exports/gpt2"


def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "kvdoctor", *arguments]
    return subprocess.run(
        line, capture_output=True, text=True, check=False, cwd=ROOT, env={**os.environ, **environment}, timeout=120
    )


def test_a_path_alone_is_step_tested() -> None:
    code, out = kvdoctor(MARIAN, "-q")
    assert (code, out) == kvdoctor("step-test", MARIAN, "-q")
    assert "KV203" in out


@pytest.mark.parametrize("name", COMMANDS)
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
        (("step-test",), "`python -m kvdoctor step-test --help` lists what it takes"),
    ],
)
def test_a_usage_error_says_what_was_probably_meant(arguments: tuple[str, ...], said: str) -> None:
    done = call(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("kvdoctor: ")
    assert said in done.stderr


def test_a_folder_of_exports_is_sent_to_the_gate() -> None:
    code, out = kvdoctor("inspect", "fixtures/exports", "-v")
    assert code == 3
    assert "`kvdoctor gate fixtures/exports` checks the exports below it" in out


@pytest.mark.parametrize(("place", "out"), [(".", "../FIXED"), ("onnx", "../../FIXED"), ("..", "FIXED")])
def test_the_printed_command_works_where_it_was_printed(place: str, out: str, tmp_path: Path) -> None:
    """A copy inside the folder of the model would be refused."""
    model = tmp_path / "model"
    load_all()["past-without-present"].write(model)
    (model / "onnx").mkdir()
    path = os.path.relpath(model, model / place)
    here = model / place

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "kvdoctor", *words]
        return subprocess.run(line, capture_output=True, text=True, check=False, cwd=here)

    (printed,) = (line for line in run(path).stdout.splitlines() if "kvdoctor re-export" in line)
    words = shlex.split(printed)
    assert words == ["fix", "kvdoctor", "re-export", path, "-o", out]
    assert run(*words[2:]).returncode == 0
    assert (here / out / "model.onnx").is_file()


def test_the_suffix_of_a_file_names_its_format(tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("a.html", "b.json", "c.sarif", "d.xml", "e.md")}
    code, _ = kvdoctor("inspect", GPT2, *(f"--output={file}" for file in files.values()), f"--output=json={tmp_path}/f")
    assert code == 0
    assert files["a.html"].read_text().startswith("<!doctype html>")
    assert files["b.json"].read_text() == (tmp_path / "f").read_text()
    assert '"$schema"' in files["c.sarif"].read_text()
    assert "<testsuite" in files["d.xml"].read_text()
    assert files["e.md"].read_text().startswith("#")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("kvdoctor step-test --require batch,le", "batch,left-padding"),
        ("kvdoctor step-test --select cross-cache-em", "cross-cache-emptied"),
        ("kvdoctor step-test --consumer h", "held"),
        ("kvdoctor re-", "re-export"),
        ("kvdoctor explain cross-cache-em", "cross-cache-emptied"),
    ],
)
def test_a_shell_completes_commands_codes_and_uses(words: str, offered: str) -> None:
    count = str(len(words.split()) - 1)
    script = "from kvdoctor.cli.main import cli; cli.main(prog_name='kvdoctor')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "_KVDOCTOR_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": count},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert f"plain,{offered}" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("environment", "colored"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"CLICOLOR_FORCE": "1"}, True), ({"CLICOLOR_FORCE": "0"}, False)],
)
def test_color_can_be_forced_in_a_pipe(environment: dict[str, str], colored: bool) -> None:
    assert ("\x1b[" in call("inspect", MARIAN, TERM="xterm", **environment).stdout) is colored


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


@pytest.mark.parametrize(
    "command", ["inspect", "contract", "step-test", "re-export", "repro", "gate", "diff", "loop", "probe", "judge"]
)
def test_every_command_that_reads_a_model_takes_offline(command: str) -> None:
    """A script that must not use the network gives `--offline` to all of them."""
    options = {option.keyword for option in options_of(command)}
    assert "offline" in options
    assert {"provider", "timeout", "max_memory"} <= options or command in ("inspect", "contract")


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
        (("judge", ".", "file"), "run the probe again (docs/probe.md)"),
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


@pytest.mark.parametrize(("command", "names"), [("loop", languages()), ("schema", schemas())])
def test_help_lists_every_name_that_can_be_given(command: str, names: Iterable[str]) -> None:
    found = find_command(command)
    assert found is not None
    text = " ".join(found.get_help(click.Context(found, info_name=command)).split())
    assert all(re.search(rf"\b{name}\b", text) for name in names)
