"""Starts scripts that need torch and other large libraries: in this Python if it has them, else in one that uv makes.

A script runs as a child process. It reads one JSON object per line and answers with one; large data goes through
private files. A crash of the script does not end this process.
"""

import collections
import contextlib
import hashlib
import importlib.util
import json
import os
import platform
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from kvdoctor.errors import KvdoctorError, UsageError
from kvdoctor.model.output_folder import whole_folder
from kvdoctor.records import record
from kvdoctor.runtime.process import NO_TELEMETRY, describe_exit, free_memory_limit
from kvdoctor.runtime.scratch import scratch_folder

TORCH = "2.13.0"
TRANSFORMERS = "4.57.6"
"""The version for a checkpoint that does not say which version it was saved with."""
RELEASES = (
    *("4.46.3", "4.47.1", "4.48.3", "4.49.0", "4.50.3", "4.51.3", "4.52.4", "4.53.3", "4.54.1", "4.55.4", "4.56.2"),
    *("4.57.6", "5.0.0", "5.1.0", "5.2.0", "5.3.0", "5.4.0", "5.5.4", "5.6.2", "5.7.0", "5.8.1", "5.9.0", "5.10.4"),
    *("5.11.0", "5.12.1", "5.13.1", "5.14.1", "5.15.1", "5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1"),
    *("5.22.2", "5.23.0", "5.24.0"),
)
"""The last release of each line of transformers for this torch; a file of a checkpoint chooses among these alone."""
GENAI = ("onnxruntime-genai==0.18.0", "onnxruntime==1.31.1", "numpy==2.4.6")
"""The release of onnxruntime-genai that exports are made with, and that a folder for it is proved with."""

LOCKS = Path(__file__).parent / "locks"
"""The packages of each environment, with the hashes of their files; `fixtures/make_locks.py` writes them."""

WHEELS_ONLY = ("--no-deps", "--only-binary", ":all:")
"""A lock lists all packages, and a runtime needs only numpy to run. Nothing is compiled."""

MOST_SECONDS = 3600.0
"""Limit for each step of an installation and for each answer of a script, which may download and load weights."""
POLL_SECONDS = 0.1

# A file in the script's folder or in the working folder must not shadow a library.
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
    **NO_TELEMETRY,
    "DO_NOT_TRACK": "1",
    "DISABLE_SAFETENSORS_CONVERSION": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUTF8": "1",
}
"""No telemetry, no conversion of weights by an online service, no pickles that could run code."""


class EnvironmentUnavailable(KvdoctorError):
    """An environment is not available. The message names the command that would change that."""


class ScriptFailed(KvdoctorError):
    """A script reported a failure, or its process ended; the message has the reason, `facts` its last answer."""

    def __init__(self, reason: str, facts: dict[str, Any] | None = None) -> None:
        super().__init__(reason)
        self.facts = facts or {}


@record
class Requirements:
    """The needs of a script: pinned requirements for uv, the modules in them, and the extra of this package."""

    requirements: tuple[str, ...]
    modules: tuple[str, ...]
    extra: str

    @property
    def are_installed(self) -> bool:
        """Whether this Python has the modules. None of them is imported, nor a package that contains one."""
        return all(map(_is_installed, self.modules))


def _is_installed(module: str) -> bool:
    """Whether a module can be found, by the files of its package."""
    package, *rest = module.split(".")
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return False
    if spec is None or not rest:
        return spec is not None
    paths = [Path(folder, *rest) for folder in spec.submodule_search_locations or ()]
    return any(path.with_suffix(".py").is_file() or (path / "__init__.py").is_file() for path in paths)


def transformers_for(config: dict[str, Any]) -> Requirements:
    """The requirements to run a checkpoint: of transformers the line that it was saved with, if it is a known one."""
    number = re.fullmatch(r"([0-9]{1,3}\.[0-9]{1,3})\.[0-9]{1,3}", str(config.get("transformers_version")), re.ASCII)
    lines = {one.rpartition(".")[0]: one for one in RELEASES}
    version = lines.get(number[1], TRANSFORMERS) if number is not None else TRANSFORMERS
    return Requirements(
        (f"torch=={TORCH}", f"transformers=={version}", "numpy"), ("torch", "transformers"), "transformers"
    )


def find_uv() -> str | None:
    """The path of uv: on PATH, or next to this Python."""
    return shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))


def cache_folder() -> Path:
    """The folder for data of this user that can be made again."""
    home = Path.home()
    if os.name == "nt":
        folder = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        folder = home / "Library" / "Caches"
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return folder / "kvdoctor"


def once_online(offline: bool) -> str:
    """What `--offline` adds to the advice to install something: uv then has nothing to install from."""
    return "; then remove --offline once: later runs need no network" if offline else ""


