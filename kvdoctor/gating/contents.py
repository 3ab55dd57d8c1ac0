"""What files hold, as SHA-256, without reading again what has not changed since it was last read.

A digest is remembered with size, inode and the times of the last change (`mtime`, and `ctime`, which nobody can set
back). As git does, it is not remembered where the file was changed within the last seconds: a second change could fall
into the same tick of the clock (git, Documentation/technical/racy-git.txt).
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
from kvdoctor.out_folder import write_whole

INDEX = "contents.json"
RACY_NS = 3 * 10**9
TICK_NS = 20 * 10**6
"""By as much may a file's time lie behind the clock: file systems take it from the last tick (at most 10 ms apart)."""
MOST_REMEMBERED = 50_000
BLOCK = 1 << 20

Print = list[int]


class Contents:
    """Digests of files, remembered in a folder from one gate to the next."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / INDEX
        self._remembered = _read(self._file)
        self._asked: dict[str, str | None] = {}
        self._fresh: dict[str, tuple[Print, str]] = {}
        self._watched: dict[str, Print] = {}
        self._begun = time.time_ns()

    def digest(self, path: Path) -> str | None:
        """The SHA-256 of a file's bytes, the same for the whole of this run; None where it is no file.

        Raises:
            OSError: it cannot be read.
        """
        name = os.path.realpath(path)
        if name not in self._asked:
            self._asked[name] = self._digest(name)
        return self._asked[name]

    def watch(self, paths: Iterable[Path]) -> None:
        """Remember which files these are now, so that a change of one, or another in its place, is seen later."""
        for path in paths:
            with contextlib.suppress(OSError):
                self._watched.setdefault(str(path), fingerprint(path.stat()))

    def is_settled(self, path: Path) -> bool:
        """Whether a file is what it was when it was first watched, or else was not changed since this run began."""
        watched = self._watched.get(str(path))
        try:
            found, named = path.stat(), path.lstat()
        except OSError:
            return watched is None and not os.path.lexists(path)
        if watched is not None:
            return fingerprint(found) == watched
        changed = max(found.st_mtime_ns, found.st_ctime_ns, named.st_mtime_ns, named.st_ctime_ns)
        return changed + TICK_NS < self._begun

    def save(self) -> None:
        """Remember what was read, beside what others remembered in the meantime. Failing at that costs time only."""
        if not self._fresh:
            return
        merged = {name: entry for name, entry in _read(self._file).items() if name not in self._fresh} | self._fresh
        kept = dict(list(merged.items())[-MOST_REMEMBERED:])
        try:
            write_whole(self._file, json.dumps(kept))
        except KvdoctorError:
            return

    def _digest(self, name: str) -> str | None:
        try:
            found = Path(name).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if not stat.S_ISREG(found.st_mode):
            return None
        now = fingerprint(found)
        known = self._remembered.get(name)
        if known is not None and known[0] == now:
            return known[1]
        begun = time.time_ns()
        digest = hashlib.sha256()
        with Path(name).open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
            after = os.fstat(stream.fileno())
        if fingerprint(after) == now and begun - max(found.st_mtime_ns, found.st_ctime_ns) > RACY_NS:
            self._fresh[name] = (now, digest.hexdigest())
        return digest.hexdigest()


def fingerprint(found: os.stat_result) -> Print:
    """What changes with the bytes of a file."""
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_dev]


def _read(file: Path) -> dict[str, tuple[Print, str]]:
    """What was remembered; whatever is broken or strange is forgotten."""
    try:
        # A pipe or a device would be waited for.
        held = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(held, dict):
        return {}
    return {name: (entry[0], entry[1]) for name, entry in held.items() if _is_entry(entry)}


def _is_entry(entry: object) -> bool:
    if not isinstance(entry, list) or len(entry) != 2:
        return False
    numbers, digest = entry
    fits = isinstance(numbers, list) and len(numbers) == 5 and all(type(number) is int for number in numbers)
    return fits and isinstance(digest, str) and len(digest) == 64
