"""Output appears whole or not at all: files and folders are made next to their place and renamed into it.

A changed model is small and is serialized; the weights that were left out of it go from file to file without being
held. Around each payload the lengths of the messages are counted anew, as protobuf wants them.
"""

import contextlib
import glob
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from kvdoctor.decode.side_files import read_side_file
from kvdoctor.errors import UsageError
from kvdoctor.model.external_data import read_reference
from kvdoctor.model.proto import ModelProto, TensorProto
from kvdoctor.model.skeleton import LEN, MAX_FILE, NESTED, PLAIN_TAGS, FileWindow, encode_varint
from kvdoctor.records import record

MARK = "kvdoctor-report.json"
"""The fix report: a folder that holds one was written by kvdoctor, and may be replaced with `--force`."""

REPRO_MARK = "reproducer.json"
"""The same for a reproducer."""

LOOP_MARK = "kvdoctor-loop.json"
"""The same for a decode loop."""
MOST_BYTES = 256 << 20


def write_whole(file: Path, content: str | bytes | Iterable[str]) -> None:
    """Write a file by renaming a finished one into its place; a link is followed, a pipe or device written to.

    A text is written as UTF-8; of several, each is made when it is written, and what fails in making one is raised.

    Raises:
        UsageError: the folder is not there or not writable, or the disk is full.
    """
    place, making = Path(os.path.realpath(file)), False
    partial = place.with_name(f".{place.name}.kvdoctor-{os.getpid()}.partial")
    try:
        is_stream = place.exists() and not place.is_file()
        with (place if is_stream else partial).open("wb") as stream:
            making = True
            for part in [content] if isinstance(content, str | bytes) else content:
                making = False
                stream.write(part.encode("utf-8") if isinstance(part, str) else part)
                making = True
            making = False
        if not is_stream:
            partial.replace(place)
    except OSError as error:
        if making:
            raise
        raise UsageError(f"cannot write {str(file)!r}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def refuse_unfit(out: Path, source: Path, force: bool) -> None:
    """Refuse an OUT that must not be written, before any work is done.

    Raises:
        UsageError: OUT exists, lies in the model's folder or holds it, or cannot be made.
    """
    mine, model = out.resolve(), source.resolve()
    given = Path(os.path.abspath(source))  # noqa: PTH100 - links are not to be followed: a hub cache is full of them
    folders = {path if path.is_dir() else path.parent for path in (model, given, given.resolve())}
    if mine == model or folders & {mine, *mine.parents}:
        raise UsageError(
            f"OUT {str(out)!r} lies in the folder of the model, which is never changed; give another folder"
        )
    if mine in model.parents:
        raise UsageError(f"OUT {str(out)!r} holds the model itself; give another folder")
    if mine in (here := Path.cwd().resolve(), *here.parents):
        raise UsageError(f"OUT {str(out)!r} is the folder that you are in, or holds it; call from outside of it")
    if not mine.parent.is_dir():
        raise UsageError(f"the folder {str(out.parent)!r} for OUT does not exist; make it first")
    if os.path.lexists(out):
        if not force:
            raise UsageError(
                f"OUT {str(out)!r} exists; give a new folder, or --force to replace one that kvdoctor wrote"
            )
        if out.is_symlink() or not _is_ours(out):
            raise UsageError(f"OUT {str(out)!r} was not written by kvdoctor, so --force does not replace it")
        if (foreign := _foreign(out)) is not None:
            raise UsageError(
                f"OUT {str(out)!r} holds {foreign!r}, which was added or changed since kvdoctor wrote the folder; "
                "move it away, or give another folder"
            )
    if not os.access(mine.parent, os.W_OK):
        raise UsageError(f"the folder {str(out.parent)!r} is not writable; give OUT in one that is")


@dataclass(eq=False, repr=False)
class Pending:
    """A folder that becomes OUT when `kept` is set."""

    path: Path
    kept: bool = False


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Pending]:
    """Give a folder to fill. When the block ends well and it was marked, it is renamed to OUT; else nothing is left.

    Raises:
        UsageError: the folder cannot be made or filled; the message says why.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 - "." has no name, and a link must stay one
    pending = Pending(out.with_name(f".{out.name}.kvdoctor-{os.getpid()}.partial"))
    _sweep(out)
    replaces = os.path.lexists(out)
    try:
        pending.path.mkdir()
        yield pending
        if pending.kept:
            _put(pending.path, out, replaces)
    except OSError as error:
        raise UsageError(f"cannot write {str(out)!r}: {error.strerror or error}; nothing was left there") from None
    finally:
        shutil.rmtree(pending.path, ignore_errors=True)


def copy_whole(source: Path, target: Path) -> None:
    """Copy the content of a regular file, a link followed; never a hard or symbolic link.

    The kernel may share the blocks until one side changes (a reflink), which onnx does not object to.

    Raises:
        OSError: it cannot be read or written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with source.open("rb") as reader, target.open("xb") as writer:
        copy_range = getattr(os, "copy_file_range", None)
        with contextlib.suppress(OSError):
            while copy_range and copy_range(reader.fileno(), writer.fileno(), 1 << 30):
                pass
        # What the kernel did not copy (another file system, another platform) is copied from where it stopped.
        done = os.fstat(writer.fileno()).st_size
        reader.seek(done)
        writer.seek(done)
        shutil.copyfileobj(reader, writer, 1 << 20)


