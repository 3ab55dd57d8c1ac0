"""What a report depends on, as one key: the model's bytes, kvdoctor, the runtime, the machine and what was asked."""

import hashlib
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from kvdoctor import __version__
from kvdoctor.child import Limits
from kvdoctor.gating.contents import Contents
from kvdoctor.gating.jobs import Job
from kvdoctor.listing import MODEL_SUFFIXES, looked_at
from kvdoctor.options import Options
from kvdoctor.plain import to_plain
from kvdoctor.report.document import SCHEMA, Report
from kvdoctor.runtimes import thread_count

GIB = 1 << 30
FILES_ASKED = ("contract", "inputs", "trace")
"""Options that name a file, whose content counts."""

State = dict[str, str | None]
"""Files by their name as seen from the model's folder, with the digest of each; None where there is none."""


def key_of(job: Job, contents: Contents, elsewhere: bool) -> str | None:
    """The key of a job's report; None where it cannot be known, and nothing may be kept.

    `elsewhere` says that it is run on other machines, of which only the software is known to be the same.
    """
    if job.options.reference is not None:
        return None
    try:
        root, files = looked_at(job.place)
        model = {_name(file, root): contents.digest(file) for file in files}
        beside = sorted(entry.name for entry in os.scandir(root) if Path(entry.name).suffix in MODEL_SUFFIXES)
        given = {name: contents.digest(Path(path)) for name in FILES_ASKED if (path := getattr(job.options, name))}
    except OSError:
        return None
    whole = {
        "path": job.path,
        "model": model,
        "beside": beside,
        "given": given,
        "options": asked(job.options),
        "software": software(),
        "machine": None if elsewhere else machine(job.options),
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def external_state(job: Job, report: Report, contents: Contents) -> State:
    """The files of weights that a report's model names.

    Raises:
        OSError: one of them cannot be read.
    """
    names = {_beside(file.path, name) for file in report.model.files for name in file.external}
    return digests(job, sorted(names), contents)


def digests(job: Job, names: list[str], contents: Contents) -> State:
    """The digests of files by their name as seen from the model's folder; a link's own folder is looked at as well.

    Raises:
        OSError: one of them cannot be read.
        ValueError: a name is none.
    """
    return {name: contents.digest(path) for name, path in places(job, names).items()}


def places(job: Job, names: list[str]) -> dict[str, Path]:
    """Where files named as seen from the model's folder lie: in it, or in that of the file that a model links to."""
    if not names:
        return {}
    homes = _homes(*looked_at(job.place))
    root = homes[0]
    return {name: next((home / name for home in homes if (home / name).exists()), root / name) for name in names}


def nearby(job: Job) -> Iterator[Path]:
    """Every file in the folders in which those of a model lie: its weights may be among them.

    Raises:
        OSError: a folder cannot be listed.
    """
    root, files = looked_at(job.place)
    yield from files
    for home in _homes(root, files):
        yield from (home / entry.name for entry in os.scandir(home) if entry.is_file())


def _homes(root: Path, files: Sequence[Path]) -> tuple[Path, ...]:
    return tuple(dict.fromkeys((root, *(Path(os.path.realpath(file)).parent for file in files))))


def asked(options: Options) -> dict[str, Any]:
    """The options as plain values, but who is told of progress."""
    plain = {one.name: getattr(options, one.name) for one in fields(options) if one.name != "progress"}
    return {name: sorted(value) if isinstance(value, frozenset) else to_plain(value) for name, value in plain.items()}


@cache
def software() -> dict[str, Any]:
    """Versions of all that has a part in a report; of kvdoctor itself, its source."""
    from importlib import metadata

    return {
        "kvdoctor": __version__,
        "source": source(),
        "report": SCHEMA,
        "python": platform.python_version(),
        "numpy": metadata.version("numpy"),
        "onnx": metadata.version("onnx"),
        "onnxruntime": _runtime(),
    }


def machine(options: Options) -> dict[str, Any]:
    """What of the machine has a part in the numbers, and in what is too large for it."""
    return {
        "platform": f"{sys.platform} {platform.machine()}",
        "processor": _processor(),
        "threads": thread_count(),
        "memory": _memory(options.limits),
        "settings": {name: value for name, value in os.environ.items() if name.startswith(("ORT_", "MLAS_"))},
    }


@cache
def _memory(limits: Limits) -> int:
    return limits.memory_limit() // GIB


@cache
def source() -> str:
    """The SHA-256 of kvdoctor's own files, so that a changed checkout is another kvdoctor."""
    digest = hashlib.sha256()
    package = Path(__file__).parent.parent
    for name in sorted(_sources(str(package))):
        content = Path(name).read_bytes()
        digest.update(f"{name[len(str(package)) :]} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _sources(folder: str) -> Iterator[str]:
    for entry in os.scandir(folder):
        if entry.is_dir():
            if entry.name != "__pycache__":
                yield from _sources(entry.path)
        elif entry.name.endswith((".py", ".json", ".toml")):
            yield entry.path


def _runtime() -> list[Any]:
    """The onnxruntime of the workers, by its own files: it is not loaded here, and several packages bring it."""
    found = importlib.util.find_spec("onnxruntime")
    if found is None or found.origin is None:
        return []
    home = Path(found.origin)
    libraries = home.parent / "capi"
    listed = os.scandir(libraries) if libraries.is_dir() else ()
    sizes = sorted((entry.name, entry.stat().st_size) for entry in listed if entry.is_file())
    return [hashlib.sha256(home.read_bytes()).hexdigest(), sizes]


@cache
def _processor() -> str:
    """The first processor, with its features: the runtime picks its kernels by them."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return platform.processor()
    told = ("model name", "flags", "Features", "CPU part", "microcode")
    return "\n".join(line for line in first.splitlines() if line.startswith(told))


def _name(file: Path, root: Path) -> str:
    return os.path.relpath(file, root).replace(os.sep, "/")


def _beside(model: str, location: str) -> str:
    """A location named by a model, as seen from the folder."""
    return os.path.normpath(os.path.join(os.path.dirname(model), location)).replace(os.sep, "/")  # noqa: PTH118, PTH120