def python_command(needs: Requirements, offline: bool) -> tuple[str, ...]:
    """The command that starts a Python with the requirements: this one where it has them.

    Raises:
        EnvironmentUnavailable: this Python does not have them, and uv is not installed.
    """
    if needs.are_installed:
        return (sys.executable,)
    uv = find_uv()
    if uv is None:
        raise EnvironmentUnavailable(
            f"this Python does not have {' and '.join(needs.modules[:2])}, and uv, which would make an environment "
            f"with them, is not installed: pip install uv, or pip install 'kvdoctor[{needs.extra}]'"
            f"{once_online(offline)}"
        )
    if (lock := read_lock(needs.requirements)) is not None:
        identity = f"{lock}{sys.version_info[:2]}{sys.platform}{platform.machine()}"
        folder = cache_folder() / "environments" / hashlib.sha256(identity.encode()).hexdigest()[:16]
        made = Uv(uv, offline, lambda said: _not_made(needs, said, offline))
        return (str(made.make(folder, sys.executable, needs.requirements)),)
    command = [uv, "run", "--quiet", "--isolated", "--no-project", "--no-config", "--python", sys.executable]
    for requirement in needs.requirements:
        command += ["--with", requirement]
    return (*command, *(["--offline"] if offline else []), "python")


def read_lock(requirements: tuple[str, ...]) -> str | None:
    """The lock of an environment as a file for pip: all packages with the hashes of their files; None without one."""
    sections = (LOCKS / "pins.txt").read_text(encoding="utf-8").split("[")
    section = next((one for one in sections if one.startswith(f"{' '.join(requirements)}]\n")), None)
    if section is None:
        return None
    lines = (LOCKS / "hashes.txt").read_text(encoding="utf-8").splitlines()
    hashes = {name: digests for name, *digests in map(str.split, lines)}
    pins = section.partition("]\n")[2].splitlines()
    return "\n".join(
        f"{pin} {' '.join(f'--hash=sha256:{one}' for one in hashes[pin.partition(' ;')[0]])}" for pin in pins
    )


@record(slots=False)
class Uv:
    """How environments are made: where uv is, whether it may use the network, and the error for what it says."""

    path: str
    offline: bool
    not_made: Callable[[str], EnvironmentUnavailable]

    def make(
        self, folder: Path, python: str, requirements: tuple[str, ...], check: Callable[[str], None] | None = None
    ) -> Path:
        """The Python of the environment in a folder of the user's cache; it is made if it is not there yet.

        `python` is the one it is made with, `requirements` what it holds, from its lock if it has one. An environment
        is not retained if `check`, given its Python, raises.

        Raises:
            EnvironmentUnavailable: it cannot be made; where a file is not the one of the lock, the message says so.
        """
        inside = interpreter_in(folder)
        if inside.exists():
            return inside
        options = ["--quiet", *(["--offline"] if self.offline else [])]
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with whole_folder(folder) as pending, scratch_folder() as scratch:
                made = str(interpreter_in(pending.path))
                self.run([self.path, "venv", *options, "--no-project", "--python", python, str(pending.path)])
                install = [self.path, "pip", "install", *options, *WHEELS_ONLY, "--python", made]
                if (lock := read_lock(requirements)) is None:  # a release of later than the lock
                    self.run([*install, *requirements])
                else:
                    file = Path(scratch, "requirements.txt")
                    file.write_text(lock, encoding="utf-8")
                    self.run([*install, "--require-hashes", "-r", str(file)])
                if check is not None:
                    check(made)
                pending.kept = not inside.exists()
        except (OSError, UsageError) as error:
            raise EnvironmentUnavailable(f"an environment cannot be written to the cache: {error}") from None
        return inside

    def run(self, command: list[str]) -> str:
        """What a command prints.

        Raises:
            EnvironmentUnavailable: it fails, or does not end.
        """
        try:
            # Not in the working folder: uv would read the settings of a project there.
            done = call_isolated(command, MOST_SECONDS, cache_folder())
        except subprocess.TimeoutExpired:
            raise EnvironmentUnavailable(f"{command[0]} did not end within {MOST_SECONDS:g} seconds") from None
        except OSError as error:
            raise EnvironmentUnavailable(f"{command[0]} cannot be started: {error.strerror or error}") from None
        if done.returncode:
            raise self.not_made(hide_home(" ".join(done.stderr.split()))[:400])
        return done.stdout.strip()


