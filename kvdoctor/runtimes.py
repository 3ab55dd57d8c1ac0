"""Starts workers and talks to them: the parent's side of the door to ONNX Runtime.

The reading of events, the clock and the memory watch live here; a worker that dies is replaced, and goes on with the
experiments that are left.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdoctor.contract import CacheContract
from kvdoctor.errors import KvdoctorError, WorkerDied
from kvdoctor.plain import from_plain, to_plain
from kvdoctor.trace import Run, Step

POLL_SECONDS = 0.02
MOST_DEATHS = 3
MIB = 1 << 20

# The package is loaded from its folder under its own name: in another environment nothing else of this one is seen.
BOOT = """
import sys
sys.path[:] = [entry for entry in sys.path if entry]
import importlib.util
spec = importlib.util.spec_from_file_location("kvdoctor", sys.argv[1] + "/__init__.py",
                                              submodule_search_locations=[sys.argv[1]])
package = importlib.util.module_from_spec(spec)
sys.modules["kvdoctor"] = package
spec.loader.exec_module(package)
from kvdoctor.worker import main
main()
"""


@dataclass(frozen=True, slots=True)
class Limits:
    """`timeout` in seconds for one answer (a file opened, a step run), `max_memory` in MiB of resident memory."""

    timeout: float = 300.0
    max_memory: int | None = None

    def memory_limit(self) -> int:
        """Bytes: as asked, else nine tenths of the machine's memory."""
        if self.max_memory is not None:
            return self.max_memory * MIB
        import psutil

        return int(psutil.virtual_memory().total * 0.9)


@dataclass(frozen=True, slots=True)
class Job:
    """Experiments on one stack. `keep_logits` is a private scratch file for the logits of each experiment."""

    stack: str
    folder: Path
    contract: CacheContract
    experiments: tuple[str, ...]
    seed: int = 0
    provider: str = "CPUExecutionProvider"
    keep_logits: Path | None = None

    def line(self, experiments: tuple[str, ...]) -> str:
        """The job as the worker reads it, for the experiments that are left."""
        job = to_plain(self) | {"folder": str(self.folder), "experiments": experiments, "threads": thread_count()}
        job["keep_logits"] = str(self.keep_logits) if self.keep_logits else None
        return json.dumps(job) + "\n"


@dataclass(frozen=True, slots=True)
class Refusal:
    """A file that the runtime does not open at some optimisation level; `opens_at` is the first that does."""

    file: str
    errors: dict[str, str]
    opens_at: str | None


@dataclass
class Examined:
    """What a job brought: runs and refusals, and apart from them all that was measured (seconds, bytes)."""

    runs: list[Run] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0


