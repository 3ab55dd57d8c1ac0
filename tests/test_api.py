"""`import kvdoctor`: reports and refusals of the command line, and no trace in the process that asks."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import text_fixtures

import kvdoctor
from kvdoctor import api
from kvdoctor.options import Options, options_of, read_options

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three models: `sick`, `healthy`, and `empty`, a file without bytes."""
    folder = tmp_path_factory.mktemp("models")
    for name, text in (("sick", "cross-cache-emptied"), ("healthy", "decoder-only-healthy")):
        text_fixtures.read(text_fixtures.FOLDER / f"{text}.onnxtxt").write(folder / name)
    (folder / "empty").mkdir()
    (folder / "empty" / "model.onnx").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def sick(models: Path) -> kvdoctor.Report:
    return kvdoctor.step_test(models / "sick")


def run(*command: object, cwd: Path | None = None) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False, cwd=cwd)


# --- the process that asks --------------------------------------------------------------------------------------------


def test_importing_it_is_light() -> None:
    program = "import sys, kvdoctor; dir(kvdoctor); print(*sys.modules)"
    loaded = set(run("-c", program).stdout.split())
    assert "kvdoctor" in loaded
    assert not loaded & {"onnx", "numpy", "rich", "click", "onnxruntime", "psutil", "kvdoctor.api"}


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_the_first_page_loads_nothing_heavy(option: str) -> None:
    """Python starts in 0.02 s; what a page loads beside it decides how long a user waits (benchmarks: `start`)."""
    program = (
        "import sys\nsys.argv = ['kvdoctor', sys.argv[1]]\nfrom kvdoctor.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nprint(*sys.modules)"
    )
    loaded = set(run("-c", program, option).stdout.splitlines()[-1].split())
    assert "kvdoctor.cli.main" in loaded
    assert not loaded & {"onnx", "numpy", "rich", "onnxruntime", "psutil", "kvdoctor.analysis", "kvdoctor.model"}


PROGRAM = """
import asyncio, code, io, os, signal, sys, threading
import kvdoctor

def state():
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return os.getcwd(), dict(os.environ), handlers, sys.stdout, list(sys.path)

path, before = sys.argv[1], state()
reports = [kvdoctor.step_test(path)]
thread = threading.Thread(target=lambda: reports.append(kvdoctor.step_test(path)))
thread.start()
thread.join()

async def cell():
    reports.append(kvdoctor.inspect(path))
asyncio.run(cell())
assert state() == before, "the process is another one"

out, sys.stdout, sys.stderr = sys.stdout, io.StringIO(), io.StringIO()
code.InteractiveInterpreter({"path": path, "reports": reports}).runsource(
    "import kvdoctor; reports.append(kvdoctor.gate(path).reports[0])", symbol="exec")
said, sys.stdout, sys.stderr = sys.stdout.getvalue() + sys.stderr.getvalue(), out, sys.__stderr__
assert not said, said
assert threading.active_count() == 1 or all(thread.daemon for thread in threading.enumerate()[1:])
print(*(report.verdict for report in reports))
"""


