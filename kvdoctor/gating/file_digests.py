"""SHA-256 digests of files. A file that has not changed since its last digest is not read again.

A digest is stored with the size, the inode and the times of the last change (`mtime`, and `ctime`, which cannot be set
back). It is not stored if the file changed within the last seconds, as in git: a second change could have the same time
stamp (git, Documentation/technical/racy-git.txt).
"""

import contextlib
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterable
from pathlib import Path

from kvdoctor.errors import KvdoctorError
from kvdoctor.model.output_folder import write_whole

INDEX = "contents.json"
RACY_NS = 3 * 10**9
TICK_NS = 20 * 10**6
"""How far a file's time may lag behind the clock: file systems use the last tick (ticks are at most 10 ms apart)."""
MAX_STORED = 50_000
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

    def watch(self, paths: Iterable[Path]) -> None:
        """Record the state of files now, so that `is_settled` notices a change or a replacement."""
        for path in paths:
            with contextlib.suppress(OSError):
                self._watched.setdefault(str(path), file_state(path.stat()))

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
        """Store the new digests beside those that other gates stored meanwhile. A failure only costs time."""
        if not self._new:
            return
        merged = {name: entry for name, entry in _read(self._file).items() if name not in self._new} | self._new
        recent = dict(list(merged.items())[-MAX_STORED:])
        try:
            write_whole(self._file, json.dumps(recent))
        except KvdoctorError:
            return

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
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    numbers, digest = entry
    fits = isinstance(numbers, list) and len(numbers) == 5 and all(type(number) is int for number in numbers)
    return fits and isinstance(digest, str) and len(digest) == 64
