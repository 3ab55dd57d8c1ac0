"""Writes converted models: weights are copied from file to file, each once, and never held all at once.

Models whose weights lay inside their files keep them there, up to the 2 GiB that protobuf can hold; beyond that, and
where weights lay beside the model, they are written to one data file for all models that share them. A data file of
which nearly everything is used is copied as it is, so that a file system may share its blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvdoctor.external_data import external_tensors
from kvdoctor.layouts.weights import Span, point, portions, restore, span_of
from kvdoctor.onnx_schema import ModelProto, TensorProto
from kvdoctor.out_folder import copy_whole
from kvdoctor.scoping import replace_all
from kvdoctor.wire import LEN, MAX_FILE, encode_varint

GRAPH_TAG = encode_varint(7 << 3 | LEN)
INITIALIZER_TAG = encode_varint(5 << 3 | LEN)
RAW_DATA_TAG = encode_varint(9 << 3 | LEN)
"""ModelProto.graph, GraphProto.initializer and TensorProto.raw_data, by onnx.proto."""

LARGE, PAGE, LINE = 1 << 20, 4096, 64
"""Bytes: tensors from this size on begin at a page, so that a runtime can map them; others at a multiple of a line."""
NEARLY_ALL = 0.9


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that a model file may have: at most, and up to which weights that lay beside a model are put inside."""

    most: int = MAX_FILE
    inside: int = 0


def write(models: dict[str, ModelProto], root: Path, out: Path, room: Room = Room()) -> list[str]:
    """Write models by file name into a folder; their tensors point to files below `root`. Gives the names of all files.

    The models share one data file, if they need one, and are used up.

    Raises:
        OSError: something cannot be read or written.
    """
    spans = {span_of(tensor) for model in models.values() for tensor in external_tensors(model)}
    largest = max(map(_size, models.values()))
    beside = largest > room.most or (largest > room.inside and not all(span.is_inline for span in spans))
    for model in models.values():
        _restore_small(model, root, everything=not beside)
    spans = {span_of(tensor) for model in models.values() for tensor in external_tensors(model)}
    home = f"{next(iter(models))}_data"
    moved = _data_file(spans, root, out / home) if beside else {}
    for name, model in models.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if beside:
            for tensor in external_tensors(model):
                span = span_of(tensor)
                point(tensor, Span(Path(home).name, moved[span], span.length))
        with (out / name).open("xb") as file:
            _write_model(model, root, file, inline=not beside)
    return [*models, *([home] if beside else [])]


def _restore_small(model: ModelProto, root: Path, everything: bool) -> None:
    """Put into the model what lay inside its file, or everything, and is no weight of the main graph.

    That is: constants of nodes, and weights of bodies.
    """
    weights = list(_copies(model.graph.initializer))
    del model.graph.initializer[:]
    for tensor in external_tensors(model):
        if everything or span_of(tensor).is_inline:
            restore(tensor, root)
    model.graph.initializer.extend(weights)


def _copies(tensors: object) -> Iterator[TensorProto]:
    for tensor in tensors:  # type: ignore[attr-defined]
        copy = TensorProto()
        copy.CopyFrom(tensor)
        yield copy


def _size(model: ModelProto) -> int:
    """Bytes of the file with all its weights inside, and a little more."""
    weights = sum(span_of(tensor).length + 16 for tensor in external_tensors(model))
    return int(model.ByteSize()) + weights


def _data_file(spans: set[Span], root: Path, home: Path) -> dict[Span, int]:
    """Write the data file; gives the offset in it of each span."""
    home.parent.mkdir(parents=True, exist_ok=True)
    files = {span.file for span in spans}
    ordered = sorted(spans, key=lambda span: (span.file, span.offset))
    used = sum(span.length for span in spans)
    if len(files) == 1 and used >= NEARLY_ALL * (root / ordered[0].file).stat().st_size:
        copy_whole(root / ordered[0].file, home)
        return {span: span.offset for span in spans}
    places = {}
    with home.open("xb") as file:
        for span in ordered:
            step = PAGE if span.length >= LARGE else LINE
            file.seek(-(-file.tell() // step) * step)
            places[span] = file.tell()
            for portion in portions(root, span):
                file.write(portion)
        file.truncate()
    return places


def _write_model(model: ModelProto, root: Path, file: BinaryIO, inline: bool) -> None:
    """Write a model; where its weights go inside, each is copied on its way."""
    streamed = [tensor for tensor in _copies(model.graph.initializer) if inline and _is_external(tensor)]
    replace_all(model.graph.initializer, [t for t in model.graph.initializer if not (inline and _is_external(t))])
    graph = model.graph.SerializeToString()
    heads = [_head(tensor) for tensor in streamed]
    length = len(graph) + sum(len(head) + span_of(tensor).length for head, tensor in zip(heads, streamed, strict=True))
    model.ClearField("graph")
    file.write(model.SerializeToString() + GRAPH_TAG + encode_varint(length) + graph)
    for head, tensor in zip(heads, streamed, strict=True):
        file.write(head)
        for portion in portions(root, span_of(tensor)):
            file.write(portion)


def _head(tensor: TensorProto) -> bytes:
    """What stands in the file before the bytes of a weight."""
    bare, length = TensorProto(), span_of(tensor).length
    bare.CopyFrom(tensor)
    bare.ClearField("external_data")
    bare.ClearField("data_location")
    body = bytes(bare.SerializeToString()) + RAW_DATA_TAG + encode_varint(length)
    return INITIALIZER_TAG + encode_varint(len(body) + length) + body


def _is_external(tensor: TensorProto) -> bool:
    return bool(tensor.data_location == TensorProto.EXTERNAL)
