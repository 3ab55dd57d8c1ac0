"""The files for CI are what their readers take: held against the schemas of GitHub and GitLab, and linted."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ROOT

SCHEMA = ["-m", "check_jsonschema", "--builtin-schema"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        [*SCHEMA, "vendor.github-actions", "action.yml"],
        [*SCHEMA, "vendor.github-workflows", "examples/ci/github-workflow.yml"],
        [*SCHEMA, "vendor.gitlab-ci", "--data-transform", "gitlab-ci", "examples/ci/gitlab-ci.yml"],
        ["-m", "pre_commit", "validate-manifest", ".pre-commit-hooks.yaml"],
        ["-m", "pre_commit", "validate-config", "examples/ci/pre-commit-config.yaml"],
    ],
    ids=["action", "workflow", "gitlab", "hooks", "pre-commit"],
)
def test_the_file_is_valid(command: list[str]) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_shell_has_nothing_to_complain_about() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    action = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    scripts = {step["name"]: step["run"] for step in action["runs"]["steps"] if "run" in step}
    scripts["kvdoctor.sh"] = (ROOT / "examples" / "ci" / "kvdoctor.sh").read_text(encoding="utf-8")
    for name, script in scripts.items():
        shell = "sh" if name == "kvdoctor.sh" else "bash"
        command = [shellcheck, f"--shell={shell}", "--severity=style", "-"]
        done = subprocess.run(command, input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"
