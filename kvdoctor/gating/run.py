"""Runs a gate: unchanged models are answered from the cache, the others run side by side or on a cluster."""

import contextlib
import math
import os
import sys
from bisect import bisect_left
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from kvdoctor.gating.baseline import Baseline, match_baseline, today
from kvdoctor.gating.cache import Cache
from kvdoctor.gating.jobs import GateJob, GateSettings, NoWorkerLeft, ProcessLost
from kvdoctor.gating.stored_reports import ReportStore
from kvdoctor.gating.verdict import GateResult, judge
from kvdoctor.model.files import list_names, refuse_nothing
from kvdoctor.report.document import Report
from kvdoctor.report.escaping import printable
from kvdoctor.report.wording.summary import format_verdict

MAX_LOSSES = 2
"""A model whose process was lost this many times is not run again."""
WAIT_SECONDS = 0.5
"""On Windows, Ctrl-C is noticed between two waits only."""
LOOK_AHEAD = 64
"""Models that wait for memory while smaller ones after them are run."""
MIB = 1 << 20
CGROUPS = Path("/sys/fs/cgroup")
USES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""The files with the limit and the usage of a group, and the line of `memory.stat` with its reclaimable part."""
SHARE = 0.8
"""The share of free memory to use: the rest is for other programs."""
IDLE_BYTES = 200 * MIB
"""The memory of a process of the pool and its worker without a model."""
MEMORY_FACTOR = 4
"""Memory of a model in the runtime per byte of its files: read, optimized, packed, and opened a second time."""


def gate(
    jobs: Sequence[GateJob],
    settings: GateSettings | None = None,
    *,
    static: bool = False,
    baseline: Baseline | None = None,
) -> GateResult:
    """Diagnose models and judge them together; `static` inspects them only. Findings of the `baseline` do not count.

    Without `settings`, as many run side by side as the machine allows, without a cache.

    Raises:
        UsageError: a path does not exist.
        KvdoctorError: the worker cannot start ONNX Runtime, or the cluster cannot be used.
    """
    if static:
        from kvdoctor.gating.diagnose_job import inspect_job

        progress, store = _Progress(settings or GateSettings(), len(jobs), baseline), ReportStore()
        for index, job in enumerate(jobs):
            store.put(index, progress.count(inspect_job(job)))
        reports = store.all()
    else:
        reports = diagnose_all(jobs, settings or GateSettings(), baseline)
    if baseline is None:
        return judge(reports)
    matched = match_baseline(baseline, reports, today())
    return replace(judge(matched.reports), baseline=matched.status)


def diagnose_all(jobs: Sequence[GateJob], settings: GateSettings, baseline: Baseline | None = None) -> Sequence[Report]:
    """The report of each job, in the order of the jobs; with the baseline, known findings are said while it runs.

    Raises:
        UsageError: a path does not exist.
        KvdoctorError: the worker cannot start ONNX Runtime, or the cluster cannot be used.
    """
    for job in jobs:
        refuse_nothing(job.path, job.location)
    if len(jobs) > 1 or settings.cluster is not None:
        # The progress of one model's experiments is confusing with others, and cannot be pickled.
        silent = {id(job.options): replace(job.options, progress=None) for job in jobs}
        jobs = [replace(job, options=silent[id(job.options)]) for job in jobs]
    cache, store = None, ReportStore()
    if settings.cache is not None:
        cache = Cache(settings.cache, settings.cluster is not None, settings.cache_bytes)
    # Files are hashed side by side, before a model is run and after.
    with ThreadPoolExecutor(count_cores()) as threads:
        found = list(threads.map(lambda index: _look_up(cache, store, index, jobs[index]), range(len(jobs))))
        changed = {index: jobs[index] for index, (_, stored) in enumerate(found) if not stored}
        progress = _Progress(settings, len(jobs), baseline, len(jobs) - len(changed))
        try:
            with contextlib.closing(_run(changed, settings)) as results:
                for index, report in results:
                    store.put(index, progress.count(report))
                    if cache is not None:
                        threads.submit(cache.keep, found[index][0], jobs[index], report)
        finally:
            threads.shutdown()
            if cache is not None and (lost := cache.close()):
                size = settings.cache_bytes // MIB
                more = f"the cache of {size} MiB holds {lost} of these reports no more; give it more: --cache-size"
                progress.say(more)
    return store.all()


def _look_up(cache: Cache | None, store: ReportStore, index: int, job: GateJob) -> tuple[str | None, bool]:
    """The key of a job, and whether its report is cached, and now stored."""
    if cache is None:
        return None, False
    key = cache.key(job)
    if (report := cache.find(key, job)) is not None:
        store.put(index, report)
    return key, report is not None


def _run(jobs: dict[int, GateJob], settings: GateSettings) -> Generator[tuple[int, Report], None, None]:
    """The reports as they arrive, with the numbers of their jobs."""
    if not jobs:
        return
    # Imported late: if nothing has changed, the code that reads graphs is not loaded.
    from kvdoctor.gating.diagnose_job import diagnose_job, release_runtime

    if settings.cluster is not None:
        from kvdoctor.gating.cluster import Cluster

        placed = {}  # with paths that hold in any working folder
        for index, job in jobs.items():
            against = None if job.options.against is None else str(Path(job.options.against).absolute())
            placed[index] = replace(job, at=job.location.absolute(), options=replace(job.options, against=against))
        with Cluster(settings.cluster) as cluster:
            yield from _stream(cluster, placed, _Budget(None))
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
    """Submit the jobs that the budget allows. A job whose process was lost is submitted again."""
    from kvdoctor.gating.diagnose_job import diagnose_job, report_lost_process, report_not_diagnosed

    waiting, losses = deque(jobs), dict.fromkeys(jobs, 0)
    running: dict[Future[Report], int] = {}
    done: SimpleQueue[Future[Report]] = SimpleQueue()
    while waiting or running:
        too_large = deque[int]()
        while waiting and budget.has_room and len(too_large) < LOOK_AHEAD:
            index = waiting.popleft()
            if not budget.admit(index, jobs[index], alone=losses[index] > 0):
                too_large.append(index)
                continue
            future = executor.submit(diagnose_job, jobs[index])
            running[future] = index
            future.add_done_callback(done.put)
        waiting.extendleft(reversed(too_large))
        for future in _take_all(done):
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


def _take_all(done: "SimpleQueue[Future[Report]]") -> "Iterator[Future[Report]]":
    """What has ended, after waiting for something to end."""
    with contextlib.suppress(Empty):
        yield done.get(timeout=WAIT_SECONDS)
        while True:
            yield done.get_nowait()


def count_cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    count = len(affinity(0)) if affinity else os.cpu_count() or 1
    quotas = [quota for group in _groups("cpu") if (quota := _quota(group)) is not None]
    return max(1, math.floor(min([count, *quotas])))


def free_memory() -> int:
    """Bytes of memory that may be used now."""
    import psutil

    left = [psutil.virtual_memory().available]
    for group in _groups("memory"):
        for limit_file, usage_file, idle in USES:
            limit, used = _read_number(group / limit_file), _read_number(group / usage_file)
            if limit is not None and used is not None:
                free = _read_number(group / "memory.stat", f"{idle} ") or 0
                left.append(max(limit - max(used - free, 0), 0))
    return int(min(left) * SHARE)


def parallel_models(jobs: int | None, models: int, max_memory: int | None) -> int:
    """The number of models to run at once. `jobs` is the request or None, `max_memory` the limit per model in MiB."""
    count = jobs or count_cores()
    each = IDLE_BYTES + (max_memory or 0) * MIB
    return max(1, min(count, models, free_memory() // each))


def memory_needed(path: Path, max_memory: int | None) -> int:
    """Bytes that a model may need, estimated from the size of its files; at most its limit, `max_memory` in MiB."""
    size = 0
    with contextlib.suppress(OSError):
        if path.is_file():
            names = list_names(path.parent)
            first, after = bisect_left(names, path.stem), bisect_left(names, path.stem + chr(sys.maxunicode))
            files = [path.parent / name for name in names[first:after]]
        else:
            files = [file for folder in (path, path / "onnx") if folder.is_dir() for file in folder.iterdir()]
        size = sum(file.stat().st_size for file in files if file.is_file())
    limit = math.inf if max_memory is None else max_memory * MIB
    return IDLE_BYTES + int(min(size * MEMORY_FACTOR, limit))


def _groups(controller: str) -> Iterator[Path]:
    """The folders of the control groups of this process, from its own up to the root."""
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        root = CGROUPS / controller if names else CGROUPS
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_dir():
                yield folder
            if folder == root:
                break


def _quota(group: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError, IndexError, ZeroDivisionError):
        quota, period = (group / "cpu.max").read_text(encoding="ascii").split()[:2]
        return None if quota == "max" else int(quota) / int(period)
    quota_us, period_us = _read_number(group / "cpu.cfs_quota_us"), _read_number(group / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _read_number(file: Path, prefix: str = "") -> int | None:
    """The number after a prefix of the first line that has it; None if there is none."""
    with contextlib.suppress(OSError, ValueError):
        lines = file.read_text(encoding="ascii").splitlines()
        return next((int(line.removeprefix(prefix)) for line in lines if line.startswith(prefix)), None)
    return None


@dataclass
class _Budget:
    """How many jobs may run at once (None: no limit, on a cluster), and the bytes of memory for all of them."""

    count: int | None
    memory: int = field(default_factory=free_memory)
    taken: dict[int, int] = field(default_factory=dict)

    @property
    def has_room(self) -> bool:
        """Whether another job may start now, if there is memory for it."""
        return self.count is None or len(self.taken) < self.count

    def admit(self, index: int, job: GateJob, alone: bool) -> bool:
        """Count a job if it may start now. A job that does not fit with others runs alone."""
        if self.count is None:
            return True
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
    """Says how each of several models has ended, and how many have; `finished` ones are unchanged."""

    settings: GateSettings
    models: int
    baseline: Baseline | None = None
    finished: int = 0

    def __post_init__(self) -> None:
        if self.finished and self.models > 1:
            self.say(f"{self.finished} of {self.models} models unchanged since their last run")

    def count(self, report: Report) -> Report:
        """Count a report that arrived, and return it."""
        self.finished += 1
        if self.models > 1:
            known = match_baseline(self.baseline, [report], today()).reports[0] if self.baseline else report
            self.say(f"{self.finished} of {self.models}: {printable(format_verdict(known))}")
        return report

    def say(self, line: str) -> None:
        if self.settings.ended is not None:
            self.settings.ended(line)
        if self.settings.progress is not None:
            self.settings.progress(f"{self.finished} of {self.models} models")