def test_it_works_anywhere_and_leaves_no_trace(models: Path, tmp_path: Path) -> None:
    """From a script without a guard, twice, in a thread, in an event loop, in an interactive session."""
    (tmp_path / "script.py").write_text(PROGRAM)
    done = run(tmp_path / "script.py", models / "healthy", cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout == "healthy healthy nothing-found healthy\n"
    assert [file.name for file in tmp_path.iterdir()] == ["script.py"]


# --- reports ----------------------------------------------------------------------------------------------------------


def test_it_returns_what_the_command_line_prints(models: Path, sick: kvdoctor.Report) -> None:
    printed = json.loads(run("-m", "kvdoctor", "step-test", models / "sick", "--format", "json").stdout)
    mine = json.loads(json.dumps(sick.to_dict()))
    assert printed.pop("measured").keys() == mine.pop("measured").keys()
    assert printed == mine


def test_a_report_is_rendered_in_every_format_of_the_command_line(models: Path, sick: kvdoctor.Report) -> None:
    lines = kvdoctor.render(sick).splitlines()
    assert lines[0] == f"kvdoctor step-test {models / 'sick'}"
    assert lines[-1].startswith("unhealthy: 1 error, 1 note \u00b7 ")
    assert lines[-1].endswith("exit 1 · details: -v")
    assert json.loads(kvdoctor.render(sick, "json")) == json.loads(json.dumps(sick.to_dict()))
    with pytest.raises(kvdoctor.UsageError, match="no format 'yaml'; it is one of text, json"):
        kvdoctor.render(sick, "yaml")


def test_a_report_as_text_is_its_verdict_and_the_findings_that_count(models: Path, sick: kvdoctor.Report) -> None:
    lines = str(sick).splitlines()
    assert lines[0] == f"{models / 'sick'}: unhealthy (1 error, 1 note)"
    assert [line.partition(" ")[0] for line in lines if line.startswith(("error", "note"))] == ["error[KV203]"]


def test_a_report_is_read_back(sick: kvdoctor.Report, tmp_path: Path) -> None:
    later = {**sick.to_dict(), "added later": 1}
    later["findings"] = [{**finding, "added later": {}} for finding in later["findings"]]
    for name, document in (
        ("report", sick.to_dict()),
        ("later", later),
        ("gate", {"schema": "kvdoctor/gate/1", "verdict": "unhealthy", "reports": [sick.to_dict()]}),
    ):
        (tmp_path / name).write_text(json.dumps(document))
        assert kvdoctor.read_report(tmp_path / name) == sick, name


def test_findings_are_raised_in_words(sick: kvdoctor.Report) -> None:
    with pytest.raises(kvdoctor.Unhealthy) as raised:
        sick.raise_for_findings()
    text = str(raised.value)
    assert text.splitlines()[0] == "KV203 cross-cache-emptied", "the line that the summary of pytest shows"
    assert "error[KV203] cross-cache-emptied (merged)" in text
    assert "  fix        kvdoctor re-export" in text
    assert "KV204" not in text, "a note does not count, and is not shown"


def test_what_could_not_be_checked_is_raised_as_well(models: Path) -> None:
    report = kvdoctor.inspect(models / "empty")
    assert report.verdict == "incomplete"
    assert repr(report) == f"<Report of inspect: {models / 'empty'}: incomplete, not a pass (1 error)>"
    with pytest.raises(kvdoctor.Unhealthy, match="incomplete"):
        report.raise_for_findings()


def test_nothing_is_raised_where_the_exit_code_is_0(models: Path) -> None:
    kvdoctor.inspect(models / "healthy").raise_for_findings()
    kvdoctor.inspect(models / "sick", fail_on="never").raise_for_findings()
    kvdoctor.inspect(models / "sick", ignore="KV203").raise_for_findings()
    with pytest.raises(kvdoctor.Unhealthy):
        kvdoctor.inspect(models / "sick").raise_for_findings()


def test_a_gate_is_run_as_it_is_asked(models: Path, tmp_path: Path) -> None:
    both = [models / "healthy", models / "sick"]
    assert kvdoctor.gate(models / "healthy", static=True).verdict == "nothing-found"
    first = kvdoctor.gate(both, jobs=2, cache_dir=tmp_path)
    again = kvdoctor.gate(both, cache_dir=tmp_path)
    assert [report.measured.get("cached") for report in (*first.reports, *again.reports)] == [None, None, True, True]
    words = kvdoctor.render(again)
    assert words.endswith(
        "gate: unhealthy; 1 of 2 models healthy, 1 unhealthy; 2 unchanged and not run again \u00b7 exit 1\n"
    )
    done = run("-m", "kvdoctor", "gate", *both, "--cache-dir", tmp_path)
    assert (done.stdout, done.returncode) == (words, again.exit_code)
    for wrong in ({"jobs": 0}, {"offline": "no"}, {"timeout": "soon"}):
        with pytest.raises(kvdoctor.UsageError):
            kvdoctor.gate(both, **wrong)  # type: ignore[arg-type]


def test_a_gate_names_every_model_that_fails_it(models: Path) -> None:
    judged = kvdoctor.gate([models / "healthy", models / "sick"])
    assert (judged.verdict, judged.exit_code, len(judged.reports)) == ("unhealthy", 1, 2)
    assert json.loads(json.dumps(judged.to_dict()))["reports"][1]["verdict"] == "unhealthy"
    with pytest.raises(kvdoctor.Unhealthy) as raised:
        judged.raise_for_findings()
    assert str(raised.value).startswith("KV203 cross-cache-emptied\n")
    assert "healthy: healthy" not in str(raised.value)
    assert "error[KV203]" in str(raised.value)


def test_options_reach_the_report(models: Path) -> None:
    report = kvdoctor.inspect(
        str(models / "sick"), select=["KV203", "cached-branch-first"], require="beam,batch", consumer="held", seed=7
    )
    assert (report.arguments["select"], report.arguments["require"]) == (
        ["KV203", "cached-branch-first"],
        ["batch", "beam"],
    )
    assert (report.arguments["consumer"], report.seed) == ("held", 7)
    assert [finding.severity for finding in report.findings if finding.code == "KV203"] == ["note"]


@pytest.mark.parametrize(
    ("command", "types"),
    [
        ("inspect", api.InspectOptions),
        ("step-test", api.StepTestOptions),
        ("re-export", api.ReExportOptions),
        ("convert", kvdoctor.ConvertOptions),
        ("repro", kvdoctor.ReproOptions),
        ("record", kvdoctor.RecordOptions),
        ("loop", kvdoctor.LoopOptions),
        ("gate", api.GateOptions),
        ("baseline", api.BaselineOptions),
        ("diff", kvdoctor.DiffOptions),
    ],
)
def test_the_types_for_callers_name_the_options_of_the_table(command: str, types: Any) -> None:
    assert set(types.__optional_keys__) == {option.keyword for option in options_of(command)}


def test_a_policy_is_followed_where_one_is_given(models: Path, tmp_path: Path) -> None:
    file = tmp_path / "kvdoctor.toml"
    file.write_text("seed = 7\nignore = ['KV203']\nfail-on = 'note'\n")
    for policy in (file, str(file), kvdoctor.read_policy(file)):
        report = kvdoctor.inspect(models / "sick", policy=policy, seed=3)
        assert (report.seed, report.arguments["ignore"], report.arguments["policy"]) == (3, ["KV203"], str(file))
        assert kvdoctor.gate(models / "sick", policy=policy, static=True).policy == str(file)
    assert "policy" not in kvdoctor.inspect(models / "sick").arguments


def test_a_report_lists_the_options_that_were_given() -> None:
    plain = {"consumer": "plain", "select": [], "ignore": [], "fail_on": "error", "provider": "CPUExecutionProvider"}
    assert Options().as_arguments() == plain
    given = {"targets": "onnxruntime==1.16.3", "prompt_ids": "1,2", "batch": 2, "require": "beam,batch", "seed": 9}
    more = {"target": ["onnxruntime==1.16.3"], "prompt_ids": [1, 2], "batch": 2, "require": ["batch", "beam"]}
    assert read_options(Options, given).as_arguments() == {**plain, **more, "offline": False}


def test_a_contract_is_read_without_findings(models: Path) -> None:
    report = kvdoctor.read_contracts(models / "sick")
    assert [stack.contract is not None for stack in report.stacks] == [True]
    assert not report.findings
    assert [finding.name for finding in kvdoctor.read_contracts(models / "empty").findings] == ["unreadable"]


# --- refusals ---------------------------------------------------------------------------------------------------------

WRONG: dict[str, dict[str, Any]] = {
    "--select=KVX": {"select": "KVX"},
    "--ignore=KV": {"ignore": "KV"},
    "--ignore=nothing": {"ignore": ["nothing"]},
    "--require=cat": {"require": ["cat"]},
    "--target=onnxruntime": {"targets": ["onnxruntime"]},
    "--consumer=x": {"consumer": "x"},
    "--fail-on=x": {"fail_on": "x"},
    "--seed=-1": {"seed": -1},
    "--batch=0": {"batch": 0},
}


@pytest.mark.parametrize("option", WRONG)
def test_a_wrong_value_is_refused_with_the_words_of_the_command_line(
    option: str, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(kvdoctor.UsageError) as refused:
        kvdoctor.inspect(models / "healthy", **WRONG[option])
    from kvdoctor.cli.main import main

    monkeypatch.setattr("kvdoctor.cli.main._end_in_order", lambda: None)
    monkeypatch.setattr(sys, "argv", ["kvdoctor", "inspect", str(models / "healthy"), option])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert str(refused.value) in " ".join(capsys.readouterr().err.split("\n"))


def test_what_is_no_option_is_refused_with_the_one_that_was_meant(models: Path) -> None:
    wrong: Any = {"tmeout": 3}
    with pytest.raises(kvdoctor.UsageError, match="has no option 'tmeout'; did you mean 'timeout'"):
        kvdoctor.step_test(models / "healthy", **wrong)


@pytest.mark.parametrize("wrong", [{"timeout": float("nan")}, {"timeout": 0}, {"max_memory": 0.5}, {"seed": True}])
def test_a_limit_that_is_none_is_refused(wrong: Any, models: Path) -> None:
    with pytest.raises(kvdoctor.UsageError, match="Invalid value for '--"):
        kvdoctor.step_test(models / "healthy", **wrong)


def test_an_option_of_another_command_is_refused(models: Path) -> None:
    wrong: Any = {"exporter": "optimum"}
    with pytest.raises(kvdoctor.UsageError, match="give --from CHECKPOINT as well"):
        kvdoctor.re_export(models / "healthy", **wrong)
    with pytest.raises(kvdoctor.UsageError, match="no model"):
        kvdoctor.gate([])
    with pytest.raises(AttributeError, match="has no attribute 'inspct'"):
        kvdoctor.inspct  # type: ignore[attr-defined]  # noqa: B018


# --- the page ---------------------------------------------------------------------------------------------------------


def blocks() -> list[str]:
    return re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)


@pytest.mark.slow
def test_the_recipe_of_the_page_is_a_test(models: Path, tmp_path: Path) -> None:
    """As it stands, under pytest and under pytest-xdist: green for a healthy model, readable for a sick one."""
    recipe = next(block for block in blocks() if "raise_for_findings" in block)
    assert len([line for line in recipe.splitlines() if line]) == 3
    for name in ("healthy", "sick"):
        text = recipe.replace("exports/marian", str(models / name)).replace("def test_the", f"def test_{name}_the")
        (tmp_path / f"test_{name}.py").write_text(text)
    for more in ([], ["-n", "2"]):
        done = run("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path, *more)
        assert done.returncode == 1
        assert "1 failed, 1 passed" in done.stdout
        assert "error[KV203] cross-cache-emptied (merged)" in done.stdout


@pytest.mark.slow
def test_the_types_hold_for_strict_users(tmp_path: Path) -> None:
    """The page's code passes mypy --strict; a wrong option, value or attribute does not."""
    good = "import kvdoctor\n\n" + "\n".join(
        block.replace("import kvdoctor\n", "").replace("():", "() -> None:") for block in blocks()
    )
    bad = (
        "import kvdoctor\n"
        'kvdoctor.step_test("m", consumer="x")\n'
        'kvdoctor.step_test("m", tmeout=3)\n'
        'kvdoctor.inspect("m").verdikt\n'
        "kvdoctor.nothing\n"
        'x: int = kvdoctor.diff("a", "b").verdict\n'
    )
    (tmp_path / "good.py").write_text(good)
    (tmp_path / "bad.py").write_text(bad)
    told = []
    for name in ("good.py", "bad.py"):
        command = ["-m", "mypy", "--strict", "--config-file=", "--cache-dir", tmp_path / "cache", tmp_path / name]
        told.append(run(*command, cwd=ROOT).stdout)
    assert told[0].startswith("Success"), told[0]
    assert [int(line) for line in re.findall(r"bad\.py:(\d+): error", told[1])] == [2, 3, 4, 5, 6], told[1]
