"""Runs commands as on a machine of somebody else."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.isolated import give_up

ROOT = Path(__file__).parents[2]
OFFLINE = ("Could not find a version", "No matching distribution", "NewConnectionError", "Temporary failure")


def call(
    command: Sequence[str | Path], cwd: Path, more: Mapping[str, str | Path] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a command as on a machine of somebody else: nothing of this Python and of this CI is passed on."""
    strange = ("PYTHON", "VIRTUAL_ENV", "GITHUB_", "RUNNER_", "PRE_COMMIT", "GIT_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(strange)}
    env |= {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "PYTHONUTF8": "1"}
    env |= {name: str(value) for name, value in (more or {}).items()}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, check=False, capture_output=True, encoding="utf-8"
    )


def git(cwd: Path, *arguments: str) -> str:
    """Runs git in a repository of a test, as a person without a configuration."""
    who = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.org", "-c", "init.defaultBranch=main"]
    done = call(["git", *who, "-c", "commit.gpgsign=false", *arguments], cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def needs_network(said: str) -> None:
    """Gives a test up where an installation failed for want of a package index."""
    if any(word in said for word in OFFLINE):
        give_up(f"pip finds no packages here: {said.strip().splitlines()[-1]}")
