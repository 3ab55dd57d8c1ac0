"""What a layout declares, the list of all layouts, and how its models are read and their weights written once.

Each module here that defines `LAYOUT` or `LAYOUTS` is found. A model is read so that tensors inside its file point to
their bytes, like external data (`read_located`). Equality is decided by the bytes, in portions, and only for tensors of
one type and shape. Weights are copied from file to file and never all held in memory. Models whose weights lay inside
their files keep them there, up to the 2 GiB that protobuf can hold; beyond that, and if the weights were external, they
are written to one data file for all models that share them. A data file of which nearly everything is used is copied as
it is, so that a file system may share its blocks.
"""

import hashlib
import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import BinaryIO

from kvdoctor.analysis.stacks import FileRole, StackFiles
from kvdoctor.contract import CacheContract, Graph
from kvdoctor.errors import UsageError
from kvdoctor.model.edit import replace_all
from kvdoctor.model.external_data import examine, external_tensors, is_external, read_reference
from kvdoctor.model.output_folder import copy_whole, write_whole
from kvdoctor.model.proto import ModelProto, TensorProto
from kvdoctor.model.skeleton import LEN, MAX_FILE, PORTION, encode_varint, read_skeleton
from kvdoctor.records import record
from kvdoctor.repair.session import Conversion
from kvdoctor.report.repair_record import Change


@record
class TensorBytes:
    """The bytes of one tensor: `length` bytes at `offset` of a file, by its path relative to the model's folder."""

    file: str
    offset: int
    length: int

    @property
    def is_inline(self) -> bool:
        """Whether they lie inside a model file."""
        return self.file.endswith(".onnx")


def read_located(path: Path, root: Path) -> ModelProto:
    """Read a model without its weights, which point to their bytes in files relative to `root`.

    Raises:
        UsageError: external data are missing, torn, or lie outside the model's folder.
        UnreadableError: the file is not a readable model.
    """
    model = read_skeleton(path, located=True).model
    _, problems = examine(model, path)
    if problems:
        raise UsageError(f"{path.name}: external data {problems[0].location!r}: {problems[0].detail}")
    folder = path.parent.relative_to(root)
    for tensor in external_tensors(model):
        span = span_of(tensor)
        point(tensor, TensorBytes((folder / span.file).as_posix(), span.offset, span.length))
    return model


def span_of(tensor: TensorProto) -> TensorBytes:
    """The location of the bytes of an external tensor."""
    reference = read_reference(tensor)
    if reference is None:
        raise ValueError(f"{tensor.name} is not external")
    return TensorBytes(reference.location, reference.offset, reference.length)


def point(tensor: TensorProto, span: TensorBytes) -> None:
    """Make a tensor refer to bytes in a file."""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in {"location": span.file, "offset": str(span.offset), "length": str(span.length)}.items():
        tensor.external_data.add(key=key, value=value)


def portions(root: Path, span: TensorBytes) -> Iterator[bytes]:
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


def restore(tensors: Iterable[TensorProto], root: Path, goes: Callable[[TensorBytes], bool]) -> None:
    """Put the bytes of external tensors into them: of those whose location says so."""
    for tensor in list(tensors):
        if goes(span := span_of(tensor)):
            tensor.raw_data = b"".join(portions(root, span))
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")


