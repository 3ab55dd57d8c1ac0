"""Starts workers and talks to them: the parent's side of the door to ONNX Runtime.

A worker that dies is replaced, and the fresh one goes on with the experiments that are left.
"""

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvdoctor.child import Limits, Worker
from kvdoctor.contract import CacheContract
from kvdoctor.errors import WorkerDied
from kvdoctor.plain import from_plain, to_plain
from kvdoctor.tolerances import asked
from kvdoctor.trace import Run, Step
from kvdoctor.uses import USES

MOST_DEATHS = 5
LOOPS = ("plain-loop", "held-loop")
"""What every use of a cache rests on: where neither lives, other sizes would only die as well."""


@dataclass(frozen=True, slots=True)
class Job:
    """Experiments on one stack. `keep_logits` is a private scratch file for the logits of each experiment.

    `prompt` are token ids to begin with, and `inputs` an .npz file of encoder inputs, in place of made-up ones.
    `seen` is told of each experiment that begins: its name, which it is, counted from 1, and of how many.
    `keep_calls` is a private folder for the feeds of the first call of each judged experiment that fails or differs.
    `trace` is the file of the caller's own steps, which are run again as the last experiment.
    `settings` are entries for the runtime's sessions; where a job is not `timed`, what is to be timed runs once.
    """

    stack: str
    folder: Path
    contract: CacheContract
    experiments: tuple[str, ...]
    seed: int = 0
    provider: str = "CPUExecutionProvider"
    keep_logits: Path | None = None
    prompt: tuple[int, ...] = ()
    inputs: Path | None = None
    seen: Callable[[str, int, int], None] | None = None
    settings: dict[str, str] = field(default_factory=dict)
    timed: bool = True
    keep_calls: Path | None = None
    trace: Path | None = None

    def line(self, experiments: tuple[str, ...]) -> str:
        """The job as the worker reads it, for the experiments that are left."""
        job = {
            "stack": self.stack,
            "folder": str(self.folder),
            "contract": to_plain(self.contract),
            "experiments": experiments,
            "seed": self.seed,
            "provider": self.provider,
            "threads": thread_count(),
            "keep_logits": str(self.keep_logits) if self.keep_logits else None,
            "prompt": self.prompt,
            "inputs": str(self.inputs) if self.inputs else None,
            "settings": self.settings,
            "timed": self.timed,
            "keep_calls": str(self.keep_calls) if self.keep_calls else None,
            "trace": str(self.trace) if self.trace else None,
            "tolerances": asked(),
        }
        return json.dumps(job) + "\n"

    def tell(self, event: dict[str, Any]) -> None:
        """Pass on that an experiment begins."""
        if self.seen is not None and event["event"] == "start":
            name = event["experiment"]
            self.seen(name, self.experiments.index(name) + 1, len(self.experiments))


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
    obstacles: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    unrounded_seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0


