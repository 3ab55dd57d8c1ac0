"""The life of a model in a repository, with git and pre-commit: stopped at the commit, red, repaired, green."""

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from support.strange_machine import ROOT, call, git, needs_network

pytestmark = pytest.mark.slow

EXPORTS = ROOT / "fixtures" / "exports"
SICK, UPGRADED, HEALTHY = "marian-4.46.3", "marian-4.57.6", "gpt2"


@dataclass(frozen=True)
class Team:
    """A repository with models, in which the hooks of this checkout are installed."""

    repository: Path
    config: str
    env: Mapping[str, Path]

    def put(self, name: str, at: str) -> None:
        """Lays an export of the fixtures into the repository, in the place of what was there."""
        shutil.rmtree(self.repository / at, ignore_errors=True)
        shutil.copytree(EXPORTS / name, self.repository / at)

    def commit(self, message: str) -> CompletedProcess[str]:
        """Commits everything, hooks and all; says what git said."""
        git(self.repository, "add", "--all")
        who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org"]
        return call(["git", *who, "commit", "--message", message], self.repository, self.env)

    def kvdoctor(self, *arguments: str) -> CompletedProcess[str]:
        """Runs this checkout's kvdoctor in the repository."""
        command = [sys.executable, "-m", "kvdoctor", *arguments]
        return call(command, self.repository, {**self.env, "PYTHONPATH": ROOT})


@pytest.fixture(scope="session")
def team(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Team:
    repository = tmp_path_factory.mktemp("models")
    git(repository, "init", "--quiet")
    config = f"repos:\n- repo: {checkout}\n  rev: {git(checkout, 'rev-parse', 'HEAD')}\n  hooks:\n  - id: kvdoctor\n"
    (repository / ".pre-commit-config.yaml").write_text(config, encoding="utf-8")
    home = tmp_path_factory.mktemp("home")
    env = {"PRE_COMMIT_HOME": home / "pre-commit", "XDG_CACHE_HOME": home / "cache"}
    done = call([sys.executable, "-m", "pre_commit", "install", "--install-hooks"], repository, env)
    needs_network(done.stdout + done.stderr if done.returncode else "")
    assert done.returncode == 0, done.stdout + done.stderr
    return Team(repository, config, env)


def test_the_life_of_a_model(team: Team) -> None:
    # A team begins with a healthy model and no models at all: neither is held up.
    (team.repository / "README.md").write_text("our models\n", encoding="utf-8")
    assert "Skipped" in team.commit("a repository").stderr
    team.put(HEALTHY, "exports/chat")
    assert (done := team.commit("chat")).returncode == 0, done.stdout + done.stderr

    # A merged decoder arrives: three of its files change, and it is one finding.
    team.put(SICK, "exports/translate")
    done = team.commit("translate")
    assert done.returncode == 1
    assert done.stderr.count("error[KV203]") == 1
    assert "kvdoctor re-export exports/translate -o FIXED" in done.stderr
    assert git(team.repository, "log", "--format=%s").splitlines() == ["chat", "a repository"]

    # In CI it is red as well, by decode steps.
    assert gated(team).returncode == 1
    assert results(team.repository / "gate.sarif") == {"KV203"}

    # The team's loop holds that cache, and there is no time now: a baseline, with the reason and an end.
    known = ("exports/translate", "-o", "known.json", "--reason", "our loop holds it", "--until", "2999-12-31")
    assert (done := team.kvdoctor("baseline", *known)).returncode == 0, done.stdout + done.stderr
    assert (done := gated(team, "--baseline", "known.json")).returncode == 0, done.stdout + done.stderr
    assert "1 known finding" in done.stdout
    assert team.commit("translate, as it is").returncode == 1  # the hook knows no baseline
    (team.repository / ".pre-commit-config.yaml").write_text(
        team.config.replace("- id: kvdoctor", "- id: kvdoctor\n    args: [--baseline, known.json, --]"),
        encoding="utf-8",
    )
    assert (done := team.commit("translate, as it is")).returncode == 0, done.stdout + done.stderr

    # An upgrade of the exporter brings the same fault: still known, without a new entry.
    team.put(UPGRADED, "exports/translate")
    assert gated(team, "--baseline", "known.json").returncode == 0

    # What the finding says to do is done.
    done = team.kvdoctor("re-export", "exports/translate", "-o", "fixed", "-q")
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(team.repository / "exports" / "translate")
    (team.repository / "fixed").rename(team.repository / "exports" / "translate")
    assert (done := gated(team, "--baseline", "known.json")).returncode == 0, done.stdout + done.stderr
    assert not results(team.repository / "gate.sarif")

    # The entry is stale, the gate says so, and it is taken out.
    assert "not found any more" in done.stdout
    assert team.kvdoctor("baseline", "exports/translate", "-o", "known.json", "--prune").returncode == 0
    assert not json.loads((team.repository / "known.json").read_text(encoding="utf-8"))["entries"]
    assert (done := gated(team, "--baseline", "known.json")).returncode == 0, done.stdout + done.stderr
    assert "not found any more" not in done.stdout
    (team.repository / ".pre-commit-config.yaml").write_text(team.config, encoding="utf-8")
    assert (done := team.commit("translate, repaired")).returncode == 0, done.stdout + done.stderr


def gated(team: Team, *options: str) -> CompletedProcess[str]:
    """The gate as CI runs it on all models."""
    return team.kvdoctor("gate", "exports/chat", "exports/translate", "--output", "sarif=gate.sarif", "-q", *options)


def results(file: Path) -> set[str]:
    """The errors that a SARIF file holds, by their codes."""
    runs = json.loads(file.read_text(encoding="utf-8"))["runs"]
    return {result["ruleId"] for run in runs for result in run["results"] if result["level"] == "error"}
