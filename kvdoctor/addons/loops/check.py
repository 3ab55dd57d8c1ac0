"""Builds the project of a loop and runs it on its test vectors, as a user would."""

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from kvdoctor.addons.loops.contract_file import VECTORS_FILE
from kvdoctor.addons.loops.languages import Language
from kvdoctor.addons.loops.plan import CannotBuild
from kvdoctor.addons.loops.vectors import Vector, differences, list_calls, list_runs
from kvdoctor.records import record
from kvdoctor.runtime.environments import cache_folder
from kvdoctor.runtime.process import NO_TELEMETRY

BUILD_SECONDS = 900


@record
class VectorResult:
    """One run of the program: the `problem`, or None where it found the tokens that it had to.

    `differs` where it found other tokens; a program that ended otherwise decides nothing. `tokens` were compared.
    """

    vector: str
    problem: str | None
    differs: bool = False
    tokens: int = 0


def build(project: Path, language: Language) -> dict[str, str]:
    """Build a project in its folder; the variables with which its program is run.

    Fetches the packages that the project names, with the tools of its language.

    Raises:
        CannotBuild: a tool is missing, or the build failed.
    """
    environment = _environment(language)
    for command in language.build:
        done = _run(command, project, environment, BUILD_SECONDS)
        if done is None:
            raise CannotBuild(f"`{' '.join(command)}` took more than {BUILD_SECONDS} seconds")
        if done.returncode:
            raise CannotBuild(f"`{' '.join(command)}` failed: {_last(done.stderr or done.stdout)}")
    return environment


RECORD = "result.jsonl"


def check(
    project: Path, model: Path, language: Language, vectors: tuple[Vector, ...], seconds: float
) -> tuple[VectorResult, ...]:
    """Build a project and play the runs of its `vectors.json` in one process, each for `seconds` at most on average.

    Raises:
        CannotBuild: as `build`.
    """
    environment = build(project, language)
    runs = list(list_runs(vectors))
    command = (*language.run, "--model", str(model.absolute()), "--record", RECORD, "--runs", VECTORS_FILE)
    done = _run(command, project, environment, seconds * len(runs))
    ended = _read_ended(project / RECORD)
    why = "it did not end within --timeout" if done is None else f"exit code {done.returncode}: {_last(done.stderr)}"
    return tuple(_compare(name, vector, ended.get(name), why) for name, vector in runs if vector.decided)


def _read_ended(record_file: Path) -> dict[str, dict[str, Any]]:
    """The line that ends each run, by its name."""
    lines = record_file.read_text(encoding="utf-8").splitlines() if record_file.is_file() else []
    ended = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:  # the last line of a program that was stopped
            continue
        if isinstance(entry, dict) and "tokens" in entry:
            ended[str(entry.get("run"))] = entry
    return ended


def _compare(name: str, vector: Vector, ended: dict[str, Any] | None, why: str) -> VectorResult:
    """What a run showed; `why` is said of one that did not end."""
    if ended is None:
        return VectorResult(name, why)
    if (error := ended.get("error")) is not None:
        return VectorResult(name, _last(str(error)))
    expected = [call["expect"] for call in list_calls(name, vector) if "expect" in call]
    problem = next(differences(expected, ended["tokens"]), None)
    return VectorResult(name, problem, problem is not None, vector.decided)


def _environment(language: Language) -> dict[str, str]:
    """The variables of this process with those of the language.

    Raises:
        CannotBuild: a tool of the language is not installed, or what else it needs could not be fetched.
    """
    missing = [tool for tool in language.tools if shutil.which(tool) is None]
    if missing:
        raise CannotBuild(f"{' and '.join(missing)} not found: install the tools of {language.title}")
    cache = build_cache() / language.name
    known = {"onnxruntime": str(find_library() or ""), "cache": str(cache)}
    return (
        os.environ
        | NO_TELEMETRY
        | {name: text.format(**known) for name, text in language.environment.items()}
        | dict(language.prepare(cache))
    )


def find_library() -> Path | None:
    """The shared library of the installed onnxruntime, found without importing it; None where there is none."""
    found = importlib.util.find_spec("onnxruntime")
    folders = [Path(place) / "capi" for place in (found.submodule_search_locations or ())] if found else []
    names = ("libonnxruntime.so*", "libonnxruntime*.dylib", "onnxruntime.dll")
    return next((path for folder in folders for name in names for path in sorted(folder.glob(name))), None)


def build_cache() -> Path:
    """Where tools keep what they build for later builds."""
    given = os.environ.get("KVDOCTOR_CACHE_DIR")
    return (Path(given) / "kvdoctor" if given else cache_folder()) / "loops"


def _run(
    command: tuple[str, ...], folder: Path, environment: dict[str, str], seconds: float
) -> "subprocess.CompletedProcess[str] | None":
    """Run a command; None where it took too long."""
    line = [find_program(command[0], folder), *command[1:]]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        process = subprocess.Popen(line, cwd=folder, env=environment, encoding="utf-8", errors="replace", **pipes)
    except OSError as error:
        raise CannotBuild(f"`{command[0]}` cannot be started: {error.strerror or error}") from None
    with process:
        try:
            output, errors = process.communicate(timeout=seconds)
        except BaseException as stopped:
            _end(process)
            if isinstance(stopped, subprocess.TimeoutExpired):
                return None
            raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


def find_program(name: str, folder: Path) -> str:
    """The path of a program: of a tool, or of one in the project. On Windows it has a suffix that `name` leaves out."""
    return shutil.which(str((folder / name).absolute()) if "/" in name else name) or name


def _end(process: "subprocess.Popen[str]") -> None:
    """End a process with all that it started: build tools run compilers."""
    import psutil

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
    process.kill()


def _last(text: str) -> str:
    """The last line that says something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:400] if lines else "it printed nothing"
