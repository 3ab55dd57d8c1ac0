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
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from kvdoctor.analysis.stacks import FileRole, StackFiles
from kvdoctor.contract import CacheContract, Graph
from kvdoctor.errors import UsageError
from kvdoctor.model.external_data import (
    ExternalReference,
    examine,
    external_tensors,
    is_external,
    portions,
    read_reference,
)
from kvdoctor.model.files import MODEL_SUFFIXES
from kvdoctor.model.output_folder import copy_whole, write_whole
from kvdoctor.model.proto import ModelProto, TensorProto
from kvdoctor.model.skeleton import MAX_FILE, read_skeleton
from kvdoctor.model.write import write_model
from kvdoctor.records import record
from kvdoctor.repair.session import Conversion
from kvdoctor.report.repair_record import Change


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
        point(tensor, replace(span, location=(folder / span.location).as_posix()))
    return model


def span_of(tensor: TensorProto) -> ExternalReference:
    """The location of the bytes of an external tensor."""
    reference = read_reference(tensor)
    assert reference is not None  # noqa: S101 - asked of external tensors
    return reference


def point(tensor: TensorProto, span: ExternalReference) -> None:
    """Make a tensor refer to bytes in a file."""
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    for key, value in {"location": span.location, "offset": str(span.offset), "length": str(span.length)}.items():
        tensor.external_data.add(key=key, value=value)


def restore_small(model: ModelProto, root: Path) -> None:
    """Put the bytes of external tensors that are smaller than a line into the model."""
    for tensor in list(external_tensors(model)):
        if (span := span_of(tensor)).length < LINE:
            tensor.raw_data = b"".join(portions(root / span.location, span))
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")


@dataclass
class EqualTensors:
    """Tells tensors of the same type, shape and content; the bytes at a place below `root` are read once."""

    root: Path
    digests: dict[ExternalReference, bytes] = field(default_factory=dict)

    def key(self, tensor: TensorProto) -> tuple[object, ...]:
        """A key that is equal for two tensors if and only if their content is equal."""
        kind = tensor.data_type, tuple(tensor.dims)
        if not is_external(tensor):
            copy = deepcopy(tensor)
            for name in ("name", "doc_string", "metadata_props"):
                if name in copy.DESCRIPTOR.fields_by_name:
                    copy.ClearField(name)
            return (*kind, bytes(copy.SerializeToString(deterministic=True)))
        span = span_of(tensor)
        if span not in self.digests:
            digest = hashlib.blake2b()
            for portion in portions(self.root / span.location, span):
                digest.update(portion)
            self.digests[span] = digest.digest()
        return (*kind, self.digests[span])


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
        UsageError: a source became shorter, or a model would be larger than an ONNX file can be.
        OSError: something cannot be read or written.
    """
    spans = {span_of(tensor) for model in models.values() for tensor in external_tensors(model)}
    sizes = {name: sum(span_of(one).length + 16 for one in external_tensors(model)) for name, model in models.items()}
    largest = max(int(model.ByteSize()) + sizes[name] for name, model in models.items())  # at most, with all inside
    external = largest > limit.most or (largest > limit.inside and not all(map(_lies_in_model, spans)))
    moving = [tensor for model in models.values() for tensor in _list_moving(model)] if external else []
    home = f"{next(iter(models))}_data"
    moved = _data_file({span_of(tensor) for tensor in moving}, root, out / home) if external else {}
    for tensor in moving:
        span = span_of(tensor)
        point(tensor, ExternalReference(Path(home).name, moved[span], span.length))
    for name, model in models.items():
        put_back = {span_of(tensor).location for tensor in external_tensors(model)} - {Path(home).name}
        write_model(model, out / name, {one: root / one for one in put_back})
    return [*models, *([home] if external else [])]


def _list_moving(model: ModelProto) -> Iterator[TensorProto]:
    """The tensors that go to a data file: not the constants of nodes and weights of branches of a model file."""
    weights = list(model.graph.initializer)
    own = {id(tensor) for tensor in weights}
    yield from (one for one in external_tensors(model) if id(one) in own or not _lies_in_model(span_of(one)))


def _lies_in_model(span: ExternalReference) -> bool:
    return Path(span.location).suffix in MODEL_SUFFIXES


def _data_file(spans: set[ExternalReference], root: Path, home: Path) -> dict[ExternalReference, int]:
    home.parent.mkdir(parents=True, exist_ok=True)
    files = {span.location for span in spans}
    ordered = sorted(spans, key=lambda span: (span.location, span.offset))
    used = sum(span.length for span in spans)
    if len(files) == 1 and used >= NEARLY_ALL * (root / ordered[0].location).stat().st_size:
        copy_whole(root / ordered[0].location, home)
        return {span: span.offset for span in spans}
    places = {}
    with home.open("xb") as file:
        for span in ordered:
            step = PAGE if span.length >= LARGE else LINE
            file.seek(-(-file.tell() // step) * step)
            places[span] = file.tell()
            for portion in portions(root / span.location, span):
                file.write(portion)
        file.truncate()
    return places


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
