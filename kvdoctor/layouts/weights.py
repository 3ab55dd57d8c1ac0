"""Where the bytes of weights lie, and which weights are the same: found without loading any.

A model is read so that tensors inside its file point to their place in it, like external data (`read_located`). Which
of them are equal is asked of the bytes, a portion at a time, and only for those of one type and shape.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdoctor.errors import UsageError
from kvdoctor.external_data import BITS, examine, external_tensors
from kvdoctor.onnx_schema import ModelProto, TensorProto
from kvdoctor.skeleton import PORTION, read_skeleton


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of one tensor: `length` bytes at `offset` of a file, by its path relative to the model's folder."""

    file: str
    offset: int
    length: int

    @property
    def is_inline(self) -> bool:
        """Whether they lie inside a model file."""
        return self.file.endswith(".onnx")


def read_located(path: Path, root: Path) -> ModelProto:
    """Read a model without its weights; those point to where they lie, relative to `root`.

    Raises:
        UsageError: external data are missing, torn, or lie outside the model's folder.
        UnreadableError: the file is no readable model.
    """
    model = read_skeleton(path, located=True).model
    _, problems = examine(model, path)
    if problems:
        raise UsageError(f"{path.name}: external data {problems[0].location!r}: {problems[0].detail}")
    folder = path.parent.relative_to(root)
    for tensor in external_tensors(model):
        span = span_of(tensor)
        point(tensor, Span((folder / span.file).as_posix(), span.offset, span.length))
    return model


def span_of(tensor: TensorProto) -> Span:
    """Where the bytes of an external tensor lie."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    length = int(entries.get("length", "0") or "0") or size_of(tensor)
    return Span(entries["location"], int(entries.get("offset", "0") or "0"), length)


def size_of(tensor: TensorProto) -> int:
    """The bytes that dims and type ask for."""
    bits = BITS[tensor.data_type]
    for dim in tensor.dims:
        bits *= dim
    return -(-bits // 8)


def point(tensor: TensorProto, span: Span) -> None:
    """Let a tensor's bytes lie in a file."""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in {"location": span.file, "offset": str(span.offset), "length": str(span.length)}.items():
        tensor.external_data.add(key=key, value=value)


def portions(root: Path, span: Span) -> Iterator[bytes]:
    """The bytes of a span, a portion at a time.

    Raises:
        OSError: they cannot be read.
    """
    with (root / span.file).open("rb") as file:
        file.seek(span.offset)
        left = span.length
        while left:
            portion = file.read(min(left, PORTION))
            if not portion:
                raise OSError(f"{span.file} became shorter while it was read")
            left -= len(portion)
            yield portion


def restore(tensor: TensorProto, root: Path) -> None:
    """Put the bytes of an external tensor into it."""
    tensor.raw_data = b"".join(portions(root, span_of(tensor)))
    tensor.ClearField("external_data")
    tensor.ClearField("data_location")


class Sameness:
    """Says which tensors have the same type, shape and content."""

    def __init__(self, root: Path, tensors: Iterable[TensorProto]) -> None:
        self.root = root
        self._alike: dict[tuple[int, tuple[int, ...]], set[Span | bytes]] = {}
        for tensor in tensors:
            self._alike.setdefault(self._kind(tensor), set()).add(self._place(tensor))
        self._digests: dict[Span, bytes] = {}

    def key(self, tensor: TensorProto) -> tuple[object, ...]:
        """What is equal for two tensors of those given, if and only if one can stand for the other."""
        kind, place = self._kind(tensor), self._place(tensor)
        if isinstance(place, bytes) or len(self._alike[kind]) == 1:
            return (*kind, place)
        return (*kind, self._digest(place))

    @staticmethod
    def _kind(tensor: TensorProto) -> tuple[int, tuple[int, ...]]:
        return tensor.data_type, tuple(tensor.dims)

    @staticmethod
    def _place(tensor: TensorProto) -> Span | bytes:
        if tensor.data_location == TensorProto.EXTERNAL:
            return span_of(tensor)
        copy = TensorProto()
        copy.CopyFrom(tensor)
        for name in ("name", "doc_string", "metadata_props"):
            if name in copy.DESCRIPTOR.fields_by_name:
                copy.ClearField(name)
        return bytes(copy.SerializeToString(deterministic=True))

    def _digest(self, span: Span) -> bytes:
        if span not in self._digests:
            digest = hashlib.blake2b()
            for portion in portions(self.root, span):
                digest.update(portion)
            self._digests[span] = digest.digest()
        return self._digests[span]
