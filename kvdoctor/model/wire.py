"""The framing of protobuf messages in a file: fields by position, read through a small window.

Source of the rules: https://protobuf.dev/programming-guides/encoding/.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO, Final

from kvdoctor.errors import UnreadableError

MAX_FILE: Final = 2**31 - 1  # bytes; the limit of one protobuf message, which every ONNX runtime inherits
MAX_VARINT: Final = 10  # bytes
WINDOW: Final = 8192  # bytes read at a time: enough for many nodes, little for a header between two payloads
VARINT, I64, LEN, I32 = 0, 1, 2, 5
FIXED: Final = {I64: 8, I32: 4}  # bytes


@dataclass(eq=False)
class WireError(Exception):
    """The framing is broken at byte `at`; `missing` bytes more would repair it (0: none would)."""

    at: int
    what: str
    missing: int = 0
    tag: int | None = None


class FileWindow:
    """Bytes of a file by position, through a small window.

    A mapping would be simpler, but the system reads ahead around each page touched: on a disk set to 8 MiB of it, the
    headers of 300 tensors cost the whole of a 1.8 GB file.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.size = file.seek(0, os.SEEK_END)
        self.window = b""
        self.base = 0

    def varint(self, at: int, end: int, tag: int | None) -> tuple[int, int]:
        """Return the number at byte `at` and the byte after it; `tag`, of the field it is in, is for the error."""
        index = at - self.base
        if not 0 <= index <= len(self.window) - MAX_VARINT:
            self.window, self.base, index = self.read(at, min(at + WINDOW, self.size)), at, 0
        if at < end and (byte := self.window[index]) < 0x80:
            return byte, at + 1
        number = 0
        for place, byte in enumerate(self.window[index : index + min(end - at, MAX_VARINT)]):
            number |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return number, at + place + 1
        if end - at >= MAX_VARINT:
            raise WireError(at, f"a number of more than {MAX_VARINT} bytes")
        raise WireError(at, "a field runs past the end", 1, tag)

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes from `start` to `end`."""
        if start >= self.base and end <= self.base + len(self.window):
            return self.window[start - self.base : end - self.base]
        self.file.seek(start)
        if len(content := self.file.read(end - start)) < end - start:
            raise UnreadableError("the file became shorter while it was read", "wait until it is written completely")
        return content

    def fields(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield tag, byte of the tag, byte of the value and byte after the value of each field between two bytes."""
        at = start
        while at < end:
            tag, value = self.varint(at, end, None)
            wire = tag & 7
            if not 8 <= tag < 2**32:
                raise WireError(at, "an invalid field number")
            if wire == LEN:
                length, value = self.varint(value, end, tag)
                stop = value + length
            elif wire == VARINT:
                stop = self.varint(value, end, tag)[1]
            elif wire in FIXED:
                stop = value + FIXED[wire]
            else:
                raise WireError(at, f"an invalid wire type, {wire},")
            if stop > end:
                missing = stop - end if stop - value <= MAX_FILE else 0
                raise WireError(at, "a field runs past the end", missing, tag)
            yield tag, at, value, stop
            at = stop


def encode_varint(number: int) -> bytes:
    """Encode a number as protobuf does."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes((*encoded, number))