def interpreter_in(folder: Path) -> Path:
    """The Python of an environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def call_isolated(command: list[str], seconds: float, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
    """Run a command without the variables that add packages to a Python; nothing is downloaded to be one."""
    return subprocess.run(
        command,
        env=without_python_variables() | {"UV_PYTHON_DOWNLOADS": "never", "PYTHONUTF8": "1"},
        cwd=folder,
        timeout=seconds,
        check=False,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )


def without_python_variables() -> dict[str, str]:
    """The environment variables for an isolated Python: without those that add packages to it."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    return {name: value for name, value in os.environ.items() if name not in dropped}


def hide_home(text: str) -> str:
    """A text with `~` in place of the user's home folder."""
    return text.replace(str(Path.home()), "~")


def report_progress(text: str) -> None:
    """Log a line of progress: the command line prints it on a terminal, a program that imports kvdoctor may."""
    import logging

    logging.getLogger("kvdoctor").info(text)


@record
class ScriptLog:
    """The file for a script's standard error, and the function that its progress is passed to."""

    log: "IO[str] | None" = None
    progress: Callable[[str], None] | None = None


class ScriptProcess:
    """A running script in a Python with its requirements. It stays alive between questions."""

    def __init__(
        self, script: Path, arguments: dict[str, Any], needs: Requirements, offline: bool, log: ScriptLog | None = None
    ) -> None:
        """Start it.

        Raises:
            EnvironmentUnavailable: this Python does not have the requirements, and uv is not installed.
        """
        self.needs, self.offline = needs, offline
        self.hello: dict[str, Any] = {}
        self._last_lines: collections.deque[str] = collections.deque(maxlen=40)
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        log = log or ScriptLog()
        self._log, self._report = log.log, log.progress or report_progress
        if not needs.are_installed:
            names = ", ".join(needs.requirements)
            self._report(f"starting an environment with {names}; the first time it takes minutes")
        start = python_command(needs, offline)
        self._isolated = start != (sys.executable,)
        self.way = "uv" if self._isolated else "this Python"
        self._process = subprocess.Popen(
            [*start, "-c", BOOT, str(script), json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            env=_variables(self._isolated, offline),
        )
        free_memory_limit(self._process)
        threading.Thread(target=self._read, daemon=True).start()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def ask(self, question: dict[str, Any] | None = None) -> dict[str, Any]:
        """Give the answer to a question; None for a script that needs only its arguments.

        Raises:
            EnvironmentUnavailable: the environment could not be made.
            ScriptFailed: the script reported a failure, or its process ended.
        """
        if not self.hello:
            self.hello = self._next()
        assert self._process.stdin is not None  # noqa: S101 - opened with a pipe
        with contextlib.suppress(OSError):
            if question is not None:
                self._process.stdin.write(json.dumps(question) + "\n")
                self._process.stdin.flush()
        answer = self._next()
        while "doing" in answer:
            self._report(str(answer["doing"]))
            answer = self._next()
        if "failed" in answer:
            raise ScriptFailed(str(answer["failed"]), answer)
        return answer

    def stop(self) -> None:
        """End the process, and copy the rest of its standard error to the log.

        A child that uv started ends when its standard input is closed.
        """
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
        quoted = _quote([line.strip() for line in self._last_lines if line.strip()])
        modules = " and ".join(self.needs.modules)
        if self.hello:
            return ScriptFailed(f"the process with {modules} {describe_exit(code)}: {quoted}")
        if not self._isolated:
            return EnvironmentUnavailable(
                f"{modules} of this Python do not load ({quoted}): pip install --upgrade 'kvdoctor[{self.needs.extra}]'"
            )
        return _not_made(self.needs, quoted, self.offline)

    def _read(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout or ():
                self._answers.put(line)
        self._answers.put("")

    def _listen(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stderr or ():
                self._last_lines.append(line)
                if self._log is not None:
                    self._log.write(line)


def _variables(isolated: bool, offline: bool) -> dict[str, str]:
    """The environment variables of the child."""
    inherited = without_python_variables() if isolated else dict(os.environ)
    return {**inherited, **QUIET, **({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"} if offline else {})}


def _not_made(needs: Requirements, quoted: str, offline: bool) -> EnvironmentUnavailable:
    """Why there is no environment. A file that the index serves in place of the locked one is never installed."""
    hint = "; without --offline it may be downloaded" if offline else ""
    if "hash mismatch" in quoted.lower():
        hint = "; the index serves another file than the one whose hash kvdoctor has: nothing of it was installed"
    return EnvironmentUnavailable(
        f"no environment with {', '.join(needs.requirements)} can be made ({quoted}){hint}; "
        f"to see why: uv run --isolated --no-project --with {' --with '.join(needs.requirements)} python"
    )


def _quote(lines: list[str]) -> str:
    """The last lines of a process as one short text."""
    text = hide_home(" ".join(lines[-4:]))
    return text if len(text) <= 400 else f"... {text[-400:]}"
