"""Runs scripts inside isolated environments with pinned packages, as `uv run --isolated` makes them.

An environment that cannot be made skips the test and says why; a script that fails in one that was made fails it.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import pytest

from support.command_line import Done, run

CONSUMERS = Path(__file__).parents[1] / "consumers"
FIXTURES = Path(__file__).parents[2] / "fixtures"
EXPORTS = FIXTURES / "exports"
MERGED = ("marian-4.46.3", "marian-4.57.6", "t5", "whisper")
"""The fixtures with `decoder_model_merged.onnx`, the file that kvdoctor repairs."""


@dataclass(frozen=True)
class Environment:
    """A Python with pinned packages.

    Attributes:
        python: Version of Python.
        requirements: Pinned requirements, as `name==version`.
        imports: Modules whose import shows that the environment works.
    """

    python: str
    requirements: tuple[str, ...]
    imports: tuple[str, ...]

    def require(self) -> None:
        """Makes the environment; where that does not work, skips the test, or fails it where CI=true."""
        if (reason := self.obstacle()) is not None:
            give_up(reason)

    def obstacle(self) -> str | None:
        """Makes the environment and returns why that did not work, or None."""
        return _obstacle(self)

    def run(self, script: str | Path, *arguments: str | Path) -> Any:
        """Returns what a script, one of `tests/consumers`, prints as the last line, a JSON document."""
        self.require()
        done = call([*self.command(), CONSUMERS / script, *arguments])
        assert done.returncode == 0, f"{script}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])

    def command(self) -> list[str]:
        """Returns the command that starts the Python of the environment."""
        uv = find_uv()
        assert uv is not None
        command = [uv, "run", "--quiet", "--isolated", "--no-project", "--python", self.python]
        for requirement in self.requirements:
            command += ["--with", requirement]
        return [*command, "python"]


def give_up(reason: str) -> NoReturn:
    """Skips the test for something that is missing here, or fails it where CI=true (`conftest.py`)."""
    if os.environ.get("KVDOCTOR_TESTS_IN_CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def kvdoctor(*arguments: str | Path) -> Done:
    """Runs the command line of kvdoctor with the environment of `call`."""
    return run(*arguments, env=_environment())


def re_export(name: str, out: Path) -> Path:
    """Returns `out`, which receives the repaired copy of the fixture `name`, made by kvdoctor's command line."""
    done = kvdoctor("re-export", EXPORTS / name, "--out", out)
    assert done.returncode == 0, f"re-export {name}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return out


def call(command: Sequence[str | Path], timeout: float = 600) -> subprocess.CompletedProcess[str]:
    """Runs a command with uv told where wheels are, model hubs switched off and nothing of this Python passed on."""
    return subprocess.run(
        [str(part) for part in command],
        env=_environment(),
        timeout=timeout,
        check=False,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )


def _environment() -> dict[str, str]:
    """Strings hash equally in every run, since the order of names in a merged decoder hangs on it."""
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONUTF8": "1", "PYTHONHASHSEED": "0"}
    for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
        env.pop(name, None)
    if links := _find_links(os.environ):
        env["UV_FIND_LINKS"] = links
    return env


def find_uv() -> str | None:
    """Returns the path of uv: on the path, or beside this Python."""
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


def _find_links(env: Mapping[str, str]) -> str:
    """Returns where uv shall look for wheels besides the index: where pip is told to look, unless uv is told itself."""
    if "UV_FIND_LINKS" in env:
        return env["UV_FIND_LINKS"]
    return ",".join((env.get("PIP_FIND_LINKS") or _configured_find_links()).split())


@lru_cache
def _configured_find_links() -> str:
    """Returns what pip's configuration files say about wheels besides the index; nothing where there is no pip."""
    command = [sys.executable, "-m", "pip", "config", "get", "global.find-links"]
    done = subprocess.run(command, check=False, capture_output=True, encoding="utf-8")
    return done.stdout if done.returncode == 0 else ""


@lru_cache
def _obstacle(environment: Environment) -> str | None:
    """Makes an environment and returns why that did not work, or None."""
    if find_uv() is None:
        return "uv is neither on the path nor beside this Python"
    what = f"Python {environment.python} with {', '.join(environment.requirements)}"
    where = f"{sys.platform}-{platform.machine()}"
    try:
        done = call([*environment.command(), "-c", f"import {', '.join(environment.imports)}"])
    except subprocess.TimeoutExpired:
        return f"{what} was not made within ten minutes on {where}"
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return f"{what} cannot be made on {where}: {' '.join(said[-3:])}"
    return None
