"""The structure of an ONNX model without its weights, whatever the size of the file.

The protobuf framing of the file is walked field by field, read through a small window (`FileWindow`), and tensor
payloads above `SMALL_PAYLOAD` bytes are never read. What remains goes to the protobuf parser. Sources of the rules:
onnx.proto for the field numbers and https://protobuf.dev/programming-guides/encoding/ for the framing and its limits.
"""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Final

from google.protobuf import descriptor_pool, message_factory  # type: ignore[import-untyped,unused-ignore]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped,unused-ignore]

from kvdoctor.errors import UnreadableError
from kvdoctor.model.proto import ModelProto, TensorProto
from kvdoctor.model.sequence_ports import take_apart
from kvdoctor.records import record

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


SMALL_PAYLOAD: Final = 1024  # bytes; payloads up to this size stay: shapes and axes are needed to read a graph
MAX_WHOLE: Final = 4 * 2**20  # bytes of one tensor, of the element types that a caller wants whole
PORTION: Final = 2**20  # bytes read at a time for a digest
MAX_KEPT: Final = 512 * 2**20  # bytes; more without weights is no decoder, and parsing takes a multiple in memory
MAX_DEPTH: Final = 100  # messages within messages; the recursion limit of the protobuf parsers
# The fields on the way from a model to its tensors.
NESTED: Final[dict[str, dict[int, str]]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": dict.fromkeys((5, 10), "TensorProto")
    | dict.fromkeys((6, 11), "GraphProto")
    | dict.fromkeys((22, 23), "SparseTensorProto"),
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
}
# The fields of a TensorProto that hold its values, with the wire type of one value.
PAYLOAD: Final[dict[int, int]] = {4: I32, 5: VARINT, 6: LEN, 7: VARINT, 9: LEN, 10: I64, 11: VARINT}
# The fields of a ModelProto: what runs past the end of the file under another number is no torn model.
MODEL_FIELDS: Final = dict.fromkeys((1, 5), VARINT) | dict.fromkeys((2, 3, 4, 6, 7, 8, 14, 20, 25, 26), LEN)

_NESTED_TAGS = {name: {number << 3 | LEN: kind for number, kind in fields.items()} for name, fields in NESTED.items()}
# Of these fields the bytes in the file are those of external data: float_data, raw_data, double_data.
PLAIN_TAGS: Final = frozenset(number << 3 | LEN for number in (4, 9, 10))
_PAYLOAD_TAGS: Final = frozenset(number << 3 | wire for number, one in PAYLOAD.items() for wire in (one, LEN))
_DATA_TYPE_TAG: Final = 2 << 3 | VARINT
_DOC_STRING_TAG: Final = 12 << 3 | LEN
_MODEL_TAGS: Final = {number << 3 | wire for number, wire in MODEL_FIELDS.items()} | {None}  # None: torn within a tag

_AGAIN: Final = "download or copy the file again, or export the model again"
_EXPORT: Final = "export the model to ONNX first"
_JSON: Final = "give the .onnx file or its folder; a download of this name may be a server's error message"
_LOOK: Final = "check the path: an ONNX model usually has the suffix .onnx"

# What other files show at their start. The text patterns are safe: models hold control characters near the start, such
# as the tags of ir_version and of a node's output.
_LFS = rb"version https://git-lfs\.github\.com/spec/.*?(?:^size (?P<bytes>\d{1,19})$|\Z)"
_UTF8 = rb"(?:[\t\n\f\r -~]|[\xc2-\xf4][\x80-\xbf]{1,3})"
_OTHER_FORMATS: Final = (
    (_LFS, "a Git LFS pointer", "run `git lfs pull` in the repository"),
    (rb".{4}ORTM", "a model in ONNX Runtime's .ort format", "use the .onnx file that it was made from"),
    (rb"PK\x03\x04", "a zip archive or PyTorch checkpoint", f"unpack it, or {_EXPORT}"),
    (rb"\x1f\x8b", "a file compressed with gzip", "unpack it"),
    (rb"\x80[\x02-\x05]", "a Python pickle, perhaps a PyTorch checkpoint", _EXPORT),
    (rb"GGUF", "a GGUF model", "use an ONNX export of the same model"),
    (rb'.{5}\0{3}\{"', "a safetensors file", _EXPORT),
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file", _EXPORT),
    (rb"\0{16}", "a file of zeros, as an interrupted download leaves it", _AGAIN),
    (rb"(?i:\s*<(?:!doctype )?html)", "an HTML page", "download the file itself, not the page that shows it"),
    (rb"\s*[{\[]%b*[\x80-\xf4]{0,3}\Z" % _UTF8, "JSON text", _JSON),
    (rb"%b+[\x80-\xf4]{0,3}\Z" % _UTF8, "a text file", _LOOK),
)


