"""Isolated environments that hold one release of onnxruntime and its numpy: made once, kept in the user's cache.

uv makes them, or venv and pip where there is no uv. A kept one starts without either, and without the network.
"""

import contextlib
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path

from kvdoctor.elsewhere.interpreters import fitting, interpreter, mine, python_of
from kvdoctor.errors import UsageError
from kvdoctor.export.environments import Unavailable, find_uv
from kvdoctor.export.made_by_pip import cache_folder
from kvdoctor.out_folder import whole_folder
from kvdoctor.targets import line, order

OLD_NUMPY = (1, 19)
"""From this line on wheels are built against numpy 2. Source: release notes of onnxruntime 1.19."""
MOST_SECONDS = 1800.0

PROOF = "import onnxruntime, numpy; print(onnxruntime.__version__)"


def environment(release: str, *, offline: bool) -> Path:
    """Give the interpreter of an environment that holds a release, which is made if it is not there yet.

    Raises:
        Unavailable: it is not there and cannot be made; the message names the command that would change that.
    """
    kept = [_folder(release, version) for version in fitting(release)]
    there = next((folder for folder in kept if python_of(folder).exists()), None)
    if there is not None:
        return python_of(there)
    versions = fitting(release)
    python = interpreter(versions)
    if python is None:
        raise Unavailable(_no_python(release, versions))
    if offline and find_uv() is None:
        raise Unavailable(f"onnxruntime {release} is not in the cache, and --offline forbids to fetch it")
    version = mine() if python == sys.executable else _version(python, versions)
    folder = _folder(release, version)
    _tell(f"making an environment with onnxruntime {release}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as pending:
            _make(pending.path, python, release, offline)
            pending.kept = not python_of(folder).exists()
    except (OSError, UsageError) as error:
        raise Unavailable(f"no environment with onnxruntime {release} can be kept: {error}") from None
    return python_of(folder)


def shown(path: Path) -> str:
    """A path for people, without the folder of the user."""
    return str(path).replace(str(Path.home()), "~")


def _folder(release: str, version: str) -> Path:
    machine = f"{sys.platform}-{platform.machine()}".lower()
    return cache_folder() / "onnxruntime" / f"{release}-python{version}-{machine}"


def _make(folder: Path, python: str, release: str, offline: bool) -> None:
    """Fill a folder with an environment, and see that the runtime loads in it.

    Raises:
        Unavailable: some step of it fails.
    """
    numpy = "numpy<2" if order(f"{line(release)}.0")[:2] < OLD_NUMPY else "numpy"
    wanted = [f"onnxruntime=={release}", numpy]
    inside = str(python_of(folder))
    uv = find_uv()
    if uv is not None:
        network = ["--offline"] if offline else []
        steps = [
            [uv, "venv", "--quiet", "--no-project", "--python", python, str(folder), *network],
            [uv, "pip", "install", "--quiet", *_ONLY_THESE, "--python", inside, *network, *wanted],
        ]
    else:
        steps = [
            [python, "-m", "venv", "--clear", str(folder)],
            [inside, "-I", "-m", "pip", "install", "--quiet", *_ONLY_THESE, *wanted],
        ]
    for step in steps:
        _run(step, release, offline)
    got = _run([inside, "-I", "-c", PROOF], release, offline)
    if got != release:
        raise Unavailable(f"onnxruntime {release} was asked for, and {got or 'nothing'} came; name another release")


_ONLY_THESE = ("--no-deps", "--only-binary", ":all:")
"""The runtime needs numpy alone to run; what else its wheel asks for serves its tools. Nothing is compiled."""


def _run(command: list[str], release: str, offline: bool) -> str:
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    kept |= {"UV_PYTHON_DOWNLOADS": "never", "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PYTHONUTF8": "1"}
    try:
        done = subprocess.run(
            command,
            env=kept,
            cwd=cache_folder(),
            timeout=MOST_SECONDS,
            check=False,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(f"onnxruntime {release} was not there within {MOST_SECONDS / 60:g} minutes") from None
    except OSError as error:
        raise Unavailable(f"onnxruntime {release} cannot be had: {command[0]}: {error.strerror or error}") from None
    if done.returncode:
        raise Unavailable(_failed(release, offline, done.stderr))
    return done.stdout.strip()


def _failed(release: str, offline: bool, said: str) -> str:
    words = " ".join(said.split()).replace(str(Path.home()), "~")
    short = words if len(words) <= 300 else f"{words[:300]} ..."
    if offline:
        return f"onnxruntime {release} is not in the cache; without --offline it may be fetched ({short})"
    return f"onnxruntime {release} cannot be installed ({short}); to see why: uv pip install onnxruntime=={release}"


def _no_python(release: str, versions: tuple[str, ...]) -> str:
    first = "" if find_uv() else "pip install uv && "
    return (
        f"onnxruntime {release} has wheels for Python {', '.join(reversed(versions))}, and none of them is here; this "
        f"one is {mine()}: {first}uv python install {versions[0]}"
    )


def _version(python: str, versions: tuple[str, ...]) -> str:
    said = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [python, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        said = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30).stdout.strip()
    return said if said in versions else versions[0]


def _tell(text: str) -> None:
    """Progress, for people only: the command line shows it on a terminal, a program that imports kvdoctor may."""
    logging.getLogger("kvdoctor").info(text)
