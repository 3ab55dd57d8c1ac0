"""A Python that has the exporters' libraries: this one where it has them, else one that uv makes, or venv and pip.

A script runs in it as a child process, takes one JSON object a line and answers with one; what is large goes through
private files. Whatever it does, it cannot harm this process.
"""

import collections
import contextlib
import importlib.util
import json
import logging
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from kvdoctor.errors import KvdoctorError
from kvdoctor.export import made_by_pip

TORCH = "2.13.0"
TRANSFORMERS = "4.57.6"
"""What is taken where a checkpoint does not say which version it was saved with."""
OLDEST = (4, 46, 0)
"""Older ones are not made for this torch."""

MOST_SECONDS = 3600.0
"""How long an environment may take to be made, and a script to answer: weights are downloaded and loaded meanwhile."""
POLL_SECONDS = 0.1

# Nothing beside the script, and nothing of the working folder, may pass for a library.
BOOT = """
import runpy, sys
sys.path[:] = [entry for entry in sys.path if entry]
script = sys.argv.pop(1)
sys.argv[0] = script
runpy.run_path(script, run_name="__main__")
"""

QUIET = {
    "TORCH_FORCE_WEIGHTS_ONLY_LOAD": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "DISABLE_SAFETENSORS_CONVERSION": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUTF8": "1",
}
"""No telemetry, no conversion of weights by a service, no pickle that could run code."""


class Unavailable(KvdoctorError):
    """An environment cannot be had here. The message names the command that would change that."""