@record
class Skeleton:
    """A model without the payloads of its large tensors.

    Attributes:
        model: everything else; each tensor keeps its dims, data_type and name. All strings are valid UTF-8.
        bytes_on_disk: size of the file in bytes, external data not included.
        inline_bytes: size in bytes of the payloads left out, that is of the weights stored inside the file.
        left_out: number of tensors whose payload was left out; see `payload_left_out`.
        sequences: inputs and outputs of the file that are sequences of tensors; `model` has their elements instead.
    """

    model: ModelProto
    bytes_on_disk: int
    inline_bytes: int
    left_out: int
    sequences: tuple[str, ...] = ()


def payload_left_out(tensor: TensorProto) -> bool:
    """Say whether a tensor of a skeleton lacks its values. One that lacks them in the file already looks the same."""
    if tensor.data_location == TensorProto.EXTERNAL or not all(tensor.dims):
        return False
    return PAYLOAD.keys().isdisjoint(field.number for field, _ in tensor.ListFields())


def read_skeleton(
    path: Path, whole: frozenset[int] = frozenset(), *, digests: bool = False, located: bool = False
) -> Skeleton:
    """Read a model file without its large tensor payloads.

    Tensors of the element types `whole` (TensorProto.DataType) keep payloads of up to MAX_WHOLE bytes. With `digests` a
    tensor whose payload is left out has the SHA-256 of it for a doc string, which takes reading all of them once.
    Where it is `located`, such a tensor points to the place in the file where its payload lies, as external data do
    (offset and length in bytes): the model can be run from the folder of the file. Payloads in a form that external
    data cannot have (varints, text) stay then.

    Raises:
        UnreadableError: the file cannot be opened, or is no ONNX model, or is damaged.
    """
    try:
        return _read(path, _Wanted(whole, digests, path.name if located else None))
    except PermissionError:
        raise UnreadableError("no permission to read the file", "change its permissions") from None
    except (OSError, ValueError, OverflowError) as error:
        what = getattr(error, "strerror", None) or str(error)
        raise UnreadableError(f"cannot be read: {what}", "check the path and the disk") from error


def _read(path: Path, wanted: "_Wanted") -> Skeleton:
    # A FIFO or a device must not even be opened: that can wait for ever.
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        reason = "a folder, not a file" if stat.S_ISDIR(mode) else "not a regular file"
        raise UnreadableError(reason, "name an .onnx file")
    with path.open("rb", buffering=WINDOW) as file:
        head = file.read(1024)
        if not head:
            raise UnreadableError("an empty file (0 bytes)", _AGAIN)
        for pattern, reason, advice in _OTHER_FORMATS:
            if found := re.match(pattern, head, re.DOTALL | re.MULTILINE):
                size = found.groupdict().get("bytes")
                raise UnreadableError(reason + (f" to a file of {int(size):,} bytes" if size else ""), advice)
        walk = _Walk(FileWindow(file), wanted)
        walk.run()
    if walk.source.size > MAX_FILE:
        reason = f"{walk.source.size:,} bytes, more than the 2 GiB that protobuf can hold"
        raise UnreadableError(reason, "export the model again with its weights as external data")
    model = _parse(b"".join(walk.pieces))
    return Skeleton(model, walk.source.size, walk.inline_bytes, walk.left_out, take_apart(model))


@record
class _Wanted:
    """What becomes of payloads; `location` is the file that tensors without theirs point to."""

    whole: frozenset[int]
    digests: bool
    location: str | None


