"""A GitHub runner as small as a composite action of shell steps needs it.

Expressions are put into the environment as the runner puts them; a step runs under the runner's own call of bash
(GitHub Docs, Workflow syntax, `shell`), with files for its outputs and its summary.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from support.strange_machine import call

BASH = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail"]


@dataclass
class Runner:
    """Runs the steps of one action, and keeps what they put out.

    Attributes:
        action: The folder of the action.
        workspace: The repository that the workflow checked out.
        temp: The runner's folder for files that do not last.
    """

    action: Path
    workspace: Path
    temp: Path
    outputs: dict[str, dict[str, str]] = field(default_factory=dict)

    def step(self, name: str, **inputs: str) -> subprocess.CompletedProcess[str]:
        """Runs the step with that id; inputs that are not given have their defaults."""
        description = yaml.safe_load((self.action / "action.yml").read_text(encoding="utf-8"))
        step = next(step for step in description["runs"]["steps"] if step.get("id") == name)
        given = {key: str(entry["default"]) for key, entry in description["inputs"].items()}
        given |= {key.replace("_", "-"): value for key, value in inputs.items()}
        values = {f"inputs.{key}": value for key, value in given.items()} | {"runner.temp": str(self.temp)}
        for earlier, outputs in self.outputs.items():
            values |= {f"steps.{earlier}.outputs.{key}": value for key, value in outputs.items()}
        script, output = self.temp / "step.sh", self.temp / "output"
        script.write_text(step["run"], encoding="utf-8")
        output.write_text("", encoding="utf-8")
        env = {key: evaluated(text, values) for key, text in step["env"].items()}
        done = call([*BASH, script], self.workspace, {**self._runner_env(output), **env})
        self.outputs[name] = read_outputs(output.read_text(encoding="utf-8"))
        return done

    @property
    def summary(self) -> Path:
        """The file for the summary of the step."""
        return self.temp / "summary.md"

    def _runner_env(self, output: Path) -> dict[str, str | Path]:
        self.summary.touch()
        return {
            "CI": "true",
            "GITHUB_ACTIONS": "true",
            "GITHUB_ACTION_PATH": self.action,
            "GITHUB_WORKSPACE": self.workspace,
            "GITHUB_OUTPUT": output,
            "GITHUB_STEP_SUMMARY": self.summary,
            "RUNNER_TEMP": self.temp,
            "RUNNER_OS": "Linux",
        }


def evaluated(text: str, values: Mapping[str, str]) -> str:
    """The text with `${{ name }}` replaced; a name that no context has is an error here."""
    return re.sub(r"\$\{\{ (\S+) \}\}", lambda match: values[match[1]], str(text))


def read_outputs(text: str) -> dict[str, str]:
    """What a step wrote to GITHUB_OUTPUT: `name=value` lines, and `name<<END` blocks."""
    outputs, lines = {}, iter(text.splitlines())
    for line in lines:
        name, block, end = line.partition("<<")
        if block and "=" not in name:
            held = []
            while (inner := next(lines)) != end:
                held.append(inner)
            outputs[name] = "\n".join(held)
        else:
            name, _, value = line.partition("=")
            outputs[name] = value
    return outputs
