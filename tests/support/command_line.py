"""The command line as a user calls it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def kvdoctor(*arguments: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "kvdoctor", *arguments], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout


def report(*arguments: str) -> tuple[int, dict[str, Any]]:
    code, text = kvdoctor(*arguments, "--format", "json")
    document: dict[str, Any] = json.loads(text)
    return code, document
