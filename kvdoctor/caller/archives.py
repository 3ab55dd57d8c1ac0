"""Traces as one .npz for each step, in a folder or a zip: `fed/NAME` and `got/NAME` are the arrays. numpy only.

Headers are read at once and values when they are asked for. Nothing is unpacked to disk, and nothing is unpickled.
"""

import functools
import io
import math
import re
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NoReturn

import numpy as np

from kvdoctor.caller.recorded import Recorded, TraceStep, onnx_dtype
from kvdoctor.calls import Array
from kvdoctor.errors import UsageError

MOST_TENSOR = 2 << 30
MOST_ARCHIVE = 2 << 30
MOST_ARRAYS = 8192
MOST_FILES = 20_000
NUMBER = re.compile(r"(\d+)\D*$")
KEYS = "save the arrays under fed/NAME and got/NAME with np.savez; docs/trace.md shows how"
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError, NotImplementedError, KeyError)
"""What numpy and zipfile raise for archives that are damaged, encrypted, or packed in an unknown way."""


def folder_steps(folder: Path) -> Iterator[TraceStep]:
    """One step for each .npz of a folder, by the last number in its name.

    Raises:
        UsageError: there is none, or one of them is no archive of arrays.
    """
    files = {path.name: path for path in sorted(folder.glob("*.npz")) if path.is_file()}
    if not files:
        raise UsageError(f"{str(folder)!r} holds no .npz; a trace is one .npz for each step, or a file of JSON lines")
    for number, name in enumerate(_in_order(tuple(files), str(folder))):
        yield _step(_Archive(files[name]), number, name, f"{str(folder)!r}, {name!r}")


def zip_steps(path: Path) -> Iterator[TraceStep]:
    """One step for each .npz in a zip; a .npz is itself a zip, of one step.

    Raises:
        UsageError: it is no zip, holds no .npz, or one of them is no archive of arrays.
    """
    try:
        with zipfile.ZipFile(path) as opened:
            entries = {e.filename: e for e in opened.infolist() if not e.filename.startswith("__MACOSX/")}
    except DAMAGE as error:
        raise UsageError(f"{str(path)!r} is no readable zip: {error}"[:300]) from None
    if entries and all(name.endswith(".npy") for name in entries):
        yield _step(_Archive(path), 0, path.name, repr(str(path)))
        return
    inner = {name: entry for name, entry in entries.items() if name.endswith(".npz")}
    if not inner:
        raise UsageError(f"{str(path)!r} holds no .npz; a trace is one .npz for each step")
    for number, name in enumerate(_in_order(tuple(inner), str(path))):
        where = f"{str(path)!r}, {name[:200]!r}"
        if inner[name].file_size > MOST_ARCHIVE:
            raise UsageError(f"{where} is larger than 2 GiB; give a folder of .npz files instead")
        yield _step(_Archive(path, name), number, name, where)


def _in_order(names: tuple[str, ...], where: str) -> list[str]:
    if len(names) > MOST_FILES:
        raise UsageError(f"{where!r} holds more than {MOST_FILES} files; give the steps up to the failure")
    numbered: dict[int, str] = {}
    for name in names:
        found = NUMBER.search(Path(name).stem[-200:])
        if found is None:
            raise UsageError(f"{where!r}, {name[:200]!r}: name the files by their step, such as step_0.npz")
        if int(found[1]) in numbered:
            raise UsageError(f"{where!r}: {name[:200]!r} and {numbered[int(found[1])][:200]!r} are the same step")
        numbered[int(found[1])] = name
    return [numbered[number] for number in sorted(numbered)]


class _Archive:
    """One .npz, on disk or inside a zip."""

    def __init__(self, path: Path, inner: str | None = None) -> None:
        self.path, self.inner = path, inner

    def open(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.path if self.inner is None else io.BytesIO(_unpacked(self.path, self.inner)))


@functools.lru_cache(maxsize=3)
def _unpacked(path: Path, inner: str) -> bytes:
    """An archive out of a zip: the steps that are looked at together stay in memory, others do not."""
    with zipfile.ZipFile(path) as outer, outer.open(inner) as stream:
        content = stream.read(MOST_ARCHIVE + 1)
    if len(content) > MOST_ARCHIVE:
        raise ValueError("it is larger than it says")
    return content


def _step(archive: _Archive, number: int, place: str, where: str) -> TraceStep:
    sides: dict[str, dict[str, Recorded]] = {"fed": {}, "got": {}}
    try:
        with archive.open() as opened:
            for entry, side, name in _entries(opened, where):
                if name in sides[side]:
                    _refuse(f"{where} has {side}/{name[:200]!r} twice; {KEYS}")
                sides[side][name] = _recorded(archive, opened, entry, f"{where}, {side}/{name[:200]!r}")
    except UsageError:
        raise
    except DAMAGE as error:
        raise UsageError(f"{where} is no readable .npz: {error}"[:400] + f"; {KEYS}") from None
    if not sides["fed"]:
        raise UsageError(f"{where} says nothing of what was fed; {KEYS}")
    return TraceStep(number, place, sides["fed"], sides["got"])


def _entries(opened: zipfile.ZipFile, where: str) -> Iterator[tuple[zipfile.ZipInfo, str, str]]:
    """The arrays of a step: entry, side (fed or got), name."""
    entries = opened.infolist()
    if len(entries) > MOST_ARRAYS:
        _refuse(f"{where} holds more than {MOST_ARRAYS} arrays; {KEYS}")
    for entry in entries:
        side, _, name = entry.filename.removesuffix(".npy").partition("/")
        if side not in ("fed", "got") or not name or not entry.filename.endswith(".npy"):
            _refuse(f"{where} has an entry {entry.filename[:200]!r}; {KEYS}")
        yield entry, side, name


def _refuse(text: str) -> NoReturn:
    raise UsageError(text)


def _recorded(archive: _Archive, opened: zipfile.ZipFile, entry: zipfile.ZipInfo, where: str) -> Recorded:
    """The header of one array, which must account for every byte of the entry."""
    with opened.open(entry) as stream:
        shape, dtype, start = _header(stream, where)
    if dtype.hasobject:
        raise UsageError(f"{where} holds Python objects, which are never unpickled; save arrays of numbers")
    raw = dtype.kind == "V" and dtype.itemsize == 2 and not dtype.names
    word = "bfloat16" if raw else onnx_dtype(dtype.name)
    if word is None or word == "string" or dtype.subdtype is not None:
        raise UsageError(f"{where} has element type {str(dtype)[:60]!r}, which no decoder takes; save numbers")
    size = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0:
        raise UsageError(f"{where} has an axis of size {min(shape)}; save it again")
    if size > MOST_TENSOR:
        raise UsageError(f"{where} is larger than 2 GiB; leave it out, or give its shape in JSON lines")
    if start + size != entry.file_size:
        raise UsageError(f"{where} has {entry.file_size} bytes where its header says {start + size}; save it again")
    return Recorded(word, shape, None if raw else functools.partial(_values, archive, entry.filename, where))


def _header(stream: IO[bytes], where: str) -> tuple[tuple[int, ...], "np.dtype[Any]", int]:
    """Shape, element type and length in bytes of a header."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise UsageError(f"{where} is written in format {version}, which numbers do not need; save it with np.savez")
    return shape, dtype, stream.tell()


def _values(archive: _Archive, entry: str, where: str) -> Array:
    try:
        with archive.open() as opened, opened.open(entry) as stream:
            values: Array = np.lib.format.read_array(stream, allow_pickle=False)
    except DAMAGE as error:
        raise UsageError(f"{where} cannot be read: {error}"[:300] + "; save the trace again") from None
    return values
