"""The GitHub Action: its steps run here as a runner runs them."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from runner import Runner
from support.strange_machine import ROOT, call, needs_network

EXPORTS = ROOT / "fixtures" / "exports"
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))


def test_no_input_stands_in_a_script() -> None:
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step.get("run", "")


def test_what_others_wrote_is_pinned_by_its_commit() -> None:
    for file in ("action.yml", "examples/ci/github-workflow.yml"):
        text = (ROOT / file).read_text(encoding="utf-8")
        others = [name for name in re.findall(r"uses: (\S+)", text) if not name.startswith("kvdoctor/kvdoctor@")]
        assert others
        assert all(re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", name) for name in others), others


@pytest.fixture(scope="session")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Runner:
    """A runner whose first step has installed the action's own commit."""
    runner = Runner(checkout, tmp_path_factory.mktemp("workspace"), tmp_path_factory.mktemp("runner"))
    done = runner.step("install")
    needs_network(done.stderr if done.returncode else "")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("kvdoctor ")
    for name in ("marian-4.46.3", "gpt2"):
        shutil.copytree(EXPORTS / name, runner.workspace / "exports" / f"the {name}")
    return runner


@pytest.mark.slow
def test_a_sick_model_fails_the_step_and_every_output_is_there(installed: Runner) -> None:
    files = {"sarif_file": "kvdoctor.sarif", "junit_file": "kvdoctor.xml", "html_file": "kvdoctor.html"}
    done = installed.step("gate", paths="exports/the *\n", **files)
    assert done.returncode == 1, done.stdout + done.stderr
    outputs = installed.outputs["gate"]
    assert (outputs["verdict"], outputs["exit-code"]) == ("unhealthy", "1")
    sarif = json.loads((installed.workspace / outputs["sarif"]).read_text(encoding="utf-8"))
    assert {result["ruleId"] for run in sarif["runs"] for result in run["results"]} >= {"KV203"}
    models = json.loads(Path(outputs["json"]).read_text(encoding="utf-8"))["reports"]
    assert [report["verdict"] for report in models] == ["healthy", "unhealthy"]
    assert (installed.workspace / "kvdoctor.xml").read_text(encoding="utf-8").startswith("<?xml")
    assert "<html" in (installed.workspace / "kvdoctor.html").read_text(encoding="utf-8")
    assert "::error file=exports/the marian-4.46.3/" in done.stdout
    assert "KV203" in installed.summary.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_healthy_model_passes(installed: Runner) -> None:
    done = installed.step("gate", paths="\n  exports/**/the gpt2  \n", args="--consumer held", fail_on="warning")
    assert done.returncode == 0, done.stdout + done.stderr
    assert installed.outputs["gate"]["verdict"] == "healthy"
    assert "sarif" not in installed.outputs["gate"]


@pytest.mark.slow
def test_paths_of_another_working_directory_start_at_the_repository(installed: Runner) -> None:
    given = {"working_directory": "exports", "sarif_file": "kvdoctor.sarif", "static": "true"}
    done = installed.step("gate", paths="the marian-*", **given)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "::error file=exports/the marian-4.46.3/" in done.stdout
    sarif = json.loads((installed.workspace / installed.outputs["gate"]["sarif"]).read_text(encoding="utf-8"))
    places = [place for run in sarif["runs"] for result in run["results"] for place in result["locations"]]
    uris = {place["physicalLocation"]["artifactLocation"]["uri"] for place in places}
    assert {uri.rpartition("/")[0] for uri in uris} == {"exports/the%20marian-4.46.3"}


@pytest.mark.slow
def test_the_path_of_sarif_is_where_it_is(installed: Runner, tmp_path: Path) -> None:
    whole, given = str(tmp_path / "x.sarif"), {"paths": "the gpt2", "static": "true", "working_directory": "exports"}
    for name, told in ((whole, whole), ("x.sarif", "exports/x.sarif")):
        assert installed.step("gate", sarif_file=name, **given).returncode == 0
        assert installed.outputs["gate"]["sarif"] == told
        assert (installed.workspace / told).is_file()
    ends = set()
    for _ in range(2):
        installed.step("gate", sarif_file=whole, **given)
        ends |= set(re.findall(r"^sarif<<(.+)$", (installed.temp / "output").read_text(encoding="utf-8"), re.MULTILINE))
    assert len(ends) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["old.sarif", "old", "old.onnx"])
def test_a_report_of_before_is_not_announced(installed: Runner, name: str) -> None:
    old = installed.workspace / name
    old.write_text("of before", encoding="utf-8")
    done = installed.step("gate", paths="exports/the gpt2", args="--no-such-option", sarif_file=name)
    assert done.returncode == 2
    assert "sarif" not in installed.outputs["gate"]
    assert old.exists() == (not name.endswith(".sarif"))  # anything else may be a model


@pytest.mark.slow
def test_static_never_says_healthy(installed: Runner) -> None:
    done = installed.step("gate", paths="exports/the gpt2", static="true")
    assert (done.returncode, installed.outputs["gate"]["verdict"]) == (0, "nothing-found")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        ({"paths": "exports/none-*"}, "matches nothing"),
        ({"paths": "exports/the gpt2", "args": "--no-such-option"}, "--no-such-option"),
        ({"paths": "exports", "working_directory": "absent"}, "working-directory"),
    ],
    ids=["no match", "option", "folder"],
)
def test_a_wrong_call_is_no_verdict(installed: Runner, inputs: dict[str, str], said: str) -> None:
    done = installed.step("gate", **inputs)
    assert done.returncode == 2
    assert said in done.stdout + done.stderr
    assert "verdict" not in installed.outputs["gate"]
    assert installed.outputs["gate"]["exit-code"] == "2"


@pytest.mark.slow
@pytest.mark.parametrize("field", ["paths", "args", "config", "baseline", "fail_on", "sarif_file", "working_directory"])
def test_text_of_a_pull_request_is_never_run(installed: Runner, field: str) -> None:
    hostile = '$(touch owned) `touch owned` "; touch owned; " \' || touch owned #'
    inputs = {"paths": "exports/the gpt2", "static": "true", field: hostile}
    # As a name of a file it is as good as any other; as an option, a path or a folder it is refused.
    assert installed.step("gate", **inputs).returncode == (0 if field == "sarif_file" else 2)
    assert not list(installed.workspace.rglob("owned"))


@pytest.mark.slow
def test_a_version_is_a_version(checkout: Path, tmp_path: Path) -> None:
    runner = Runner(checkout, tmp_path, tmp_path)
    done = runner.step("install", version="1.0 --index-url https://example.org")
    assert done.returncode == 2
    assert not (tmp_path / "kvdoctor").exists()


@pytest.mark.slow
def test_the_shell_script_gates_and_leaves_its_reports(installed: Runner, tmp_path: Path) -> None:
    # The script makes its environment by `python -m venv`; here that environment is there already.
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\nln -s "{installed.temp}/kvdoctor" "$3"\n', encoding="utf-8")
    python.chmod(0o755)
    script = ROOT / "examples" / "ci" / "kvdoctor.sh"
    env = {"PYTHON": python, "KVDOCTOR": installed.action, "TMPDIR": tmp_path}
    done = call(["sh", script, "exports/the marian-4.46.3"], installed.workspace, env)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "KV203" in done.stdout
    written = {path.suffix for path in (installed.workspace / "kvdoctor-reports").iterdir()}
    assert written == {".json", ".xml", ".sarif", ".md"}
    assert {path.name for path in tmp_path.iterdir()} == {"python3"}
    assert call(["sh", script], installed.workspace, env).returncode == 2
