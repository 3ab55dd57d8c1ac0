"""Writes a changed model, with the weights that were left out of it copied from the files they lie in.

The changed graph is small and is serialized; the payloads go from file to file without being held. Around each payload
the lengths of the messages are counted anew, as protobuf wants them.
"""

import io
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from kvdoctor.errors import UsageError
from kvdoctor.model.external_data import ExternalReference, portions, read_reference
from kvdoctor.model.files import MODEL_SUFFIXES
from kvdoctor.model.proto import ModelProto, TensorProto
from kvdoctor.model.skeleton import LEN, MAX_FILE, NESTED, PLAIN_TAGS, FileWindow, encode_varint

RAW_DATA = 9

Piece = bytes | ExternalReference


@dataclass(eq=False, repr=False)
class _Writing:
    """One model on its way: its bytes, and by name the files that its tensors point into, some of them `models`."""

    graph: FileWindow
    files: Mapping[bytes, FileWindow]
    models: frozenset[bytes]

    def message(self, name: str, start: int, end: int) -> list[Piece]:
        """The pieces of a message, payloads put back where they belong."""
        nested, pieces, copied = NESTED[name], list[Piece](), start
        for tag, at, value, stop in self.graph.fields(start, end):
            kind = nested.get(tag >> 3) if tag & 7 == LEN else None
            # What does not name a file anywhere holds no tensor that points into it.
            if kind is None or not any(name in self.graph.read(value, stop) for name in self.files):
                continue
            pieces.append(self.graph.read(copied, at))
            inner = self.tensor(value, stop) if kind == "TensorProto" else self.message(kind, value, stop)
            pieces += [encode_varint(tag) + encode_varint(_size(inner)), *inner]
            copied = stop
        return [*pieces, self.graph.read(copied, end)]

    def tensor(self, start: int, end: int) -> list[Piece]:
        """The pieces of a tensor: its pointer into a file replaced by the bytes it points to."""
        content = self.graph.read(start, end)
        tensor = TensorProto.FromString(content)
        try:
            reference = read_reference(tensor)
        except ValueError:
            reference = None
        name = os.fsencode(reference.location) if reference is not None else b""
        if reference is None or name not in self.files:
            return [content]
        weights = self.files[name]
        # Numbers of the user's own that lead out of the file are a finding, and stay as they are.
        if not 0 <= reference.offset <= reference.offset + reference.length <= weights.size:
            return [content]
        tensor.ClearField("external_data")
        tensor.ClearField("data_location")
        # The field that the payload had in a model: values may lie in float_data or in raw_data.
        at = reference.offset - len(encode_varint(reference.length)) - 1
        tag = weights.read(at, at + 1)[0] if at >= 0 and name in self.models else 0
        head = encode_varint(tag if tag in PLAIN_TAGS else RAW_DATA << 3 | LEN) + encode_varint(reference.length)
        return [tensor.SerializeToString(), head, reference]


def write_model(model: ModelProto, target: Path, sources: Mapping[str, Path]) -> None:
    """Write a changed model; `sources` are the files whose bytes are put back, by the name that its tensors give.

    Raises:
        UsageError: the result would be larger than a protobuf message can be, or a source is not as it was.
        OSError: it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    with ExitStack() as opened, partial.open("wb") as out:
        content = model.SerializeToString()
        files = {os.fsencode(name): FileWindow(opened.enter_context(path.open("rb"))) for name, path in sources.items()}
        models = frozenset(os.fsencode(name) for name, path in sources.items() if path.suffix in MODEL_SUFFIXES)
        pieces = _Writing(FileWindow(io.BytesIO(content)), files, models).message("ModelProto", 0, len(content))
        if _size(pieces) > MAX_FILE:
            raise UsageError(
                f"{target.name!r} would take {_size(pieces):,} bytes, more than the 2 GiB that an "
                "ONNX file can hold; save it with its weights as external data first"
            )
        for piece in pieces:
            parts = (piece,) if isinstance(piece, bytes) else portions(sources[piece.location], piece)
            out.writelines(parts)
    os.replace(partial, target)  # noqa: PTH105 - of one folder


def _size(pieces: list[Piece]) -> int:
    return sum(len(piece) if isinstance(piece, bytes) else piece.length for piece in pieces)
