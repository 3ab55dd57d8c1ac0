"""Isolated environments with one release of onnxruntime and its numpy, and the limits that a release itself reports.

uv makes an environment, in a Python that is installed already. It stays in the user's cache folder, and starts from
there without uv and without the network.
"""

import platform
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvdoctor.decode.messages import LimitsMeasured, MeasureJob
from kvdoctor.errors import KvdoctorError
from kvdoctor.runtime.client import Runtime
from kvdoctor.runtime.environments import (
    EnvironmentUnavailable,
    Uv,
    cache_folder,
    call_isolated,
    find_uv,
    interpreter_in,
    once_online,
    report_progress,
)
from kvdoctor.runtime.targets import Target, line, order
from kvdoctor.runtime.targets.limits import ReleaseLimits, limits_of

OLD_NUMPY = (1, 19)
"""From this release line on, wheels are built for numpy 2. Source: release notes of onnxruntime 1.19."""
FIND_SECONDS = 30.0

PRINT_RELEASE = "import onnxruntime, numpy; print(onnxruntime.__version__)"


def prepare_environment(release: str, *, offline: bool) -> Path:
    """Give the interpreter of an environment with a release. The environment is made if it does not exist yet.

    Raises:
        EnvironmentUnavailable: it does not exist and cannot be made; the message names the command that helps.
    """
    versions = python_versions(release)
    for version in versions:
        existing = interpreter_in(_folder(release, version))
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
    report_progress(f"making an environment with onnxruntime {release}")
    installing = Uv(uv, offline, lambda said: _not_made(release, said, offline))

    def prove(made: str) -> None:
        loaded = installing.run([made, "-I", "-c", PRINT_RELEASE])
        if loaded != release:
            text = f"{loaded or 'nothing'} was installed in place of onnxruntime {release}; name another release"
            raise EnvironmentUnavailable(text)

    return installing.make(_folder(release, version), path, requirements_of(release), prove)


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
            done = call_isolated(command, FIND_SECONDS)
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


def _not_made(release: str, quoted: str, offline: bool) -> EnvironmentUnavailable:
    if offline:
        text = f"onnxruntime {release} is not in the cache; without --offline it may be downloaded ({quoted})"
        return EnvironmentUnavailable(text)
    advice = f"to see why: uv pip install onnxruntime=={release}"
    return EnvironmentUnavailable(f"onnxruntime {release} cannot be installed ({quoted}); {advice}")


def _folder(release: str, version: str) -> Path:
    machine = f"{sys.platform}-{platform.machine()}".lower()
    return cache_folder() / "onnxruntime" / f"{release}-python{version}-{machine}"
