"""Writes a changed model, with the weights that were left out of it copied from the file they lie in.

The changed graph is small and is serialized; the payloads go from file to file without being held. Around each payload
the lengths of the messages are counted anew, as protobuf wants them.
"""

import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from kvdoctor.errors import UsageError
from kvdoctor.model.external_data import read_reference
from kvdoctor.model.proto import ModelProto, TensorProto
from kvdoctor.model.skeleton import LEN, MAX_FILE, NESTED, PLAIN_TAGS, FileWindow, encode_varint
from kvdoctor.records import record

PORTION = 1 << 20
RAW_DATA = 9


@record
class SourceBytes:
    """Bytes of the source file."""

    start: int
    length: int


Piece = bytes | SourceBytes


@dataclass(eq=False, repr=False)
class _Writing:
    """One model on its way: `pieces` in the order in which they are written."""

    graph: FileWindow
    weights: FileWindow
    location: bytes
    pieces: list[Piece] = field(default_factory=list)

    def message(self, name: str, start: int, end: int) -> list[Piece]:
        """The pieces of a message, payloads put back where they belong."""
        nested, pieces, copied = NESTED[name], list[Piece](), start
        for tag, at, value, stop in self.graph.fields(start, end):
            kind = nested.get(tag >> 3) if tag & 7 == LEN else None
            # What does not name the file anywhere holds no tensor that points into it.
            if kind is None or self.location not in self.graph.read(value, stop):
                continue
            pieces.append(self.graph.read(copied, at))
            inner = self.tensor(value, stop) if kind == "TensorProto" else self.message(kind, value, stop)
            pieces += [encode_varint(tag) + encode_varint(_size(inner)), *inner]
            copied = stop
        return [*pieces, self.graph.read(copied, end)]

    def tensor(self, start: int, end: int) -> list[Piece]:
        """The pieces of a tensor: its pointer into the file replaced by the bytes it points to."""
        content = self.graph.read(start, end)
        tensor = TensorProto.FromString(content)
        try:
            reference = read_reference(tensor)
        except ValueError:
            reference = None
        if reference is None or os.fsencode(reference.location) != self.location:
            return [content]
        span = SourceBytes(reference.offset, reference.length)
        # Numbers of the user's own that lead out of the file are a finding, and stay as they are.
        if not 0 <= span.start <= span.start + span.length <= self.weights.size:
            return [content]
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        # The field that the payload had in the source: values may lie in float_data or in raw_data.
        at = span.start - len(encode_varint(span.length)) - 1
        tag = self.weights.read(at, at + 1)[0] if at >= 0 else 0
        head = encode_varint(tag if tag in PLAIN_TAGS else RAW_DATA << 3 | LEN) + encode_varint(span.length)
        return [tensor.SerializeToString(), head, span]


def write_model(model: ModelProto, source: Path, target: Path) -> None:
    """Write a changed model to OUT; `source` is the file it was read from, without its weights.

    Raises:
        UsageError: the result would be larger than a protobuf message can be.
        OSError: it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with source.open("rb") as weights, partial.open("wb") as out:
        content = model.SerializeToString()
        writing = _Writing(FileWindow(io.BytesIO(content)), FileWindow(weights), os.fsencode(source.name))
        pieces = writing.message("ModelProto", 0, len(content))
        if _size(pieces) > MAX_FILE:
            raise UsageError(
                f"{source.name!r} would take {_size(pieces):,} bytes after the repair, more than the 2 GiB that an "
                "ONNX file can hold; save it with its weights as external data first"
            )
        for piece in pieces:
            if isinstance(piece, SourceBytes):
                _copy(weights, piece, out)
            else:
                out.write(piece)
    os.replace(partial, target)  # noqa: PTH105 - of one folder


def _copy(weights: BinaryIO, span: SourceBytes, out: BinaryIO) -> None:
    weights.seek(span.start)
    left = span.length
    while left:
        part = weights.read(min(PORTION, left))
        if not part:
            raise UsageError("the model became shorter while it was copied; wait until it is written completely")
        out.write(part)
        left -= len(part)


def _size(pieces: list[Piece]) -> int:
    return sum(piece.length if isinstance(piece, SourceBytes) else len(piece) for piece in pieces)
