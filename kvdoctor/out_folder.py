"""Output appears whole or not at all: files and folders are made beside their place and renamed into it."""

import contextlib
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdoctor.errors import UsageError

MARK = "kvdoctor-report.json"
"""A folder that holds this file was written by kvdoctor, and may be replaced with `--force`."""


def write_whole(file: Path, content: str | bytes) -> None:
    """Write a file by renaming a finished one into its place.

    Raises:
        UsageError: the folder is not there or not writable, or the disk is full.
    """
    partial = file.with_name(f".{file.name}.kvdoctor-{os.getpid()}.partial")
    try:
        partial.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        partial.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise UsageError(f"cannot write {str(file)!r}: {error.strerror or error}") from None


def refuse_unfit(out: Path, source: Path, force: bool) -> None:
    """Refuse an OUT that must not be written, before any work is done.

    Raises:
        UsageError: OUT exists, lies in the model's folder or holds it, or cannot be made.
    """
    mine, model = out.resolve(), source.resolve()
    folder = model if model.is_dir() else model.parent
    if mine in (model, folder) or folder in mine.parents:
        raise UsageError(
            f"OUT {str(out)!r} lies in the folder of the model, which is never changed; give another folder"
        )
    if mine in model.parents:
        raise UsageError(f"OUT {str(out)!r} holds the model itself; give another folder")
    if not mine.parent.is_dir():
        raise UsageError(f"the folder {str(out.parent)!r} for OUT does not exist; make it first")
    if os.path.lexists(out):
        if not force:
            raise UsageError(
                f"OUT {str(out)!r} exists; give a new folder, or --force to replace one that kvdoctor wrote"
            )
        if out.is_symlink() or not (out / MARK).is_file():
            raise UsageError(f"OUT {str(out)!r} was not written by kvdoctor, so --force does not replace it")
    if not os.access(mine.parent, os.W_OK):
        raise UsageError(f"the folder {str(out.parent)!r} is not writable; give OUT in one that is")


@dataclass
class Pending:
    """A folder that becomes OUT when it is `kept`."""

    path: Path
    kept: bool = False


@contextlib.contextmanager
def whole_folder(out: Path) -> Iterator[Pending]:
    """Give a folder to fill. When the block ends well and it was kept, it is renamed to OUT; else nothing is left.

    Raises:
        UsageError: the folder cannot be made or filled; the message says why.
    """
    pending = Pending(out.with_name(f".{out.name}.kvdoctor-{os.getpid()}.partial"))
    _sweep(out)
    try:
        pending.path.mkdir()
        yield pending
        if pending.kept:
            _put(pending.path, out)
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


def _put(partial: Path, out: Path) -> None:
    if not out.exists():
        partial.rename(out)
        return
    old = out.with_name(f".{out.name}.kvdoctor-{os.getpid()}.old")
    out.rename(old)
    partial.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def _sweep(out: Path) -> None:
    """Remove what a killed run of kvdoctor left beside OUT."""
    import psutil

    for left in out.parent.glob(f".{_literal(out.name)}.kvdoctor-*.partial"):
        owner = left.name.split("-")[-1].partition(".")[0]
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(left, ignore_errors=True)


def _literal(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
