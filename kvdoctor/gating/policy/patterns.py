"""Patterns of a policy: which paths below its folder they match.

`*`, `?` and `[...]` match within one part of a path, `**` matches any number of folders. Names that begin with a dot
are matched by patterns that have the dot. `**` does not follow links to folders, so that it meets no loop of links.
"""

import functools
import os
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

MAGIC = frozenset("*?[")
DEEP = "**"


def parts_of(pattern: str) -> tuple[str, ...]:
    """Return the parts of a pattern or a path; none of them is `.` or empty."""
    return tuple(part for part in PurePosixPath(pattern).parts if part != ".")


def leads_out(pattern: str) -> bool:
    """Return whether a pattern leaves the folder of the policy."""
    return Path(pattern).is_absolute() or PurePosixPath(pattern).is_absolute() or ".." in parts_of(pattern)


def fits(path: str, pattern: str) -> bool:
    """Return whether a pattern matches a path, or a folder that contains the path."""
    parts, wanted = parts_of(path), _once(parts_of(pattern))
    return any(_match(parts[:stop], wanted) for stop in range(len(parts) + 1))


def models_at(folder: Path, pattern: str) -> list[str]:
    """Return the models below a folder that a pattern matches, in order: folders, and files that are named `.onnx`.

    A pattern that ends in `**` matches every folder at any depth that holds an `.onnx` file itself.

    Raises:
        OSError: a folder cannot be read.
    """
    wanted = _once(parts_of(pattern))
    found = sorted({path.as_posix() for path in _expanded(folder, PurePosixPath(), wanted, set())})
    if wanted and wanted[-1] == DEEP:
        return [path for path in found if any(name.endswith(".onnx") for name in _names(folder / path))]
    return [path for path in found if not _has_magic(wanted[-1:]) or _is_model(folder / path)]


def _once(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pattern with one `**` in place of several in a row."""
    return tuple(part for at, part in enumerate(wanted) if part != DEEP or wanted[at - 1 : at] != (DEEP,))


@functools.cache
def _match(parts: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == DEEP:
        return _match(parts, wanted[1:]) or (bool(parts) and _match(parts[1:], wanted))
    return bool(parts) and fnmatch(parts[0], wanted[0]) and _match(parts[1:], wanted[1:])


def _expanded(
    folder: Path, path: PurePosixPath, wanted: tuple[str, ...], seen: set[tuple[PurePosixPath, int]]
) -> Iterator[PurePosixPath]:
    """Yield the paths that match; no folder is searched twice for the same rest of a pattern."""
    if (path, len(wanted)) in seen:
        return
    seen.add((path, len(wanted)))
    if not wanted:
        yield path
    elif wanted[0] == DEEP:
        yield from _expanded(folder, path, wanted[1:], seen)
        for name in _names(folder / path):
            below = folder / path / name
            if not name.startswith(".") and below.is_dir() and not below.is_symlink():
                yield from _expanded(folder, path / name, wanted, seen)
    elif not _has_magic(wanted[:1]):
        if os.path.lexists(folder / path / wanted[0]):
            yield from _expanded(folder, path / wanted[0], wanted[1:], seen)
    else:
        for name in _names(folder / path):
            if fnmatch(name, wanted[0]) and (not name.startswith(".") or wanted[0].startswith(".")):
                yield from _expanded(folder, path / name, wanted[1:], seen)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _has_magic(parts: tuple[str, ...]) -> bool:
    return any(MAGIC & set(part) for part in parts)


def _is_model(path: Path) -> bool:
    return path.is_dir() or path.suffix == ".onnx"
