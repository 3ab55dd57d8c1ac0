"""Where the models of a gate are run: those that are not known already, side by side or on a cluster."""

import contextlib
import gc
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace

from kvdoctor.gating import capacity
from kvdoctor.gating.cache import Cache
from kvdoctor.gating.jobs import Gone, How, Job, Lost
from kvdoctor.listing import refuse_nothing
from kvdoctor.report.document import Report

MOST_LOSSES = 2
"""A model whose process was lost so often is not given to another."""


def diagnosed(jobs: Sequence[Job], how: How) -> list[Report]:
    """The report of each job, in the order of the jobs.

    Raises:
        UsageError: there is nothing at one of the paths.
        KvdoctorError: the worker cannot start ONNX Runtime, or the cluster cannot be used.
    """
    for job in jobs:
        refuse_nothing(job.path, job.place)
    if len(jobs) > 1 or how.cluster is not None:
        # What is told of the experiments of one model means nothing where several run, and does not travel.
        jobs = [replace(job, options=replace(job.options, progress=None)) for job in jobs]
    cache = Cache(how.cache, elsewhere=how.cluster is not None) if how.cache is not None else None
    keys = [None if cache is None else cache.key(job) for job in jobs]
    with _no_collection():
        kept = [None if cache is None else cache.find(key, job) for key, job in zip(keys, jobs, strict=True)]
    found = {index: report for index, report in enumerate(kept) if report is not None}
    tally = _Tally(how, len(jobs), len(found))
    left = {index: job for index, job in enumerate(jobs) if index not in found}
    try:
        with contextlib.closing(_run(left, how)) as reports:
            for index, report in reports:
                found[index] = report
                tally.count(jobs[index])
                if cache is not None:
                    cache.keep(keys[index], jobs[index], report)
    finally:
        if cache is not None:
            cache.close()
    return [found[index] for index in range(len(jobs))]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Reports are many small objects, none of them in a circle: looking for circles takes a third of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _run(jobs: dict[int, Job], how: How) -> Generator[tuple[int, Report], None, None]:
    """The reports as they come, with the numbers of their jobs."""
    if not jobs:
        return
    # Loaded here: where nothing has changed, nobody waits for what reads graphs.
    from kvdoctor.gating.diagnosing import diagnose, release

    if how.cluster is not None:
        from kvdoctor.gating.cluster import Cluster

        jobs = {index: replace(job, at=job.place.absolute()) for index, job in jobs.items()}
        with Cluster(how.cluster) as cluster:
            yield from _streamed(cluster, jobs, _Budget(None))
    elif len(jobs) == 1:
        ((index, job),) = jobs.items()
        try:
            yield index, diagnose(job)
        finally:
            release()
    else:
        from kvdoctor.gating.slots import Slots

        most = [job.options.limits.max_memory for job in jobs.values()]
        largest = max((limit for limit in most if limit is not None), default=None)
        count = capacity.side_by_side(how.jobs, len(jobs), largest)
        with Slots(count) as slots:
            yield from _streamed(slots, jobs, _Budget(count))


def _streamed(executor: Executor, jobs: dict[int, Job], budget: "_Budget") -> Iterator[tuple[int, Report]]:
    """Hand out the jobs, each again where the process that ran it was lost, as far as the budget goes."""
    from kvdoctor.gating.diagnosing import diagnose
    from kvdoctor.gating.lost import died, not_diagnosed

    waiting, losses = list(jobs), dict.fromkeys(jobs, 0)
    running: dict[Future[Report], int] = {}
    while waiting or running:
        for index in list(waiting):
            if not budget.takes(index, jobs[index], alone=losses[index] > 0):
                continue
            waiting.remove(index)
            running[executor.submit(diagnose, jobs[index])] = index
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            index = running.pop(future)
            budget.gives_back(index)
            try:
                yield index, future.result()
            except Gone as end:
                yield index, not_diagnosed(jobs[index], str(end))
            except Lost as loss:
                losses[index] += 1
                if losses[index] == MOST_LOSSES:
                    yield index, died(jobs[index], str(loss), MOST_LOSSES)
                else:
                    waiting.append(index)


@dataclass
class _Budget:
    """How many jobs run at once, and how much memory they may take together; None is for someone else's machines."""

    count: int | None
    memory: int = field(default_factory=capacity.memory)
    taken: dict[int, int] = field(default_factory=dict)

    def takes(self, index: int, job: Job, alone: bool) -> bool:
        """Whether a job may start now; then it is counted. One that does not fit beside others runs alone."""
        if self.count is None:
            return True
        if len(self.taken) >= self.count:
            return False
        needed = self.memory if alone else capacity.needed(job.place, job.options.limits.max_memory)
        if self.taken and sum(self.taken.values()) + needed > self.memory:
            return False
        self.taken[index] = needed
        return True

    def gives_back(self, index: int) -> None:
        """A job has ended."""
        self.taken.pop(index, None)


@dataclass
class _Tally:
    """What whoever waits is told."""

    how: How
    models: int
    kept: int
    came: int = 0

    def __post_init__(self) -> None:
        self._tell("")

    def count(self, job: Job) -> None:
        """A report came."""
        self.came += 1
        self._tell(f"; last {job.path}")

    def _tell(self, last: str) -> None:
        if self.how.told is not None and self.models > 1:
            kept = f", {self.kept} of them unchanged" if self.kept else ""
            self.how.told(f"{self.kept + self.came} of {self.models} models{kept}{last}")