def thread_count() -> int:
    """Threads for the runtime: the cores this process may use, at most 16."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    return max(1, min(cores or 1, 16))


class Worker:
    """One child process. Starting it returns at once; it loads the runtime while the parent reads the graph."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.hello: dict[str, Any] = {}
        self.peak_bytes = 0
        self._events: queue.SimpleQueue[str] = queue.SimpleQueue()
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONIOENCODING": "utf-8"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(Path(__file__).parent)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        threading.Thread(target=self._pump, daemon=True).start()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def send(self, line: str) -> None:
        """Hand over a job; a worker that is gone shows when its events are read."""
        assert self._process.stdin is not None  # noqa: S101 - opened with a pipe
        with contextlib.suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def events(self) -> Iterator[dict[str, Any]]:
        """Give the events of a job up to its end.

        Raises:
            WorkerDied: the process ended, stood still for longer than the limit, or grew over its memory.
        """
        while True:
            event = json.loads(self._next_line())
            if event["event"] == "hello":
                self.hello = event
            elif event["event"] == "done":
                return
            else:
                yield event

    def greet(self) -> dict[str, Any]:
        """Wait for the worker's first words: its versions and execution providers.

        Raises:
            KvdoctorError: it cannot start ONNX Runtime.
            WorkerDied: it says nothing within the time limit.
        """
        if not self.hello:
            self.hello = json.loads(self._next_line())
        return self.hello

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]

    def _pump(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self._process.stdout or ():
                self._events.put(line)
        self._events.put("")

    def _next_line(self) -> str:
        import psutil

        with contextlib.suppress(psutil.Error):
            watched = psutil.Process(self._process.pid)
        limit = self.limits.memory_limit()
        deadline = time.monotonic() + self.limits.timeout
        while True:
            with contextlib.suppress(queue.Empty):
                line = self._events.get(timeout=POLL_SECONDS)
                if not line.endswith("\n"):
                    raise WorkerDied(self._how_it_ended())
                return line
            with contextlib.suppress(psutil.Error):
                self.peak_bytes = max(self.peak_bytes, watched.memory_info().rss)
            if self.peak_bytes > limit:
                self.stop()
                raise WorkerDied(f"ended at {limit // MIB} MiB of memory, the limit", "memory")
            if time.monotonic() > deadline:
                self.stop()
                raise WorkerDied(f"ended after {self.limits.timeout:g} s without an answer, the limit", "timeout")

    def _how_it_ended(self) -> str:
        code = self._process.wait()
        if not self.hello:
            raise KvdoctorError(
                "the worker process could not start ONNX Runtime; `kvdoctor env` says what is missing in this environment"
            )
        if code < 0:
            return f"ended by signal {signal.Signals(-code).name}"
        return f"ended with exit code {code if code < 2**31 else hex(code)}"


class Runtime:
    """The onnxruntime of this environment. Its worker is started at once and kept warm between jobs."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._worker = Worker(limits)
        self._deaths = 0

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.stop()

    @property
    def versions(self) -> dict[str, str]:
        """Versions as the worker gave them; empty before its first job."""
        known = self._worker.hello
        return {name: known[name] for name in ("onnxruntime", "numpy", "python") if name in known}

    def examine(self, job: Job) -> Examined:
        """Carry out a job, over the deaths of workers.

        Raises:
            KvdoctorError: the worker does not even start.
        """
        examined, left = Examined(), job.experiments
        while left:
            self._worker.send(job.line(left))
            current = _Current(left[0])
            try:
                for event in self._worker.events():
                    _take(event, examined, current)
                break
            except WorkerDied as death:
                self._deaths += 1
                examined.runs.append(_died(job, current, death, self.versions))
                left = left[left.index(current.experiment) + 1 :]
                self._restart(examined)
            if self._deaths >= MOST_DEATHS:
                reason = f"not run: the worker died {self._deaths} times"
                examined.runs += [_not_run(job, name, reason, self.versions) for name in left]
                break
        examined.peak_bytes = max(examined.peak_bytes, self._worker.peak_bytes)
        return examined

    def _restart(self, examined: Examined) -> None:
        examined.peak_bytes = max(examined.peak_bytes, self._worker.peak_bytes)
        hello = self._worker.hello
        self._worker.stop()
        self._worker = Worker(self.limits)
        self._worker.hello = hello


@dataclass
class _Current:
    """Where the worker is, by its last announcement."""

    experiment: str
    doing: str = "starting"
    step: int | None = None


def _take(event: dict[str, Any], examined: Examined, current: _Current) -> None:
    match event["event"]:
        case "start":
            current.experiment, current.doing, current.step = event["experiment"], "starting", None
        case "open":
            current.doing, current.step = f"opening {event['file']}", None
        case "step":
            words = {"step": f"step {event['step']}", "reference": "the reference run"}
            current.doing, current.step = words.get(event["call"], f"a {event['call']} call"), event["step"]
        case "refused":
            examined.refusals.append(Refusal(event["file"], event["errors"], event["opens_at"]))
        case "timing":
            examined.timings[event["label"]] = event["seconds"]
        case "crash":
            examined.crashes.append(event["text"])
        case "run":
            run = from_plain(Run, event["run"])
            examined.runs.append(run)
            examined.seconds[run.experiment] = event["seconds"]


def _died(job: Job, current: _Current, death: WorkerDied, versions: dict[str, str]) -> Run:
    run = _not_run(job, current.experiment, f"{death.how}, while {current.doing}", versions)
    return Run(
        **{name: getattr(run, name) for name in ("stack", "experiment", "target", "provider", "level", "reason")},
        outcome="died",
        failed_step=current.step,
        died_by=death.limit or death.how,
    )


def _not_run(job: Job, experiment: str, reason: str, versions: dict[str, str]) -> Run:
    target = f"onnxruntime=={versions.get('onnxruntime', '?')}"
    return Run(job.stack, experiment, target, job.provider, "all", "skipped", reason=reason)


__all__ = ["Examined", "Job", "Limits", "Refusal", "Run", "Runtime", "Step", "thread_count"]