class EqualTensors:
    """Finds tensors of the same type, shape and content."""

    def __init__(self, root: Path, tensors: Iterable[TensorProto]) -> None:
        self.root = root
        self._alike: dict[tuple[int, tuple[int, ...]], set[TensorBytes | bytes]] = {}
        for tensor in tensors:
            self._alike.setdefault(self._kind(tensor), set()).add(self._place(tensor))
        self._digests: dict[TensorBytes, bytes] = {}

    def key(self, tensor: TensorProto) -> tuple[object, ...]:
        """A key that is equal for two of the given tensors if and only if their content is equal."""
        kind, place = self._kind(tensor), self._place(tensor)
        if isinstance(place, bytes) or len(self._alike[kind]) == 1:
            return (*kind, place)
        return (*kind, self._digest(place))

    @staticmethod
    def _kind(tensor: TensorProto) -> tuple[int, tuple[int, ...]]:
        return tensor.data_type, tuple(tensor.dims)

    @staticmethod
    def _place(tensor: TensorProto) -> TensorBytes | bytes:
        if is_external(tensor):
            return span_of(tensor)
        copy = deepcopy(tensor)
        for name in ("name", "doc_string", "metadata_props"):
            if name in copy.DESCRIPTOR.fields_by_name:
                copy.ClearField(name)
        return bytes(copy.SerializeToString(deterministic=True))

    def _digest(self, span: TensorBytes) -> bytes:
        if span not in self._digests:
            digest = hashlib.blake2b()
            for portion in portions(self.root, span):
                digest.update(portion)
            self._digests[span] = digest.digest()
        return self._digests[span]


GRAPH_TAG = encode_varint(7 << 3 | LEN)
INITIALIZER_TAG = encode_varint(5 << 3 | LEN)
RAW_DATA_TAG = encode_varint(9 << 3 | LEN)
"""ModelProto.graph, GraphProto.initializer and TensorProto.raw_data, by onnx.proto."""

LARGE, PAGE, LINE = 1 << 20, 4096, 64
"""Bytes: tensors from this size on begin at a page, so that a runtime can map them; others at a multiple of a line."""
NEARLY_ALL = 0.9


@record
class FileSizeLimit:
    """The largest model file, and the size up to which external weights are moved into it, in bytes."""

    most: int = MAX_FILE
    inside: int = 0


UNLIMITED = FileSizeLimit()


def write_models(models: dict[str, ModelProto], root: Path, out: Path, limit: FileSizeLimit = UNLIMITED) -> list[str]:
    """Write models by file name into a folder; their tensors point to files below `root`. Gives the names of all files.

    The models share one data file, if they need one, and are consumed.

    Raises:
        OSError: something cannot be read or written.
    """
    spans = {span_of(tensor) for model in models.values() for tensor in external_tensors(model)}
    sizes = {name: sum(span_of(one).length + 16 for one in external_tensors(model)) for name, model in models.items()}
    largest = max(int(model.ByteSize()) + sizes[name] for name, model in models.items())  # at most, with all inside
    beside = largest > limit.most or (largest > limit.inside and not all(span.is_inline for span in spans))
    for model in models.values():  # the constants of nodes and the weights of branches
        weights = list(map(deepcopy, model.graph.initializer))
        del model.graph.initializer[:]
        restore(external_tensors(model), root, lambda span: not beside or span.is_inline)
        model.graph.initializer.extend(weights)
    spans = {span_of(tensor) for model in models.values() for tensor in external_tensors(model)}
    home = f"{next(iter(models))}_data"
    moved = _data_file(spans, root, out / home) if beside else {}
    for name, model in models.items():
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if beside:
            for tensor in external_tensors(model):
                span = span_of(tensor)
                point(tensor, TensorBytes(Path(home).name, moved[span], span.length))
        with (out / name).open("xb") as file:
            _write_model(model, root, file, inline=not beside)
    return [*models, *([home] if beside else [])]


def _data_file(spans: set[TensorBytes], root: Path, home: Path) -> dict[TensorBytes, int]:
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
    streamed = [deepcopy(tensor) for tensor in model.graph.initializer if inline and is_external(tensor)]
    replace_all(model.graph.initializer, [t for t in model.graph.initializer if not (inline and is_external(t))])
    graph = model.graph.SerializeToString()
    heads = []
    for tensor in streamed:
        bare, length = deepcopy(tensor), span_of(tensor).length
        for name in ("external_data", "data_location"):
            bare.ClearField(name)
        body = bytes(bare.SerializeToString()) + RAW_DATA_TAG + encode_varint(length)
        heads.append(INITIALIZER_TAG + encode_varint(len(body) + length) + body)
    length = len(graph) + sum(len(head) + span_of(tensor).length for head, tensor in zip(heads, streamed, strict=True))
    model.ClearField("graph")
    file.write(model.SerializeToString() + GRAPH_TAG + encode_varint(length) + graph)
    for head, tensor in zip(heads, streamed, strict=True):
        file.write(head)
        for portion in portions(root, span_of(tensor)):
            file.write(portion)


