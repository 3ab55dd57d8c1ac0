"""The cache key of a report: a digest of the model's bytes, the options, the software and the machine.

A file that has not changed since its last digest is not read again. A digest is stored with the size, the inode and the
times of the last change (`mtime`, and `ctime`, which cannot be set back). It is not stored if the file changed within
the last seconds, as in git: a second change could have the same time stamp (git,
Documentation/technical/racy-git.txt).
"""

import contextlib
import hashlib
import importlib.util
import itertools
import json
import os
import platform
import stat
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from kvdoctor._version import __version__
from kvdoctor.choices import CPU
from kvdoctor.decode.messages import count_threads
from kvdoctor.errors import KvdoctorError
from kvdoctor.gating.jobs import GateJob
from kvdoctor.model.files import looked_at
from kvdoctor.model.output_folder import write_whole
from kvdoctor.options import Options
from kvdoctor.records import to_plain
from kvdoctor.report.document import SCHEMA, Report

INDEX = "contents.json"
RACY_NS = 3 * 10**9
TICK_NS = 20 * 10**6
"""How much earlier than the clock a file's time may be: file systems use the last tick (at most 10 ms ago)."""
MAX_STORED = 500_000
BLOCK = 1 << 20

FileState = list[int]


class FileDigests:
    """Digests of files, stored in a folder from one gate to the next."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / INDEX
        self._stored = _read(self._file)
        self._answers: dict[str, str | None] = {}
        self._new: dict[str, tuple[FileState, str]] = {}
        self._watched: dict[str, FileState] = {}
        self._homes: set[Path] = set()
        self._started = time.time_ns()

    def digest(self, path: Path) -> str | None:
        """The SHA-256 of a file, the same during a whole run; None if it is not a regular file.

        Raises:
            OSError: it cannot be read.
        """
        name = os.path.realpath(path)
        if name not in self._answers:
            self._answers[name] = self._digest(name)
        return self._answers[name]

    def watch(self, files: Iterable[Path], homes: Iterable[Path]) -> None:
        """Record the state of files now, so that `is_settled` notices a change or a replacement.

        With them every file of the folders that contain them: weights may be among these. A folder is read once.
        """
        new = [home for home in homes if home not in self._homes]
        self._homes.update(new)
        inside = (home / entry.name for home in new for entry in os.scandir(home) if entry.is_file())
        for path in itertools.chain(files, inside):
            if str(path) not in self._watched:
                with contextlib.suppress(OSError):
                    self._watched[str(path)] = file_state(path.stat())

    def is_settled(self, path: Path) -> bool:
        """Whether a file has not changed since it was first watched, or, if never watched, since this run began."""
        watched = self._watched.get(str(path))
        try:
            found, link = path.stat(), path.lstat()
        except OSError:
            return watched is None and not os.path.lexists(path)
        if watched is not None:
            return file_state(found) == watched
        changed = max(found.st_mtime_ns, found.st_ctime_ns, link.st_mtime_ns, link.st_ctime_ns)
        return changed + TICK_NS < self._started

    def save(self) -> None:
        """Store the new digests with those that other gates stored meanwhile. A failure only costs time."""
        if not self._new:
            return
        merged = {name: entry for name, entry in _read(self._file).items() if name not in self._new} | self._new
        with contextlib.suppress(KvdoctorError):
            write_whole(self._file, json.dumps(dict(list(merged.items())[-MAX_STORED:])))

    def _digest(self, name: str) -> str | None:
        try:
            found = Path(name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        now = file_state(found)
        known = self._stored.get(name)
        if known is not None and known[0] == now:
            return known[1]
        started = time.time_ns()
        digest = hashlib.sha256()
        with Path(name).open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
            after = os.fstat(stream.fileno())
        if file_state(after) == now and started - max(found.st_mtime_ns, found.st_ctime_ns) > RACY_NS:
            self._new[name] = (now, digest.hexdigest())
        return digest.hexdigest()


def file_state(found: os.stat_result) -> FileState:
    """The metadata that changes with the bytes of a file."""
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def _read(file: Path) -> dict[str, tuple[FileState, str]]:
    """The stored digests, without damaged entries."""
    try:
        # Reading a pipe or a device would block.
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return {name: (entry[0], entry[1]) for name, entry in content.items() if _is_entry(entry)}


def _is_entry(entry: object) -> bool:
    match entry:
        case [[*numbers], str(digest)]:
            return len(numbers) == 5 and all(type(number) is int for number in numbers) and len(digest) == 64
    return False


GIB = 1 << 30
FILE_OPTIONS = ("contract", "inputs", "against")
"""Options that name a file; its content is part of the key."""

FileStates = dict[str, str | None]
"""The digest of each file by its path relative to the model's folder; None for a file that does not exist."""