class _Walk:
    """One pass over the framing of a model; collects what the skeleton has."""

    def __init__(self, source: FileWindow, wanted: _Wanted) -> None:
        self.source, self.wanted = source, wanted
        self.pieces: list[bytes] = []
        self.kept = self.inline_bytes = self.left_out = 0

    def run(self) -> None:
        try:
            self._message("ModelProto", 0, self.source.size, 1)
        except WireError as error:
            if error.tag not in _MODEL_TAGS if error.missing else error.at == 0:
                raise UnreadableError(f"not an ONNX model ({error.what} at byte {error.at:,})", _LOOK) from None
            reason = f"damaged at byte {error.at:,}: {error.what}"
            if error.missing:
                reason = f"truncated: the field at byte {error.at:,} needs at least {error.missing:,} bytes more"
            raise UnreadableError(reason, _AGAIN) from None

    def _message(self, name: str, start: int, end: int, depth: int) -> None:
        nested = _NESTED_TAGS[name]
        copied = start
        for tag, at, value, stop in self.source.fields(start, end):
            # The rule that makes it fast: what is encoded in so few bytes cannot hold a large payload.
            if stop - value > SMALL_PAYLOAD and tag in nested:
                self._keep(copied, at)
                self._child(tag, nested[tag], value, stop, depth + 1)
                copied = stop
        self._keep(copied, end)

    def _child(self, tag: int, name: str, start: int, end: int, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise WireError(start, f"messages nested deeper than {MAX_DEPTH}")
        place, before = len(self.pieces), self.kept
        self.pieces.append(b"")
        try:
            if name == "TensorProto":
                self._tensor(start, end)
            else:
                self._message(name, start, end, depth)
        except WireError as error:
            # Its bytes are all there: what is missing inside it would not be repaired by a longer file.
            raise WireError(error.at, error.what) from None
        self.pieces[place] = encode_varint(tag) + encode_varint(self.kept - before)
        self.kept += len(self.pieces[place])

    def _tensor(self, start: int, end: int) -> None:
        spans: list[tuple[int, int]] = []
        fields: list[tuple[int, int, int]] = []
        limit = SMALL_PAYLOAD
        for tag, at, value, stop in self.source.fields(start, end):
            if tag == _DATA_TYPE_TAG and self.source.varint(value, end, tag)[0] in self.wanted.whole:
                limit = MAX_WHOLE
            if tag in _PAYLOAD_TAGS:
                fields.append((tag, value, stop))
                # Values that are not packed are one field each; neighbors become one span.
                first = spans.pop()[0] if spans and spans[-1][1] == at else at
                spans.append((first, stop))
        movable = self.wanted.location is None or (len(fields) == 1 and fields[0][0] in PLAIN_TAGS)
        if sum(stop - first for first, stop in spans) <= limit or not movable:
            self._keep(start, end)
            return
        for first, stop in spans:
            self._keep(start, first)
            start = stop
        self._keep(start, end)
        self.inline_bytes += sum(stop - value for _, value, stop in fields)
        self.left_out += 1
        if self.wanted.location is not None:
            self._add(_pointer(self.wanted.location, *fields[0][1:]))
        if self.wanted.digests:
            self._add(self._digest(spans))

    def _digest(self, spans: list[tuple[int, int]]) -> bytes:
        """The SHA-256 of some bytes, as the doc string of a tensor."""
        import hashlib  # with OpenSSL: an inspection that hashes nothing does not load it

        digest = hashlib.sha256()
        for first, stop in spans:
            for at in range(first, stop, PORTION):
                digest.update(self.source.read(at, min(at + PORTION, stop)))
        text = digest.hexdigest().encode()
        return encode_varint(_DOC_STRING_TAG) + encode_varint(len(text)) + text

    def _add(self, field: bytes) -> None:
        self.kept += len(field)
        self.pieces.append(field)

    def _keep(self, start: int, end: int) -> None:
        self.kept += end - start
        if self.kept > MAX_KEPT:
            reason = f"more than {MAX_KEPT >> 20} MiB besides the values of tensors"
            raise UnreadableError(reason, "remove large texts or metadata from the model")
        if start < end:
            self.pieces.append(self.source.read(start, end))


def _pointer(location: str, start: int, end: int) -> bytes:
    """The fields of a tensor that say where its bytes lie."""
    tensor = TensorProto(data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": str(start), "length": str(end - start)}.items():
        tensor.external_data.add(key=key, value=value)
    return bytes(tensor.SerializeToString())


def _parse(kept: bytes) -> ModelProto:
    model = ModelProto()
    try:
        model.ParseFromString(kept)
        # Under proto2 such strings come out as `bytes`, to the surprise of everyone who reads names.
        if verifier := _utf8_verifier():
            verifier.FromString(kept)
    except DecodeError as error:
        raise UnreadableError(f"damaged: {str(error).rpartition(': ')[2]}", _AGAIN) from None
    if model.HasField("graph") and (model.ir_version or model.opset_import):
        return model
    missing = "neither ir_version nor opset_import" if model.HasField("graph") else "no graph"
    raise UnreadableError(f"not an ONNX model (it has {missing})", _LOOK)


@cache
def _utf8_verifier() -> Any:
    """Return ModelProto under proto3, which refuses strings that are not UTF-8; None where protobuf cannot make it."""
    model = ModelProto.DESCRIPTOR
    pool = descriptor_pool.DescriptorPool()
    try:
        # Field 12 of a FileDescriptorProto (descriptor.proto) is its syntax; of two values the last one counts.
        pool.AddSerializedFile(model.file.serialized_pb + b"\x62\x06proto3")
        return message_factory.GetMessageClass(pool.FindMessageTypeByName(model.full_name))
    except (TypeError, AttributeError):
        return None
