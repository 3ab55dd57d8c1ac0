"""Opens every file that is not a model: of an option, or next to a model. Regular files only, and not without end."""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_side_file(path: Path, most: int) -> BinaryIO:
    """Open a file of at most so many bytes. A pipe and a device are refused: what they give has no end.

    Raises:
        OSError: it cannot be read, is no regular file or is too large; `strerror` says which.
    """
    _require_fit(path.stat(), most)
    # Where it is replaced by a pipe now, a call that blocks would wait for its writer.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    file = os.fdopen(os.open(path, flags), "rb")
    try:
        _require_fit(os.fstat(file.fileno()), most)
    except OSError:
        file.close()
        raise
    return file


def read_side_file(path: Path, most: int) -> bytes:
    """The content of a file of at most so many bytes; see `open_side_file`."""
    with open_side_file(path, most) as file:
        content = file.read(most + 1)
    if len(content) > most:  # it grew, or lies in /proc
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB")
    return content


def _require_fit(found: os.stat_result, most: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a folder" if stat.S_ISDIR(found.st_mode) else "it is not a regular file")
    if found.st_size > most:
        raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB")
