"""Isolated environments with one release of onnxruntime and its numpy, and the limits that a release itself reports.

uv makes an environment, in a Python that is installed already. It stays in the user's cache folder, and starts from
there without uv and without the network.
"""

import os
import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvdoctor.decode.messages import LimitsMeasured, MeasureJob
from kvdoctor.errors import KvdoctorError, UsageError
from kvdoctor.model.output_folder import whole_folder
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.environments import (
    EnvironmentUnavailable,
    cache_folder,
    find_uv,
    hide_home,
    lock_file,
    once_online,
    read_lock,
    report_progress,
    without_python_variables,
)
from kvdoctor.runtime.targets import Target, line, order
from kvdoctor.runtime.targets.limits import ReleaseLimits, limits_of

OLD_NUMPY = (1, 19)
"""From this release line on, wheels are built for numpy 2. Source: release notes of onnxruntime 1.19."""
INSTALL_SECONDS = 1800.0
FIND_SECONDS = 30.0

WHEELS_ONLY = ("--no-deps", "--only-binary", ":all:")
"""The runtime needs only numpy to run; its other dependencies are for its tools. Nothing is compiled."""

PRINT_RELEASE = "import onnxruntime, numpy; print(onnxruntime.__version__)"


def prepare_environment(release: str, *, offline: bool) -> Path:
    """Give the interpreter of an environment with a release. The environment is made if it does not exist yet.

    Raises:
        EnvironmentUnavailable: it does not exist and cannot be made; the message names the command that helps.
    """
    versions = python_versions(release)
    for version in versions:
        existing = _interpreter(_folder(release, version))
        if existing.exists():
            return existing
    uv = find_uv()
    if uv is None:
        raise EnvironmentUnavailable(
            f"onnxruntime {release} is not in the cache, and uv, which would install it in an environment of its own, "
            f"is not installed: pip install uv{once_online(offline)}"
        )
    python = find_python(versions, uv)
    if python is None:
        raise EnvironmentUnavailable(
            f"onnxruntime {release} has wheels for Python {', '.join(reversed(versions))}, and none of these is "
            f"installed; this Python is {this_version()}: uv python install {versions[0]}"
        )
    version, path = python
    folder = _folder(release, version)
    report_progress(f"making an environment with onnxruntime {release}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as pending:
            _Installation(uv, release, offline).make(pending.path, path)
            pending.kept = not _interpreter(folder).exists()
    except (OSError, UsageError) as error:
        raise EnvironmentUnavailable(
            f"the environment with onnxruntime {release} cannot be written to the cache: {error}"
        ) from None
    return _interpreter(folder)


def this_version() -> str:
    """The version of this Python: `3.11`."""
    return f"{sys.version_info[0]}.{sys.version_info[1]}"


def python_versions(release: str) -> tuple[str, ...]:
    """The versions of Python that a release has wheels for, the newest first; this one where that is not known."""
    limits = limits_of(release)
    return tuple(reversed(limits.pythons)) if limits is not None else (this_version(),)


def find_python(versions: tuple[str, ...], uv: str) -> tuple[str, str] | None:
    """Find an installed Python of one of the versions: (version, path). This one if possible; none is installed."""
    if this_version() in versions:
        return this_version(), sys.executable
    for version in versions:
        command = [uv, "python", "find", "--no-project", "--no-python-downloads", "--offline", version]
        with suppress(OSError, subprocess.TimeoutExpired):
            done = _call(command, FIND_SECONDS)
            path = done.stdout.strip()
            if done.returncode == 0 and path:
                return version, path
    return None


def measure_limits(target: Target, runtime: Runtime) -> Target:
    """A target with the limits that its release reports, where the table has none. `runtime` is of that release.

    It does not list missing operators. If the worker dies of the question, the target stays as it is.
    """
    if target.limits is not None:
        return target
    with suppress(KvdoctorError):
        for event in runtime.ask(MeasureJob()):
            if isinstance(event, LimitsMeasured) and event.ir is not None and event.opset is not None:
                limits = ReleaseLimits(target.onnxruntime, event.ir, event.opset, (), frozenset())
                target = replace(target, measured=limits)
    return target


def measure_limits_beside(target: Target, local: Runtime, offline: bool) -> Target:
    """A target with limits, measured in an environment of its release if necessary; `local` is of this Python."""
    if target.limits is not None:
        return target
    if local.versions.get("onnxruntime") == target.onnxruntime:
        return measure_limits(target, local)
    with suppress(KvdoctorError):
        runtime = local.beside(str(prepare_environment(target.onnxruntime, offline=offline)))
        runtime.greet()
        return measure_limits(target, runtime)
    return target


def requirements_of(release: str) -> tuple[str, ...]:
    """What an environment of a release is made of."""
    return f"onnxruntime=={release}", "numpy<2" if order(f"{line(release)}.0")[:2] < OLD_NUMPY else "numpy"


class _Installation:
    """Installs a release with uv, and proves that it loads."""

    def __init__(self, uv: str, release: str, offline: bool) -> None:
        self.uv, self.release, self.offline = uv, release, offline

    def make(self, folder: Path, python: str) -> None:
        """Make an environment in a folder.

        Raises:
            EnvironmentUnavailable: a step fails.
        """
        network = ["--offline"] if self.offline else []
        inside = str(_interpreter(folder))
        self._run([self.uv, "venv", "--quiet", "--no-project", "--python", python, str(folder), *network])
        install = [self.uv, "pip", "install", "--quiet", *WHEELS_ONLY, "--python", inside, *network]
        needed = requirements_of(self.release)
        if (lock := read_lock(needed)) is None:  # a release of later than the lock
            self._run([*install, *needed])
        else:
            with lock_file(lock) as file:
                self._run([*install, "--require-hashes", "-r", file])
        loaded = self._run([inside, "-I", "-c", PRINT_RELEASE])
        if loaded != self.release:
            raise EnvironmentUnavailable(
                f"{loaded or 'nothing'} was installed in place of onnxruntime {self.release}; name another release"
            )

    def _run(self, command: list[str]) -> str:
        try:
            # Not in the working folder: uv would read the settings of a project there.
            done = _call(command, INSTALL_SECONDS, cache_folder())
        except subprocess.TimeoutExpired:
            limit = f"{INSTALL_SECONDS / 60:g} minutes"
            raise EnvironmentUnavailable(f"onnxruntime {self.release} was not installed within {limit}") from None
        except OSError as error:
            reason = f"{command[0]}: {error.strerror or error}"
            raise EnvironmentUnavailable(f"onnxruntime {self.release} cannot be installed ({reason})") from None
        if done.returncode:
            raise EnvironmentUnavailable(self._failure(done.stderr))
        return done.stdout.strip()

    def _failure(self, stderr: str) -> str:
        text = hide_home(" ".join(stderr.split()))
        quoted = text if len(text) <= 300 else f"{text[:300]} ..."
        if self.offline:
            return f"onnxruntime {self.release} is not in the cache; without --offline it may be downloaded ({quoted})"
        return (
            f"onnxruntime {self.release} cannot be installed ({quoted}); "
            f"to see why: uv pip install onnxruntime=={self.release}"
        )


def _call(command: list[str], seconds: float, folder: Path | None = None) -> "subprocess.CompletedProcess[str]":
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


def _interpreter(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def _folder(release: str, version: str) -> Path:
    machine = f"{sys.platform}-{platform.machine()}".lower()
    return cache_folder() / "onnxruntime" / f"{release}-python{version}-{machine}"