class ScriptFailed(KvdoctorError):
    """A script could not do what it was asked, or its process ended: the message says why, `facts` what else."""

    def __init__(self, reason: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.facts = facts or {}


@dataclass(frozen=True, slots=True)
class Needs:
    """What a script needs: pinned requirements for uv, the modules that they bring, and the extra of this package."""

    requirements: tuple[str, ...]
    modules: tuple[str, ...]
    extra: str

    @property
    def are_here(self) -> bool:
        """Whether this Python has the modules. None of them is imported, nor a package that holds one."""
        return all(map(_is_here, self.modules))


def _is_here(module: str) -> bool:
    """Whether a module can be found, by the files of its package."""
    package, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None or not rest:
        return spec is not None
    places = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    return any(place.with_suffix(".py").is_file() or (place / "__init__.py").is_file() for place in places)


Way = Literal["this Python", "uv", "venv and pip"]
"""How a Python with what is needed is had."""


@dataclass(frozen=True, slots=True)
class Start:
    """The command that starts a Python with what is needed, and how it is had."""

    command: tuple[str, ...]
    way: Way


def transformers_for(config: dict[str, Any]) -> Needs:
    """What runs a checkpoint: the version of transformers that it was saved with, where that can be taken."""
    saved_with = config.get("transformers_version")
    number = re.fullmatch(r"([0-9]{1,3})\.([0-9]{1,3})\.([0-9]{1,3})", str(saved_with), re.ASCII)
    version = TRANSFORMERS
    if number is not None and tuple(map(int, number.groups())) >= OLDEST:
        version = number.group()
    return Needs((f"torch=={TORCH}", f"transformers=={version}", "numpy"), ("torch", "transformers"), "transformers")


def find_uv() -> str | None:
    """Where uv is: on the path, or beside this Python."""
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


def start_of(needs: Needs, offline: bool, log: "IO[str] | None" = None) -> Start:
    """The command that starts a Python with what is needed; without uv it is made first, what pip says goes to `log`.

    Raises:
        Unavailable: neither this Python has it, nor is there uv, nor can venv and pip make one.
    """
    if needs.are_here:
        return Start((sys.executable,), "this Python")
    uv = find_uv()
    if uv is not None:
        made = [uv, "run", "--quiet", "--isolated", "--no-project", "--no-config", "--python", sys.executable]
        for requirement in needs.requirements:
            made += ["--with", requirement]
        return Start((*made, *(["--offline"] if offline else []), "python"), "uv")
    try:
        return Start((str(made_by_pip.python_with(needs.requirements, offline, log)),), "venv and pip")
    except made_by_pip.CannotMake as reason:
        raise Unavailable(
            f"{' and '.join(needs.modules[:2])} are not in this Python, and there is no uv to make one that has them; "
            f"with venv and pip it cannot be made either ({reason}): pip install uv, or pip install "
            f"'kvdoctor[{needs.extra}]'"
        ) from None


@dataclass(frozen=True, slots=True)
class Watch:
    """Where all goes that a script says on standard error, and who is told what it is doing."""

    log: "IO[str] | None" = None
    told: Callable[[str], None] | None = None


class Script:
    """A script of this room in the Python that it needs, kept running between questions."""

    def __init__(
        self,
        script: Path,
        arguments: dict[str, Any],
        needs: Needs,
        offline: bool,
        watch: "Watch | None" = None,
    ) -> None:
        """Start it; `watch` is told what goes on."""
        watch = watch or Watch()
        self.needs, self.offline = needs, offline
        self.hello: dict[str, Any] = {}
        self._said: collections.deque[str] = collections.deque(maxlen=40)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._log, self._told = watch.log, watch.told or _tell
        if not needs.are_here:
            self._told(f"starting an environment with {', '.join(needs.requirements)}; the first time it takes minutes")
        start = start_of(needs, offline, watch.log)
        self.way = start.way
        self._isolated = start.way != "this Python"
        self._process = subprocess.Popen(
            [*start.command, "-c", BOOT, str(script), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=_variables(self._isolated, offline),
        )
        threading.Thread(target=self._read, daemon=True).start()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Give the answer to a question.

        Raises:
            Unavailable: the environment could not be made.
            ScriptFailed: the script says why it cannot answer, or its process ended.
        """
        if not self.hello:
            self.hello = self._next()
        assert self._process.stdin is not None  # noqa: S101 - opened with a pipe
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(question) + "\n")
            self._process.stdin.flush()
        return self._answer()

    def wait(self) -> dict[str, Any]:
        """Give the answer of a script that asks for nothing but its arguments.

        Raises:
            Unavailable: the environment could not be made.
            ScriptFailed: the script says why it cannot do what it was asked, or its process ended.
        """
        if not self.hello:
            self.hello = self._next()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        answer = self._next()
        while "doing" in answer:
            self._told(str(answer["doing"]))
            answer = self._next()
        if "failed" in answer:
            raise ScriptFailed(str(answer["failed"]), answer)
        return answer

    def stop(self) -> None:
        """End the process, and let all that it said come into the log; what uv started ends with its standard input."""
        assert self._process.stdin is not None  # noqa: S101 - opened with a pipe
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(5)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + MOST_SECONDS
        while time.monotonic() < deadline:
            with contextlib.suppress(queue.Empty):
                line = self._answers.get(timeout=POLL_SECONDS)
                if not line:
                    raise self._ended()
                answer: dict[str, Any] = json.loads(line)
                return answer
        self.stop()
        raise ScriptFailed(f"no answer within {MOST_SECONDS:g} seconds")

    def _ended(self) -> KvdoctorError:
        code = self._process.wait()
        self._listener.join(5)
        said = [line.strip() for line in self._said if line.strip()]
        if self.hello:
            how = f"ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return ScriptFailed(f"the process with {' and '.join(self.needs.modules)} {how}: {_last(said)}")
        what = ", ".join(self.needs.requirements)
        if self.way == "venv and pip":
            return Unavailable(f"the environment with {what} does not start ({_last(said)}); delete it: {_folder()}")
        if not self._isolated:
            return Unavailable(
                f"{' and '.join(self.needs.modules)} of this Python do not load ({_last(said)}): "
                f"pip install --upgrade 'kvdoctor[{self.needs.extra}]'"
            )
        hint = "; without --offline it may be downloaded" if self.offline else ""
        return Unavailable(
            f"no environment with {what} can be made ({_last(said)}){hint}; "
            f"to see why: uv run --isolated --no-project --with {' --with '.join(self.needs.requirements)} python"
        )

    def _read(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout or ():
                self._answers.put(line)
        self._answers.put("")

    def _listen(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stderr or ():
                self._said.append(line)
                if self._log is not None:
                    self._log.write(line)


def _variables(isolated: bool, offline: bool) -> dict[str, str]:
    """The environment variables of the child: nothing of this Python's packages reaches an isolated one."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"} if isolated else set()
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, **QUIET, **({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if offline else {})}


def _folder() -> str:
    return str(made_by_pip.cache_folder() / "python").replace(str(Path.home()), "~")


def _last(said: list[str]) -> str:
    """The last words of a process, without the folder of the user."""
    text = " ".join(said[-4:]).replace(str(Path.home()), "~")
    return text if len(text) <= 400 else f"... {text[-400:]}"


def _tell(text: str) -> None:
    """Progress, for people only: the command line shows it on a terminal, a program that imports kvdoctor may."""
    logging.getLogger("kvdoctor").info(text)
