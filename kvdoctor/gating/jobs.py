"""What a gate is asked to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvdoctor.options import Options


@dataclass(frozen=True, slots=True)
class Job:
    """One model, as the user wrote its path, and what holds for it."""

    path: str
    options: Options


def exports_of(paths: Sequence[str]) -> tuple[str, ...]:
    """The exports that the paths lie in, each once, in the order in which they were first named.

    A file stands for its folder: who is given the files that a commit changed is given one export in several pieces.
    """
    folders = (path if not Path(path).is_file() else Path(path).parent.as_posix() for path in paths)
    return tuple(dict.fromkeys(folders))
