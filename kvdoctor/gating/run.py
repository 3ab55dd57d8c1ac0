"""Runs a gate: unchanged models are answered from the cache, the others run side by side or on a cluster."""

import contextlib
import gc
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvdoctor.gating.baseline import Baseline, today
from kvdoctor.gating.baseline_match import match_baseline
from kvdoctor.gating.cache import Cache
from kvdoctor.gating.capacity import free_memory, memory_needed, parallel_models
from kvdoctor.gating.jobs import GateJob, GateSettings, NoWorkerLeft, ProcessLost
from kvdoctor.gating.verdict import GateResult, judge
from kvdoctor.model.files import refuse_nothing
from kvdoctor.report.document import Report

MAX_LOSSES = 2
"""A model whose process was lost this many times is not run again."""
WAIT_SECONDS = 0.5
"""On Windows, Ctrl-C is noticed between two waits only."""


def gate(
    jobs: Sequence[GateJob],
    settings: GateSettings | None = None,
    *,
    static: bool = False,
    baseline: Baseline | None = None,
) -> GateResult:
    """Diagnose models and judge them together.

    Args:
        jobs: the models, each with its options.
        settings: how to run them; by default as many side by side as the machine allows, without a cache.
        static: inspect the models only; none is run.
        baseline: known findings; they do not count until they expire.

    Raises:
        UsageError: a path does not exist.
        KvdoctorError: the worker cannot start ONNX Runtime, or the cluster cannot be used.
    """
    if static:
        from kvdoctor.gating.diagnose_job import inspect_job

        reports = [inspect_job(job) for job in jobs]
    else:
        reports = diagnose_all(jobs, settings or GateSettings())
    if baseline is None:
        return judge(jobs, reports)
    matched = match_baseline(baseline, reports, today())
    return replace(judge(jobs, matched.reports), baseline=matched.status)


def diagnose_all(jobs: Sequence[GateJob], settings: GateSettings) -> list[Report]:
    """The report of each job, in the order of the jobs.

    Raises:
        UsageError: a path does not exist.
        KvdoctorError: the worker cannot start ONNX Runtime, or the cluster cannot be used.
    """
    for job in jobs:
        refuse_nothing(job.path, job.location)
    if len(jobs) > 1 or settings.cluster is not None:
        # The progress of one model's experiments is confusing beside others, and cannot be pickled.
        jobs = [replace(job, options=replace(job.options, progress=None)) for job in jobs]
    cache = Cache(settings.cache, remote=settings.cluster is not None) if settings.cache is not None else None
    keys = [None if cache is None else cache.key(job) for job in jobs]
    with _no_collection():
        cached = [None if cache is None else cache.find(key, job) for key, job in zip(keys, jobs, strict=True)]
    reports = {index: report for index, report in enumerate(cached) if report is not None}
    progress = _Progress(settings, len(jobs), len(reports))
    changed = {index: job for index, job in enumerate(jobs) if index not in reports}
    try:
        with contextlib.closing(_run(changed, settings)) as results:
            for index, report in results:
                reports[index] = report
                progress.count(jobs[index])
                if cache is not None:
                    cache.keep(keys[index], jobs[index], report)
    finally:
        if cache is not None:
            cache.close()
    return [reports[index] for index in range(len(jobs))]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Pause the garbage collector: reports are many small objects without cycles, and scanning takes a third of it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _make_absolute(job: GateJob) -> GateJob:
    """The job with paths that hold in any working folder."""
    against = job.options.against
    kept = None if against is None else str(Path(against).absolute())
    return replace(job, at=job.location.absolute(), options=replace(job.options, against=kept))


def _run(jobs: dict[int, GateJob], settings: GateSettings) -> Generator[tuple[int, Report], None, None]:
    """The reports as they arrive, with the numbers of their jobs."""
    if not jobs:
        return
    # Imported late: if nothing has changed, the code that reads graphs is not loaded.
    from kvdoctor.gating.diagnose_job import diagnose_job, release_runtime

    if settings.cluster is not None:
        from kvdoctor.gating.cluster import Cluster

        jobs = {index: _make_absolute(job) for index, job in jobs.items()}
        with Cluster(settings.cluster) as cluster:
            yield from _stream(cluster, jobs, _Budget(None))
    elif len(jobs) == 1:
        ((index, job),) = jobs.items()
        try:
            yield index, diagnose_job(job)
        finally:
            release_runtime()
    else:
        from kvdoctor.gating.process_pool import ProcessPool

        limits = [job.options.limits.max_memory for job in jobs.values()]
        largest = max((limit for limit in limits if limit is not None), default=None)
        count = parallel_models(settings.jobs, len(jobs), largest)
        with ProcessPool(count) as pool:
            yield from _stream(pool, jobs, _Budget(count))


def _stream(executor: Executor, jobs: dict[int, GateJob], budget: "_Budget") -> Iterator[tuple[int, Report]]:
    """Submit the jobs as far as the budget allows. A job whose process was lost is submitted again."""
    from kvdoctor.gating.diagnose_job import diagnose_job, report_lost_process, report_not_diagnosed

    waiting, losses = list(jobs), dict.fromkeys(jobs, 0)
    running: dict[Future[Report], int] = {}
    while waiting or running:
        for index in list(waiting):
            if not budget.admit(index, jobs[index], alone=losses[index] > 0):
                continue
            waiting.remove(index)
            running[executor.submit(diagnose_job, jobs[index])] = index
        for future in wait(running, WAIT_SECONDS, FIRST_COMPLETED).done:
            index = running.pop(future)
            budget.release(index)
            try:
                yield index, future.result()
            except NoWorkerLeft as reason:
                yield index, report_not_diagnosed(jobs[index], str(reason))
            except ProcessLost as loss:
                losses[index] += 1
                if losses[index] == MAX_LOSSES:
                    yield index, report_lost_process(jobs[index], str(loss), MAX_LOSSES)
                else:
                    waiting.append(index)


@dataclass
class _Budget:
    """How many jobs may run at once (None: no limit, on a cluster), and the bytes of memory for all of them."""

    count: int | None
    memory: int = field(default_factory=free_memory)
    taken: dict[int, int] = field(default_factory=dict)

    def admit(self, index: int, job: GateJob, alone: bool) -> bool:
        """Count a job if it may start now. A job that does not fit beside others runs alone."""
        if self.count is None:
            return True
        if len(self.taken) >= self.count:
            return False
        needed = self.memory if alone else memory_needed(job.location, job.options.limits.max_memory)
        if self.taken and sum(self.taken.values()) + needed > self.memory:
            return False
        self.taken[index] = needed
        return True

    def release(self, index: int) -> None:
        """Return the memory of a job that has ended."""
        self.taken.pop(index, None)


@dataclass
class _Progress:
    """Reports the number of models done, where there are several."""

    settings: GateSettings
    models: int
    cached: int
    finished: int = 0

    def __post_init__(self) -> None:
        self._report("")

    def count(self, job: GateJob) -> None:
        """Count a report that arrived."""
        self.finished += 1
        self._report(f"; last {job.path}")

    def _report(self, last: str) -> None:
        if self.settings.progress is not None and self.models > 1:
            cached = f", {self.cached} of them unchanged" if self.cached else ""
            self.settings.progress(f"{self.cached + self.finished} of {self.models} models{cached}{last}")
