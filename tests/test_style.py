"""Lint, format and types are tests like the others."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TYPES_ON = ["mypy", "kvdoctor", "--cache-dir", ".mypy_cache/other", "--platform"]
"""A function that a system does not have is an error of types there."""


@pytest.mark.parametrize(
    "command",
    [
        ["ruff", "check"],
        ["ruff", "format", "--check"],
        pytest.param(["mypy"], marks=pytest.mark.slow),
        *(pytest.param([*TYPES_ON, system], marks=pytest.mark.slow) for system in ("win32", "darwin")),
    ],
    ids=["lint", "format", "types", "types-on-windows", "types-on-macos"],
)
def test_style(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
