"""An isolated Python made by venv and pip, for where there is no uv: made once, kept in the user's cache folder.

It appears whole or not at all: it is filled under another name and renamed. Others who want the same one wait; what a
killed process left is swept by the next. A kept one needs neither pip nor the network.
"""

import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvdoctor.errors import KvdoctorError
from kvdoctor.out_folder import process_lives

MOST_SECONDS = 3600.0
POLL_SECONDS = 0.2


class CannotMake(KvdoctorError):
    """An environment cannot be made here; the message says why."""


def python_with(requirements: tuple[str, ...], offline: bool, log: "IO[str] | None" = None) -> Path:
    """Give the interpreter of an environment that holds the requirements, which is made if it is not kept yet.

    What pip says goes to `log`.

    Raises:
        CannotMake: it is not kept, and cannot be made; the message says why.
    """
    place = cache_folder() / "python" / _key(requirements)
    python = interpreter_of(place)
    if python.exists():
        return python
    if offline:
        raise CannotMake("it was not made before, and --offline forbids to download it")
    if not can_make():
        raise CannotMake("this Python has no venv or no pip")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with _locked(place):
            if not python.exists():
                _make(place, requirements, log)
    except OSError as error:
        raise CannotMake(f"the cache folder cannot be written: {error.strerror or error}") from None
    return python


def cache_folder() -> Path:
    """Where this user keeps what can be made again."""
    home = Path.home()
    if os.name == "nt":
        place = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        place = home / "Library" / "Caches"
    else:
        place = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return place / "kvdoctor"


def is_kept(requirements: tuple[str, ...]) -> bool:
    """Whether an environment was made before."""
    return interpreter_of(cache_folder() / "python" / _key(requirements)).exists()


def can_make() -> bool:
    """Whether this Python has venv, and something to install with."""
    return importlib.util.find_spec("venv") is not None and _pip(Path()) is not None


def interpreter_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _key(requirements: tuple[str, ...]) -> str:
    """One folder for each set of requirements, Python and machine."""
    facts = (*sorted(requirements), platform.python_version(), sys.platform, platform.machine(), sys.prefix)
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:20]


def _make(place: Path, requirements: tuple[str, ...], log: "IO[str] | None") -> None:
    partial = place.with_name(f"{place.name}.{os.getpid()}.partial")
    pip = _pip(partial)
    assert pip is not None  # noqa: S101 - asked before
    try:
        _run([sys.executable, "-I", "-m", "venv", "--without-pip", str(partial)], log)
        if "ensurepip" in pip:
            _run(pip, log)
            pip = [str(interpreter_of(partial)), "-I", "-m", "pip"]
        _run([*pip, "install", "--no-input", "--disable-pip-version-check", "--no-compile", *requirements], log)
        (partial / "requirements.txt").write_text("\n".join(requirements) + "\n", encoding="utf-8")
        partial.rename(place)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _pip(folder: Path) -> list[str] | None:
    """What installs into an environment: the pip of this Python, else what puts one into it."""
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-I", "-m", "pip", "--python", str(interpreter_of(folder))]
    if importlib.util.find_spec("ensurepip") is not None:
        return [str(interpreter_of(folder)), "-I", "-m", "ensurepip", "--default-pip"]
    return None


def _run(command: list[str], log: "IO[str] | None") -> None:
    """Run one step; its last words are the reason where it fails.

    Raises:
        CannotMake: it fails or takes too long.
    """
    kept = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    }
    try:
        done = subprocess.run(
            command,
            env={**kept, "PYTHONUTF8": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=MOST_SECONDS,
            check=False,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise CannotMake(f"it was not made within {MOST_SECONDS / 60:g} minutes") from None
    if log is not None:
        log.write(f"$ {' '.join(command)}\n{done.stdout}\n")
        log.flush()
    if done.returncode:
        said = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR")] or said
        raise CannotMake(" ".join(errors[-2:])[:400] or f"exit code {done.returncode}")


@contextlib.contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Let one process at a time make an environment; what a dead one left is swept."""
    lock = place.with_name(f"{place.name}.lock")
    deadline = time.monotonic() + MOST_SECONDS
    while not _taken(lock):
        if time.monotonic() > deadline:
            raise CannotMake("another process did not finish making it; kill it and try again")
        time.sleep(POLL_SECONDS)
    try:
        for left in place.parent.glob(f"{place.name}.*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()


def _taken(lock: Path) -> bool:
    """Whether the lock is ours now; one whose owner has died is taken away."""
    try:
        with lock.open("x", encoding="utf-8") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        with contextlib.suppress(OSError):
            owner, age = lock.read_text(encoding="utf-8"), time.time() - lock.stat().st_mtime
            gone = not process_lives(int(owner)) if owner.isdigit() else age > 10
            if gone:
                lock.unlink()
        return False
    return True
