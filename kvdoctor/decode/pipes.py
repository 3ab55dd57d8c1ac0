"""The pipes through which a child process and its parent exchange messages, apart from standard input and output."""

import os
from typing import BinaryIO


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Give the reader of standard input and the writer of standard output to messages alone.

    Afterwards standard input is empty, and standard output is standard error: what a library prints must not mix with
    messages. On Windows a library may ask for the kind of standard input as it is loaded, and would wait for as long as
    another thread reads from it.
    """
    reader, writer = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    return reader, writer
