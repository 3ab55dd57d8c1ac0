"""Private folders for what a run needs and does not leave: each is removed with the run, or by the next one.

The system releases the lock of a folder when its run is killed, whatever the number of the process or its container.
"""

import contextlib
import os
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from weakref import finalize

PREFIX, SUFFIX = "kvdoctor-", ".scratch"
YOUNG_SECONDS = 60.0  # until then the folder of another run may not be locked yet


@contextlib.contextmanager
def scratch_folder() -> Iterator[str]:
    """A folder in the temporary folder of the system, which is removed at the end of the block."""
    folder = ScratchFolder()
    try:
        yield folder.name
    finally:
        folder.cleanup()


class ScratchFolder:
    """The same, up to `cleanup` or the end of the process; all of a process lie in one folder, its `root`."""

    def __init__(self) -> None:
        with _LOCK:
            if not _ROOTS:
                sweep_left(tempfile.gettempdir())
                root = tempfile.mkdtemp(SUFFIX, PREFIX)
                _ROOTS[root] = _lock(root)
            self.root = next(iter(_ROOTS))
            self.name = tempfile.mkdtemp(dir=self.root)
            _USED.add(self.name)
        self.cleanup = finalize(self, _leave, self.name)


_LOCK = threading.RLock()
_ROOTS: dict[str, int | None] = {}
"""The root of this process and its lock, while a folder in it is used."""
_USED = set[str]()


def _leave(folder: str) -> None:
    """Remove a folder, and the root with the last one."""
    with _LOCK:
        shutil.rmtree(folder, ignore_errors=True)
        _USED.discard(folder)
        while _ROOTS and not _USED:
            _remove(*_ROOTS.popitem())


def remove_all() -> None:
    """Remove the folders of this process, where it ends at once: an interrupt comes before an owner has its folder."""
    _USED.clear()
    while _ROOTS:
        _remove(*_ROOTS.popitem())


@cache
def sweep_left(place: str) -> None:
    """Remove the folders of runs that were killed, once in this process."""
    for folder in Path(place).glob(f"{PREFIX}????????{SUFFIX}"):
        with contextlib.suppress(OSError):
            found = folder.lstat()
            old = stat.S_ISDIR(found.st_mode) and time.time() - found.st_mtime > YOUNG_SECONDS
            if old and (lock := _lock(str(folder))) is not None:
                _remove(str(folder), lock)


def _lock(folder: str) -> int | None:
    """Lock a folder for as long as this process lives; None where another one has it, or the system cannot."""
    if sys.platform == "win32":  # what is left there is left to the user
        return None
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _remove(folder: str, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)
