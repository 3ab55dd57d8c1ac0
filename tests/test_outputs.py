"""`--output FORMAT=FILE`, and the gate in a GitHub workflow: through the command line."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import junitparser
import pytest
from click.testing import CliRunner
from support import command_line
from support.command_line import Done
from support.isolated import EXPORTS

from kvdoctor.api import schemas
from kvdoctor.cli.main import cli
from kvdoctor.model.output_folder import write_whole
from kvdoctor.report.formats import FORMATS

SARIF = json.loads((Path(__file__).parent / "schemas" / "sarif-2.1.0.json").read_text(encoding="utf-8"))
HOSTILE = "x\n::add-mask::y ##[error]z"


def run(*words: str, cwd: Path | None = None, **more: str) -> Done:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("GITHUB_")} | more
    return command_line.run(*words, cwd=cwd, env=environment)


@pytest.fixture(scope="module")
def workflow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Done, Path]:
    """A gate over a sick model, a healthy one and one whose name is hostile, in a workflow, with every format."""
    folder = tmp_path_factory.mktemp("repository")
    shutil.copytree(EXPORTS / "t5", folder / "sick")
    shutil.copytree(EXPORTS / "gpt2", folder / "well")
    (folder / HOSTILE).mkdir()
    (folder / HOSTILE / "model.onnx").write_bytes(b"no model")
    (folder / "summary.md").write_text("before\n", encoding="utf-8")
    outputs = [word for name in FORMATS for word in ("--output", f"{name}=report.{name}")]
    variables = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(folder / "summary.md")}
    return run("gate", "sick", "well", HOSTILE, *outputs, cwd=folder, **variables), folder


def test_a_gate_writes_every_format_in_one_run(workflow: tuple[Done, Path]) -> None:
    done, folder = workflow
    assert done.returncode == 1, done.stderr
    read = {name: (folder / f"report.{name}").read_text(encoding="utf-8") for name in FORMATS}
    document = json.loads(read["json"])
    jsonschema.Draft202012Validator(schemas()["gate"]).validate(document)
    assert [report["verdict"] for report in document["reports"]] == ["unhealthy", "healthy", "incomplete"]
    log = json.loads(read["sarif"])
    jsonschema.Draft4Validator(SARIF).validate(log)
    wanted = {f["fingerprint"] for report in document["reports"] for f in report["findings"]}
    assert {result["partialFingerprints"]["kvdoctorFinding/v1"] for result in log["runs"][0]["results"]} == wanted
    assert log["runs"][0]["invocations"][0]["exitCode"] == 1
    suites = junitparser.JUnitXml.fromstring(read["junit"].encode("utf-8"))
    assert {suite.name for suite in suites if suite.failures} == {"sick (merged)"}
    assert sum(suite.errors for suite in suites) == 1
    assert not {path.name for path in folder.iterdir() if "partial" in path.name}


def test_a_workflow_gets_annotations_and_a_summary(workflow: tuple[Done, Path]) -> None:
    done, folder = workflow
    lines = done.stdout.splitlines()
    commands = [line for line in lines if line.lstrip().startswith("::")]
    kinds = [line.split(" ")[0] for line in commands]
    assert "::error file=sick/decoder_model_merged.onnx,title=kvdoctor KV203 cross-cache-emptied::" in done.stdout
    assert kinds == sorted(kinds, key=["::error", "::warning", "::notice"].index)
    assert "##[" not in done.stdout + done.stderr
    assert [line.split()[:2] for line in lines if line.startswith("  well ")] == [["well", "healthy"]]
    assert "gate: unhealthy; 1 of 3 models healthy, 1 unhealthy, 1 incomplete \u00b7 exit 1" in lines
    summary = (folder / "summary.md").read_text(encoding="utf-8")
    assert summary.startswith(
        "before\n## kvdoctor: unhealthy\n\ngate: unhealthy; 1 of 3 models healthy, 1 unhealthy, 1 incomplete\n"
    )
    assert "| `well` | healthy |  |" in summary
    assert "- error [KV203](https://github.com/kvdoctor/kvdoctor/blob/" in summary
    assert len(summary.splitlines()) < 60


@pytest.mark.parametrize(
    ("outputs", "words"),
    [
        (["json=-"], "standard output is what --format fills"),
        (["json=folder"], "is a folder"),
        (["json=missing/x.json"], "does not exist"),
        (["json=a.out", "junit=./a.out"], "is given twice"),
        (["json=model.onnx"], "never written to"),
        (["yaml=x"], "with a format of text, json"),
        (["json="], "FORMAT=FILE"),
    ],
)
def test_what_cannot_be_written_is_refused_before_any_work(
    outputs: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    asked = [word for one in outputs for word in ("--output", one)]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(cli, ["inspect", "no-such-model", *asked])
    assert done.exit_code == 2
    assert words in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_is_told_and_what_was_printed_stays() -> None:
    done = run("inspect", str(EXPORTS / "gpt2"), "--output", "sarif=/dev/full")
    assert done.returncode == 2
    assert done.stderr.strip() == "kvdoctor: cannot write '/dev/full': No space left on device"
    assert "nothing wrong found" in done.stdout


def test_an_argument_cannot_command_the_runner(tmp_path: Path) -> None:
    for words in (("gate", f"--{HOSTILE}"), ("inspect", HOSTILE)):
        done = run(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert not [line for line in done.stderr.splitlines() if line.lstrip().startswith("::") or "##[" in line]


def test_no_file_of_the_users_is_replaced(tmp_path: Path) -> None:
    """Whatever its name: a model's weights, its configs, the policy, a baseline; a report of before is."""
    model = shutil.copytree(EXPORTS / "gpt2", tmp_path / "model")
    (model / "params").write_bytes(b"weights")
    (tmp_path / "known.json").write_text('{"schema": "kvdoctor/baseline/1", "entries": []}', encoding="utf-8")
    (tmp_path / "kvdoctor.toml").write_text("models = ['model']\nbaseline = 'known.json'\n", encoding="utf-8")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for file in ("model/params", "model/config.json", "kvdoctor.toml", "known.json"):
        for words in (("gate",), ("gate", "model"), ("inspect", "model/model.onnx")):
            done = run(*words, "--output", f"html={file}", cwd=tmp_path)
            assert (done.returncode, file in done.stderr) == (2, True), done.stderr
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for _ in range(2):
        assert run("inspect", "model", "--output", "json=model/report.json", cwd=tmp_path).returncode == 0


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="this system has no terminals of this kind")
@pytest.mark.parametrize("columns", [60, 80, 200])
def test_explain_fits_the_terminal(columns: int) -> None:
    ours, theirs = os.openpty()
    call = [sys.executable, "-m", "kvdoctor", "explain", "KV203"]
    with subprocess.Popen(call, stdout=theirs, env=os.environ | {"COLUMNS": str(columns)}) as process:
        os.close(theirs)
        parts = []
        with contextlib.suppress(OSError), os.fdopen(ours, "rb", buffering=0) as terminal:  # it ends with the process
            while part := terminal.read(4096):
                parts.append(part)
    assert process.returncode == 0
    shown = b"".join(parts).decode().splitlines()
    assert "What it means:" in "\n".join(shown)
    assert 0.7 * min(columns, 120) < max(map(len, shown)) <= min(columns, 120)


def test_what_fails_in_making_a_file_is_no_failed_write(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="gone"):
        write_whole(tmp_path / "out", (Path(name).read_text(encoding="utf-8") for name in (__file__, "gone")))
    assert not list(tmp_path.iterdir())