class DoesNotFit(Exception):
    """A stack cannot be given a layout: the reason, and an alternative if one is known."""


@record(slots=False)
class LayoutSource:
    """A stack to be given another layout. Each access reads a model again, so callers may change it.

    File names and locations of weights are relative to `root`. `readable` asks for the axis names of Optimum.
    """

    root: Path
    stack: StackFiles
    contract: CacheContract
    readable: bool = False

    def model(self, role: FileRole) -> ModelProto:
        """The model of the file with that role, without its weights."""
        return read_located(self.stack.files[role].path, self.root)

    def name(self, role: FileRole) -> str:
        """The name of that file."""
        return self.stack.files[role].name

    def ports(self, role: FileRole) -> Graph:
        """What the contract says of the inputs and outputs of that file."""
        first = role == "decoder" and self.stack.kind == "pair"
        return self.contract.graph("prefill" if first else "decode")

    def new_name(self, stem: str) -> str:
        """The name of a new file: in the folder of the old one, with the suffix of its variant (`_q4`)."""
        main = self.stack.main
        suffix = main.suffix if main.path.stem.endswith(main.suffix) else ""
        return (main.path.relative_to(self.root).parent / f"{stem}{suffix}.onnx").as_posix()


@dataclass
class ConvertedModels:
    """The models of the new layout by file name, in the order in which they run, and the changes.

    `replaces` are the files of the source that they replace. `notes` are tasks that are left to the caller. `limit`
    limits the weights inside a file: decoders share a data file, the `encoder` has its own. `texts` are further files
    by name.
    """

    models: dict[str, ModelProto]
    replaces: tuple[str, ...]
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    encoder: str | None = None
    limit: FileSizeLimit = field(default_factory=FileSizeLimit)
    texts: dict[str, str] = field(default_factory=dict)

    def write(self, root: Path, out: Path) -> None:
        """Write the models, which are consumed; their weights lie below `root`.

        Raises:
            OSError: something cannot be read or written.
        """
        decoders = {name: model for name, model in self.models.items() if name != self.encoder}
        for group in ({self.encoder: self.models[self.encoder]} if self.encoder else {}, decoders):
            if group:
                write_models(group, root, out, self.limit)
        for name, text in self.texts.items():
            write_whole(out / name, text)


@record
class Layout:
    """A layout that a stack can be given.

    `refuse` says why a stack cannot have it, None if it can; `make` makes it, and may raise `DoesNotFit` for reasons
    that only the graphs show. A layout for one `consumer` alone is proved by running that as well, and never written
    unproved; a folder of it holds one decoder.
    `beside` are the names of files that the consumer reads, which are copied where they lie next to the source.
    """

    name: str
    explains: str
    refuse: Callable[[StackFiles, CacheContract], str | None]
    make: Callable[[LayoutSource], ConvertedModels]
    consumer: str = ""
    beside: tuple[str, ...] = ()

    def conversion(self, made: ConvertedModels) -> Conversion:
        """The entry of the fix report for this layout."""
        return Conversion(f"layout {self.name}", f"{self.name.capitalize()}: {self.explains}.", tuple(made.notes))


@cache
def load() -> tuple[Layout, ...]:
    """All layouts, by name."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    modules = (importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
    found = [layout for m in modules for layout in (*getattr(m, "LAYOUTS", ()), getattr(m, "LAYOUT", None)) if layout]
    return tuple(sorted(found, key=lambda layout: layout.name))
