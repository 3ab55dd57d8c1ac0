"""Which Python a release of onnxruntime can be put into. Nothing is installed for it: that is the user's to do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from kvdoctor.export.environments import find_uv
from kvdoctor.targets.limits import limits_of

SECONDS = 30.0


def mine() -> str:
    """The version of this Python: `3.11`."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def fitting(release: str) -> tuple[str, ...]:
    """The versions of Python that a release has wheels for, the newest first; this one where that is not known."""
    limits = limits_of(release)
    return tuple(reversed(limits.pythons)) if limits is not None else (mine(),)


def interpreter(versions: tuple[str, ...]) -> str | None:
    """The path of an installed Python of one of the versions: this one where it fits, else what is found."""
    if mine() in versions:
        return sys.executable
    return next((path for version in versions if (path := _installed(version)) is not None), None)


def _installed(version: str) -> str | None:
    uv = find_uv()
    if uv is not None:
        found = _said([uv, "python", "find", "--no-project", "--no-python-downloads", "--offline", version])
        return found or None
    path = shutil.which(f"python{version}")
    if path is None or _said([path, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]) != version:
        return None
    return path


def _said(command: list[str]) -> str:
    """What a command prints; nothing where it fails."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command, env=kept, timeout=SECONDS, check=False, capture_output=True, encoding="utf-8", errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def python_of(folder: Path) -> Path:
    """The interpreter of an environment."""
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
