"""What a gate is asked to do, and how."""

from collections.abc import Callable, Sequence
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from pathlib import Path

from kvdoctor.options import Options


@dataclass(frozen=True, slots=True)
class Job:
    """One model, as the user wrote its path, and what holds for it. `at` is where it lies, when that is elsewhere."""

    path: str
    options: Options
    at: Path | None = None

    @property
    def place(self) -> Path:
        """Where the model lies."""
        return self.at or Path(self.path)


class Lost(BrokenExecutor):
    """The process that ran a job ended before it answered; the text says how. Another may fare better."""


class Gone(BrokenExecutor):
    """There is nothing left that could run a job; the text says why."""


@dataclass(frozen=True, slots=True)
class How:
    """How the jobs are run; nothing here changes what a report says.

    `jobs` is how many run side by side, None for what the machine has room for. `cache` is the folder in which
    reports are kept, None for no cache. `cluster` is the address of a Dask scheduler. `told` is shown what goes on.
    """

    jobs: int | None = None
    cache: Path | None = None
    cluster: str | None = None
    told: Callable[[str], None] | None = None


def exports_of(paths: Sequence[str]) -> tuple[str, ...]:
    """The exports that the paths lie in, each once, in the order in which they were first named.

    A file stands for its folder: who is given the files that a commit changed is given one export in several pieces.
    """
    folders = (path if not Path(path).is_file() else Path(path).parent.as_posix() for path in paths)
    return tuple(dict.fromkeys(folders))
