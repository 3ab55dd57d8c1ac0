"""What a layout declares, and the list of all layouts: each module here that defines `LAYOUT` or `LAYOUTS`."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kvdoctor.addons.conversions.layouts.weights import FileSizeLimit, read_located, write_models
from kvdoctor.analysis.stacks import FileRole, StackFiles
from kvdoctor.contract import CacheContract
from kvdoctor.model.output_folder import write_whole
from kvdoctor.model.proto import ModelProto
from kvdoctor.records import record
from kvdoctor.repair.session import Conversion
from kvdoctor.report.repair_record import Change


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

    @property
    def halves(self) -> tuple[ModelProto, ModelProto]:
        """The two graphs of a pair: that of the first step, and that of later steps."""
        return self.model("decoder"), self.model("decoder-with-past")

    def new_name(self, stem: str) -> str:
        """The name of a new file: in the folder of the old one, with the suffix of its variant (`_q4`)."""
        return new_name(self.root, self.stack, stem)


def new_name(root: Path, stack: StackFiles, stem: str) -> str:
    """The name of a new file of a stack: in the folder of the old one, with the suffix of its variant (`_q4`)."""
    main = stack.main
    suffix = main.suffix if main.path.stem.endswith(main.suffix) else ""
    return (main.path.relative_to(root).parent / f"{stem}{suffix}.onnx").as_posix()


@record(slots=False)
class Cut:
    """The end of the encoder inside a first step: its output, all of its inputs, and those that nothing else takes."""

    states: str
    inputs: tuple[str, ...]
    only: tuple[str, ...]


@dataclass
class ConvertedModels:
    """The models of the new layout by file name, in the order in which they run, and the changes.

    `replaces` are the files of the source that they replace. `notes` are tasks that are left to the caller. `cut` is
    the place at which an encoder was cut out of the graph of the first step. `limit` limits the weights inside a file:
    decoders share a data file, the `encoder` has its own. `texts` are further files by name.
    """

    models: dict[str, ModelProto]
    replaces: tuple[str, ...]
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cut: Cut | None = None
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
    that only the graphs show. `writes` are the stems of the decoder files that it may make. `title` says what the
    layout is where its module holds several layouts; otherwise the module's documentation does. A layout for one
    `consumer` alone is proved by running that as well, and never written unproved; a folder of it holds one decoder.
    `beside` are the names of files that the consumer reads, which are copied where they lie next to the source.
    """

    name: str
    explains: str
    writes: tuple[str, ...]
    refuse: Callable[[StackFiles, CacheContract], str | None]
    make: Callable[[LayoutSource], ConvertedModels]
    title: str = ""
    consumer: str = ""
    beside: tuple[str, ...] = ()

    def conversion(self, made: ConvertedModels) -> Conversion:
        """The entry of the fix report for this layout."""
        documentation = importlib.import_module(self.refuse.__module__).__doc__ or ""
        return Conversion(f"layout {self.name}", self.title or documentation.partition("\n")[0], tuple(made.notes))


@cache
def load() -> tuple[Layout, ...]:
    """All layouts, by name."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    modules = (importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
    found = [layout for m in modules for layout in (*getattr(m, "LAYOUTS", ()), getattr(m, "LAYOUT", None)) if layout]
    return tuple(sorted(found, key=lambda layout: layout.name))
