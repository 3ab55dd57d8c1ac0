"""Which models the paths of a gate mean: patterns are expanded, and a folder of exports stands for each of them."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvdoctor.errors import UsageError
from kvdoctor.gating.policy.patterns import MAGIC, models_at
from kvdoctor.model.files import MODEL_SUFFIXES, candidates


def find_models(paths: Sequence[str]) -> tuple[str, ...]:
    """The models at the paths, each once, in their order.

    A pattern stands for what it matches, since not every shell expands it. A folder stands for the model in it and for
    the exports below it; one without any stays, and its report says what is missing.

    Raises:
        UsageError: a pattern matches no folder and no `.onnx` file, or a folder cannot be read.
    """
    try:
        expanded = [found for path in paths for found in _expand(path)]
        return tuple(dict.fromkeys(found for path in expanded for found in _find_below(path)))
    except OSError as error:
        raise UsageError(f"{error.filename!r} cannot be searched: {error.strerror or error}") from None


def export_folders(paths: Sequence[str]) -> tuple[str, ...]:
    """The folders of exports that contain the paths, each once, in the order of their first mention.

    A file stands for its folder: a list of the files that a commit changed has several files of one export.
    """
    folders = (path if not Path(path).is_file() else Path(path).parent.as_posix() for path in paths)
    return tuple(dict.fromkeys(folders))


def _expand(path: str) -> list[str]:
    """What a pattern matches; a path at which there is something, or without a pattern, is itself."""
    if not MAGIC & set(path) or os.path.lexists(path):
        return [path]
    anchor = Path(path).anchor
    below = path[len(anchor) :] if anchor else path
    folder = Path(anchor or ".")
    while below.startswith(("../", "..\\")):
        folder, below = folder / "..", below[3:]
    found = [(folder / name).as_posix() for name in models_at(folder, below.replace(os.sep, "/"))]
    if not found:
        raise UsageError(f"{path!r} matches no folder and no .onnx file")
    return found


def _find_below(path: str) -> Iterator[str]:
    """The path where it is a model, and the exports in the folders below it, links followed."""
    folder = Path(path)
    own = not folder.is_dir() or bool(candidates(folder)[1])
    if own:
        yield path
    found, seen = own, set[str]()
    for place, names, files in os.walk(path, onerror=_refuse, followlinks=True) if folder.is_dir() else ():
        names[:] = sorted(name for name in names if not name.startswith(".") and not (own and name == "onnx"))
        real = os.path.realpath(place)
        if real in seen:
            names.clear()  # a link back, or to what was found before
        elif place != path and any(Path(name).suffix in MODEL_SUFFIXES for name in files):
            found = True
            names.clear()  # what lies below an export belongs to it
            yield _name_export(Path(place)).as_posix()
        seen.add(real)
    if not found:
        yield path


def _refuse(error: OSError) -> None:
    raise error


def _name_export(folder: Path) -> Path:
    """A repository with its models in `onnx/` is named, not that folder: its configs lie beside it."""
    return folder.parent if folder.name == "onnx" else folder
