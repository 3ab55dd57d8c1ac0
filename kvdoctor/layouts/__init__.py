"""Layouts: the ways in which the graphs of a decoder are cut, named and put into files; one file for each.

A module of this package that defines `LAYOUT` is found by itself. A layout is made of a stack whose contract is known,
on models without their weights, which stay where they are until the new files are written.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Literal

from kvdoctor.contract import CacheContract
from kvdoctor.layouts.weights import read_located
from kvdoctor.layouts.writing import Room, write
from kvdoctor.onnx_schema import ModelProto
from kvdoctor.report.document import Change
from kvdoctor.stacks import FileRole, StackFiles


class DoesNotFit(Exception):
    """A stack cannot be given a layout: why, and where it is known what to do instead."""


@dataclass(frozen=True)
class Source:
    """A stack to be given another layout. Models are read when asked for, each time anew: they may be changed.

    `root` is the folder that file names and the places of weights are relative to. `readable` asks for the axis names
    of Optimum.
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
        """The two graphs of a pair: that of the first step, and that of later ones."""
        return self.model("decoder"), self.model("decoder-with-past")

    def new_name(self, stem: str) -> str:
        """The name of a new file: beside the old one, with the suffix of its variant (`_q4`)."""
        return new_name(self.root, self.stack, stem)


def new_name(root: Path, stack: StackFiles, stem: str) -> str:
    """The name of a new file of a stack: beside the old one, with the suffix of its variant (`_q4`)."""
    main = stack.main
    suffix = main.suffix if main.path.stem.endswith(main.suffix) else ""
    return (main.path.relative_to(root).parent / f"{stem}{suffix}.onnx").as_posix()


@dataclass(frozen=True)
class Cut:
    """Where the encoder inside a first step ends: the value, what the encoder takes, and what nothing else takes."""

    states: str
    inputs: tuple[str, ...]
    only: tuple[str, ...]


@dataclass
class Made:
    """The models of the new layout by file name, in the order in which they run, and what was changed.

    `replaces` are the files of the source that have no place beside them. `notes` tell what is left to the caller.
    `cut` says where an encoder was cut out of the graph of the first step. `room` says where weights may lie: decoders
    share a data file, the `encoder` has its own.
    """

    models: dict[str, ModelProto]
    replaces: tuple[str, ...]
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cut: Cut | None = None
    encoder: str | None = None
    room: Room = field(default_factory=Room)

    def write(self, root: Path, out: Path) -> None:
        """Write the models, which are used up; their weights lie below `root`.

        Raises:
            OSError: something cannot be read or written.
        """
        decoders = {name: model for name, model in self.models.items() if name != self.encoder}
        for group in ({self.encoder: self.models[self.encoder]} if self.encoder else {}, decoders):
            if group:
                write(group, root, out, self.room)


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion as the fix report lists it, beside repairs: it mends no finding, and keeps the numbers."""

    name: str
    summary: str
    advice: tuple[str, ...] = ()
    mends: tuple[str, ...] = ()
    keeps: Literal["bits"] = "bits"


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout that a stack can be given.

    `refuses` says why a stack cannot have it, None where it can; `make` makes it, and may raise `DoesNotFit` for what
    only the graphs show. `writes` are the stems of the decoder files that it may make.
    """

    name: str
    explains: str
    writes: tuple[str, ...]
    refuses: Callable[[StackFiles, CacheContract], str | None]
    make: Callable[[Source], Made]

    def conversion(self, made: Made) -> Conversion:
        """How the fix report lists that it was made."""
        documentation = importlib.import_module(self.refuses.__module__).__doc__ or ""
        return Conversion(f"layout {self.name}", documentation.partition("\n")[0], tuple(made.notes))


@cache
def load() -> tuple[Layout, ...]:
    """All layouts, by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return tuple(sorted((m.LAYOUT for m in modules if hasattr(m, "LAYOUT")), key=lambda layout: layout.name))
