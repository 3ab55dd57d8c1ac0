"""The input of a gate: models with their options, and the settings of the run."""

from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from pathlib import Path
from typing import Literal

from kvdoctor.options import Options
from kvdoctor.records import record


@record
class GateJob:
    """A model, by its path as the user wrote it, and its options. `at` is its location where that path is not valid.

    `reads` are absolute paths with the models of the gate, which a worker may read from its start.
    """

    path: str
    options: Options
    at: Path | None = None
    reads: tuple[str, ...] = ()

    @property
    def location(self) -> Path:
        """The path to open the model by."""
        return self.at or Path(self.path)


WORKERS_LOST = "workers_lost"
"""Under `measured`: how many worker processes ended during a diagnosis."""


class ProcessLost(BrokenExecutor):
    """The process of a job ended before it answered; the text says how. Another process may succeed."""


class NoWorkerLeft(BrokenExecutor):
    """No process is left that could run a job; the text says why."""


@record
class GateSettings:
    """How jobs are run. No setting changes the content of a report.

    Attributes:
        jobs: the number of models that run side by side; None for as many as cores and memory allow.
        cache: the folder for reports; None for no cache.
        cache_bytes: the size of the folder.
        cluster: the address of a Dask scheduler.
        progress: called with a line of progress.
        ended: called with a line about each model that has ended.
    """

    jobs: int | None = None
    cache: Path | None = None
    cache_bytes: int = 512 << 20
    cluster: str | None = None
    progress: Callable[[str], None] | None = None
    ended: Callable[[str], None] | None = None


@record
class LeftOut:
    """A path that a gate was given or found, and did not check."""

    path: str
    reason: Literal["excluded", "no model"]
