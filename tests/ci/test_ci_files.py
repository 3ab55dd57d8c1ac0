"""The files for CI are what their readers take: checked against the schemas of GitHub and GitLab, and linted."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.strange_machine import ROOT

LONG_AGO = "86400"
SCHEMA = ["-m", "check_jsonschema", "--builtin-schema"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        [*SCHEMA, "vendor.github-actions", "action.yml"],
        [*SCHEMA, "vendor.github-workflows", "examples/ci/github-workflow.yml"],
        [*SCHEMA, "vendor.github-workflows", ".github/workflows/tests.yml"],
        [*SCHEMA, "vendor.gitlab-ci", "--data-transform", "gitlab-ci", "examples/ci/gitlab-ci.yml"],
        ["-m", "pre_commit", "validate-manifest", ".pre-commit-hooks.yaml"],
        ["-m", "pre_commit", "validate-config", "examples/ci/pre-commit-config.yaml"],
    ],
    ids=["action", "workflow", "own-workflow", "gitlab", "hooks", "pre-commit"],
)
def test_the_file_is_valid(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def steps_that_cache() -> dict[str, list[dict[str, Any]]]:
    """The steps of the action and of the page on the gate that restore and save a cache."""
    page = (ROOT / "docs" / "gate.md").read_text(encoding="utf-8")
    (shown,) = (
        block for block in re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE) if "uses" in block
    )
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["runs"]["steps"]
    found = {"action": action, "page": yaml.safe_load(shown)}
    return {name: [step for step in steps if "cache" in step.get("uses", "")] for name, steps in found.items()}


@pytest.mark.parametrize("name", ["action", "page"])
def test_a_red_job_keeps_what_it_has_learnt(name: str) -> None:
    restore, save = steps_that_cache()[name]
    for step, kind in ((restore, "restore"), (save, "save")):
        assert re.fullmatch(rf"actions/cache/{kind}@[0-9a-f]{{40}}", step["uses"])
    assert restore["uses"].partition("@")[2] == save["uses"].partition("@")[2]
    assert save["if"].startswith("always()")
    assert [restore["with"][key] for key in save["with"]] == list(save["with"].values())


def test_a_red_job_of_gitlab_keeps_what_it_has_learnt() -> None:
    example = yaml.safe_load((ROOT / "examples" / "ci" / "gitlab-ci.yml").read_text(encoding="utf-8"))
    assert example["kvdoctor"]["cache"]["when"] == "always"


def test_no_name_of_a_file_is_an_option_of_a_hook(tmp_path: Path) -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    calls = {hook["id"]: [*shlex.split(hook["entry"]), *hook.get("args", [])] for hook in hooks}
    assert all(call[-1] == "--" for call in calls.values())
    model = ROOT / "fixtures" / "exports" / "marian-4.46.3" / "decoder_model_merged.onnx"
    names = ["--no-cache.onnx", "--config=e.onnx"]
    for name in names:
        shutil.copy(model, tmp_path / name)
    # pre-commit calls the entry, then the arguments, then the names of the files.
    command = [sys.executable, "-m", *calls["kvdoctor"], *names]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "error[KV203]" in done.stdout


def test_options_in_the_examples_end_before_the_names() -> None:
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "ci" / "pre-commit-config.yaml").read_text(encoding="utf-8")
    for shown in (page, example):
        given = re.findall(r"args: (\[.+?\])", shown)
        assert given
        assert all(yaml.safe_load(text)[-1] == "--" for text in given)


def test_the_workflow_runs_the_commands_of_the_readme_on_each_system_and_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["tests"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Tests")[2]
    shown = re.findall(r"python (-m pytest [^`\n]+)", readme)
    assert len(shown) == 2
    run = [step["run"].removeprefix("python ") for step in job["steps"] if "pytest" in step.get("run", "")]
    assert run == shown
    matrix = job["strategy"]["matrix"]
    assert {name.partition("-")[0] for name in matrix["system"]} == {"ubuntu", "macos", "windows"}
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = re.findall(r"Programming Language :: Python :: (3\.[0-9]+)", project)
    assert matrix["python"] == [versions[0], versions[-1]]


@pytest.mark.slow
def test_the_shell_has_nothing_to_complain_about() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    scripts = {step["name"]: step["run"] for step in action["runs"]["steps"] if "run" in step}
    scripts |= {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples" / "ci").glob("*.sh")}
    for name, script in scripts.items():
        shell = "sh" if name.endswith(".sh") else "bash"
        command = [shellcheck, f"--shell={shell}", "--severity=style", "-"]
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"


def test_slow_tests_are_skipped_with_the_reason_once_their_time_is_over() -> None:
    one = "tests/ci/test_ci_files.py::test_the_file_is_valid[hooks]"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "slow", one],
        env={**os.environ, "KVDOCTOR_TESTS_UNTIL": LONG_AGO},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the time for slow tests is over" in done.stdout
    assert "1 skipped" in done.stdout


def test_every_day_begins_with_another_part() -> None:
    orders = []
    for day in range(3):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "--collect-only", "evidence/test_pages.py"],
            env={**os.environ, "KVDOCTOR_TESTS_UNTIL": str(day * 86_400)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        orders.append([line for line in done.stdout.splitlines() if "::" in line])
    assert len(orders[0]) > 5
    assert len({order[0] for order in orders}) == 3
    assert len({frozenset(order) for order in orders}) == 1