def regular_files(folder: Path) -> Iterator[Path]:
    """Files below a folder, links to files included; hidden folders and links to folders are left out."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            with contextlib.suppress(OSError):
                if stat.S_ISREG(path.stat().st_mode):
                    yield path


def _is_ours(out: Path) -> bool:
    """Whether a folder holds the fix report of a repair that was written there, a reproducer, or a decode loop."""
    try:
        if (out / REPRO_MARK).is_file():
            reproducer = json.loads((out / REPRO_MARK).read_text(encoding="utf-8"))
            return bool(reproducer["tool"]["name"] == "kvdoctor" and reproducer["schema"].startswith("kvdoctor/repro/"))
        if (out / LOOP_MARK).is_file():
            written = json.loads((out / LOOP_MARK).read_text(encoding="utf-8"))
            return bool(written["schema"].startswith("kvdoctor/loop/") and written["sha256"])
        report = json.loads(read_side_file(out / MARK, MOST_BYTES))
        return bool(report["command"] in ("re-export", "convert") and report["repair"]["out"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


BUILT = ("target", "node_modules", "build", "dist", "bin", "obj", ".venv", "__pycache__")
"""Folders that the tools of a language make in the project of a loop; they can be made again."""
LOCKED = ("Cargo.lock", "package-lock.json", "uv.lock", "decode", "decode.exe")
"""Files that they make."""


def _foreign_in_loop(out: Path) -> str | None:
    """A file of a written loop that the user changed or added: a program is the user's as soon as they work on it."""
    written = json.loads((out / LOOP_MARK).read_text(encoding="utf-8"))["sha256"]
    known = {LOOP_MARK, *LOCKED}
    for path in sorted(out.rglob("*")):
        name = path.relative_to(out)
        if name.parts[0] in BUILT or "__pycache__" in name.parts or (path.is_dir() and not path.is_symlink()):
            continue
        if name.as_posix() in written and not path.is_symlink():
            if hashlib.sha256(path.read_bytes()).hexdigest() != written[name.as_posix()]:
                return name.as_posix()
        elif name.as_posix() not in known:
            return name.as_posix()
    return None


def _foreign(out: Path) -> str | None:
    """A file in a folder of ours that is not ours. A reproducer, and reports of older versions, list no files."""
    if (out / LOOP_MARK).is_file():
        return _foreign_in_loop(out)
    try:
        contents = set(json.loads(read_side_file(out / MARK, MOST_BYTES))["repair"]["contents"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    there = (path.relative_to(out).as_posix() for path in out.rglob("*") if not path.is_dir() or path.is_symlink())
    return next((name for name in sorted(there) if name not in contents), None)


def _put(partial: Path, out: Path, replaces: bool) -> None:
    if not replaces:
        if os.path.lexists(out):
            raise UsageError(f"OUT {str(out)!r} was written by another run meanwhile; give another folder")
        partial.rename(out)
        return
    old = out.with_name(f".{out.name}.kvdoctor-{os.getpid()}.old")
    out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _sweep(out: Path) -> None:
    """Tidy up what a killed run left next to OUT: remove unfinished folders, put back a folder that it had moved."""
    for kind in ("old", "partial"):
        for left in out.parent.glob(f".{glob.escape(out.name)}.kvdoctor-*.{kind}"):
            import psutil  # hardly any run finds one

            owner = left.name.split("-")[-1].partition(".")[0]
            if not owner.isdigit() or psutil.pid_exists(int(owner)):
                continue
            if kind == "old" and not os.path.lexists(out) and _is_ours(left):
                left.rename(out)
            else:
                shutil.rmtree(left, ignore_errors=True)


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
        reference = read_reference(tensor)
        if reference is None or os.fsencode(reference.location) != self.location:
            return [content]
        span = SourceBytes(reference.offset, reference.length)
        if span.start + span.length > self.weights.size:
            raise UsageError(f"the weights of {tensor.name!r} are no longer where they were; was the model changed?")
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
