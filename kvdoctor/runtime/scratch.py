"""Private folders for what a run needs and does not leave: each is removed with the run, or by the next one.

The system releases the lock of a folder when its run is killed, whatever the number of the process or its container.
"""

import contextlib
import os
import shutil
import stat
import sys
import tempfile
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
    """The same, up to `cleanup` or the end of the process."""

    def __init__(self) -> None:
        sweep_left(tempfile.gettempdir())
        self.name = tempfile.mkdtemp(SUFFIX, PREFIX)
        self.cleanup = finalize(self, _remove, self.name, _lock(self.name))


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