def compute_key(job: GateJob, digests: FileDigests, remote: bool) -> str | None:
    """The key of a job's report; None if a dependency is unknown. `remote`: it runs on machines of unknown kind.

    Another provider than the CPU rests on drivers, of which nothing is known here.
    """
    if job.options.reference is not None or job.options.providers != (CPU,):
        return None
    try:
        root, files = looked_at(job.location)
        model = {os.path.relpath(file, root).replace(os.sep, "/"): digests.digest(file) for file in files}
        given = ((name, getattr(job.options, name)) for name in FILE_OPTIONS)
        option_files = {name: digests.digest(Path(path)) for name, path in given if path}
    except OSError:
        return None
    names = [one.name for one in fields(job.options)]
    whole = {
        "path": job.path,
        "model": model,
        "given": option_files,
        "options": {one: to_plain(getattr(job.options, one)) for one in names if one != "progress"},
        "software": describe_software(),
        "machine": None if remote else describe_machine(job.options),
    }
    return hashlib.sha256(json.dumps(whole, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def digest_external_files(job: GateJob, report: Report, digests: FileDigests) -> FileStates:
    """The digests of the external weight files that a report's model names. Raises OSError: one cannot be read."""
    named = ((os.path.dirname(file.path), name) for file in report.model.files for name in file.external)  # noqa: PTH120
    names = {os.path.normpath(os.path.join(*both)).replace(os.sep, "/") for both in named}  # noqa: PTH118
    return digest_files(job, sorted(names), digests)


def digest_files(job: GateJob, names: list[str], digests: FileDigests) -> FileStates:
    """The digests of files by their names (`locate_files`). Raises OSError or ValueError: one cannot be read."""
    return {name: digests.digest(path) for name, path in locate_files(job, names).items()}


def locate_files(job: GateJob, names: list[str]) -> dict[str, Path]:
    """The paths of files named relative to the model's folder, or to the folder that a model file links to."""
    if not names:
        return {}
    homes = find_homes(job)[1]
    return {name: next((home / name for home in homes if (home / name).exists()), homes[0] / name) for name in names}


def find_homes(job: GateJob) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """A model's files, and the folders of them and of what they link to, its own first. Raises OSError: no access."""
    root, files = looked_at(job.location)
    return files, tuple(dict.fromkeys((root, *(Path(os.path.realpath(file)).parent for file in files))))


@cache
def describe_software() -> dict[str, Any]:
    """The versions of all software that affects a report; of kvdoctor, also a digest of its source."""
    from importlib import metadata

    versions = {name: metadata.version(name) for name in ("numpy", "onnx")}
    own = {"kvdoctor": __version__, "source": digest_source(), "report": SCHEMA}
    return {**own, "python": platform.python_version(), **versions, "onnxruntime": _runtime()}


def describe_machine(options: Options) -> dict[str, Any]:
    """The properties of the machine that affect numbers, and the memory, which limits the size of a model."""
    return {
        "platform": f"{sys.platform} {platform.machine()}",
        "processor": _processor(),
        "threads": count_threads(),
        "memory": options.limits.memory_limit() // GIB,
        "settings": {name: value for name, value in os.environ.items() if name.startswith(("ORT_", "MLAS_"))},
    }


@cache
def digest_source() -> str:
    """The SHA-256 of kvdoctor's own files, so that an edited checkout counts as another version."""
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
    """The onnxruntime of the workers, by its files: it must not be imported here, and several packages provide it."""
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
    """The first processor with its features, by which the runtime chooses its kernels."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        return platform.processor()
    fields = ("model name", "flags", "Features", "CPU part", "microcode")
    return "\n".join(line for line in first.splitlines() if line.startswith(fields))