def thread_count() -> int:
    """Threads for the runtime: the cores this process may use, at most 16."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count()
    return max(1, min(cores or 1, 16))


class Runtime:
    """The onnxruntime of this environment, or of the one that `python` belongs to.

    Its worker is started at once and kept warm between jobs.
    """

    def __init__(self, limits: Limits, python: str | None = None) -> None:
        self.limits, self.python = limits, python
        self._worker = Worker(limits, python)
        self._beside: dict[str, Runtime] = {}

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.stop()
        for other in self._beside.values():
            other.__exit__()

    def beside(self, python: str) -> "Runtime":
        """The runtime of another environment, kept warm beside this one and ended with it."""
        if python not in self._beside:
            self._beside[python] = Runtime(self.limits, python)
        return self._beside[python]

    def greet(self) -> str:
        """Wait for the worker to be ready; gives the release of its onnxruntime.

        Raises:
            KvdoctorError: it cannot start ONNX Runtime.
            WorkerDied: it says nothing within the time limit.
        """
        return str(self._worker.greet()["onnxruntime"])

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
        examined, left, deaths = Examined(), job.experiments, 0
        while left:
            self._worker.send(job.line(left))
            current = _Current(left[0])
            try:
                for event in self._worker.events():
                    job.tell(event)
                    _take(event, examined, current)
                break
            except WorkerDied as death:
                deaths += 1
                examined.runs.append(_died(job, current, death, self.versions))
                left = left[left.index(current.experiment) + 1 :]
                if current.experiment in USES and not _some_loop_passed(examined):
                    reason = "not run: the worker died in the loop itself"
                    examined.runs += [_not_run(job, name, reason, self.versions) for name in left if name in USES]
                    left = tuple(name for name in left if name not in USES)
                self._restart(examined)
            if deaths >= MOST_DEATHS:
                reason = f"not run: the worker died {deaths} times"
                examined.runs += [_not_run(job, name, reason, self.versions) for name in left]
                break
        examined.peak_bytes = max(examined.peak_bytes, self._worker.peak_bytes)
        return examined

    def trial(self, job: dict[str, Any]) -> dict[str, Any]:
        """Carry out a trial: one call on a changed graph.

        Raises:
            WorkerDied: the worker did not live through it; a fresh one is there for what comes next.
        """
        answer: dict[str, Any] = {"error": "the trial crashed", "names": []}
        for event in self.ask(job):
            answer = event if event["event"] == "tried" else answer
        return answer

    def ask(self, job: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Give the events of a job of another kind. Where the worker dies, the next job finds a fresh one.

        Raises:
            WorkerDied: it ended before the job did.
            KvdoctorError: it does not even start.
        """
        self._worker.send(json.dumps({**job, "threads": thread_count()}) + "\n")
        try:
            yield from self._worker.events()
        except WorkerDied:
            self._restart(Examined())
            raise

    def peak_bytes(self) -> int:
        """The most resident memory that a worker of this runtime had since `forget_peak`."""
        return max([self._worker.peak_bytes, *(other.peak_bytes() for other in self._beside.values())])

    def forget_peak(self) -> None:
        """Begin to measure afresh: another model comes."""
        self._worker.peak_bytes = 0
        for other in self._beside.values():
            other.forget_peak()

    def _restart(self, examined: Examined) -> None:
        examined.peak_bytes = max(examined.peak_bytes, self._worker.peak_bytes)
        hello = self._worker.hello
        self._worker.stop()
        self._worker = Worker(self.limits, self.python)
        self._worker.hello = hello


@dataclass
class _Current:
    """Where the worker is, by its last announcement."""

    experiment: str
    doing: str = "starting"
    step: int | None = None
    steps: dict[int, Step] = field(default_factory=dict)


def _take(event: dict[str, Any], examined: Examined, current: _Current) -> None:
    match event["event"]:
        case "start":
            current.experiment, current.doing, current.step = event["experiment"], "starting", None
            current.steps = {}
        case "open":
            current.doing, current.step = f"opening {event['file']}", None
        case "step":
            words = {"step": f"step {event['step']}", "reference": "the reference run"}
            current.doing, current.step = words.get(event["call"], f"a {event['call']} call"), event["step"]
        case "refused":
            examined.refusals.append(Refusal(event["file"], event["errors"], event["opens_at"]))
        case "timing":
            examined.timings[event["label"]] = event["seconds"]
        case "note" | "obstacle" | "crash" as kind:
            {"note": examined.notes, "obstacle": examined.obstacles, "crash": examined.crashes}[kind].append(
                event["text"]
            )
        case "stepped":
            step = from_plain(Step, event["step"])
            current.steps[step.step] = step
        case "run":
            run = replace(from_plain(Run, event["run"]), steps=tuple(current.steps.values()))
            examined.runs.append(run)
            examined.seconds[run.experiment] = event["seconds"]


def _died(job: Job, current: _Current, death: WorkerDied, versions: dict[str, str]) -> Run:
    run = _not_run(job, current.experiment, f"{death.how}, while {current.doing}", versions)
    return replace(
        run,
        outcome="died",
        failed_step=current.step,
        died_by=death.limit or death.how,
        steps=tuple(current.steps.values()),
    )


def _some_loop_passed(examined: Examined) -> bool:
    return any(run.experiment in LOOPS and run.outcome == "passed" for run in examined.runs)


def _not_run(job: Job, experiment: str, reason: str, versions: dict[str, str]) -> Run:
    target = f"onnxruntime=={versions.get('onnxruntime', '?')}"
    return Run(job.stack, experiment, target, job.provider, "all", "skipped", reason=reason)
