"""Runs jobs in worker processes: the only module that starts ONNX Runtime, and never in this process.

A worker that crashes is replaced, and the new one goes on with the remaining experiments.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from kvdoctor.choices import CPU
from kvdoctor.decode import messages
from kvdoctor.decode.runs import LOOPS, Run, Step
from kvdoctor.errors import UsageError, WorkerDied
from kvdoctor.runtime.process import Limits, Worker, device_files, lie_within, readable, writable
from kvdoctor.runtime.providers import advise_adapter, name_close, read_provider
from kvdoctor.runtime.scratch import ScratchFolder

MOST_CRASHES = 5
"""Every use of a cache rests on one of them: where the worker crashes in both, it would crash at other sizes too."""

Answered = TypeVar("Answered")
Progress = Callable[[str, int, int], None]
"""Called when an experiment begins: its name, its number counted from 1, and the number of experiments."""


@dataclass(eq=False, repr=False)
class StackResults:
    """The results of a job: runs, refused files, remarks, and measurements in seconds and bytes."""

    runs: list[Run] = field(default_factory=list)
    refusals: list[messages.FileRefused] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    reasons_not_run: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    timings: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    unrounded_seconds: dict[str, float] = field(default_factory=dict)
    peak_bytes: int = 0
    placed: dict[str, messages.NodesPlaced] = field(default_factory=dict)


class Runtime:
    """The onnxruntime of this environment, or of the one that `python` belongs to.

    Its worker is started at once and serves all jobs, but for those on another provider than the CPU: each of these
    has workers of its own, since its library is native code. `provider` is the one that this runtime serves. `reads`
    are files and folders that some jobs will read: a worker whose sandbox lacks what a job needs is replaced.
    """

    def __init__(
        self, limits: Limits, python: str | None = None, provider: str = CPU, reads: Collection[str] = ()
    ) -> None:
        self.limits, self.python, self.provider = limits, python, provider
        asked = read_provider(provider)
        self._scratch = ScratchFolder()
        self._writes = frozenset((os.path.realpath(self._scratch.root),))
        self._reads = frozenset(map(os.path.realpath, (*self._writes, *asked.reads, *reads)))
        temporary = dict.fromkeys(("TMPDIR", "TEMP", "TMP"), self._scratch.name)
        self._environment = {**asked.environment, **temporary}
        if provider != CPU:
            module = asked.known.module if asked.known is not None and asked.library is None else None
            given = {"asked": provider, "name": asked.name, "module": module, "library": asked.library}
            self._environment |= {"KVDOCTOR_PROVIDER": json.dumps(given)}
        self._worker = Worker(limits, python, self._environment)
        self._beside: dict[str, Runtime] = {}
        self._unopened: dict[tuple[str, str], None] = {}
        self._diagnosis, self._lost = time.monotonic_ns(), 0

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self._worker.stop()
        for other in self._beside.values():
            other.__exit__()
        self._scratch.cleanup()

    def beside(self, python: str) -> "Runtime":
        """The runtime of another environment, which is started once and ended with this one."""
        if python not in self._beside:
            self._beside[python] = Runtime(self.limits, python)
        return self._beside[python]

    def on(self, provider: str) -> "Runtime":
        """The runtime that serves a provider: this one, or another one that ends with it.

        Raises:
            UsageError: it names a library or a driver that is not there.
        """
        if provider == self.provider:
            return self
        if provider not in self._beside:
            self._beside[provider] = Runtime(self.limits, self.python, provider)
            self._beside[provider]._diagnosis = self._diagnosis
        return self._beside[provider]

    def greet(self) -> str:
        """Wait for the worker to be ready, and return the release of its onnxruntime.

        Raises:
            KvdoctorError: it cannot start ONNX Runtime.
            WorkerDied: it does not answer within the time limit.
        """
        return self._worker.greet().onnxruntime

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers that are built into the runtime; raises what `greet` raises."""
        return self._worker.greet().providers

    @property
    def sandbox(self) -> str:
        """What the kernel can keep from a worker, empty if nothing; raises what `greet` raises."""
        return self._worker.greet().sandbox

    def require_provider(self, name: str) -> None:
        """Refuse an execution provider that the runtime does not have. It would run on the CPU without a message.

        Raises:
            UsageError: it does not have it; the message names those that it has, and how to get this one.
        """
        if name == CPU:  # in every build: the worker need not be waited for
            return
        asked, hello = read_provider(name), self._worker.greet()
        if asked.is_plugin or asked.name in hello.providers:
            return
        meant = name_close(asked.name, hello.providers)
        parts = [f"onnxruntime {hello.onnxruntime} has {', '.join(hello.providers)}"]
        if meant is not None and meant != name:
            parts.append(f"did you mean {meant}?")
        if meant is not None and (known := read_provider(meant).known) is not None:
            parts.append(f"the package {known.package} has it: {known.install}")
        raise UsageError(f"--provider {name}: {'; '.join(parts)}".replace("?;", "?"))

    def find_provider(self, provider: str) -> messages.ProviderFound:
        """What a provider is here; where it cannot be used, the `error` names the next command."""
        asked = read_provider(provider)
        if asked.is_absent and asked.known is not None:
            text = f"the package {asked.known.package} is not installed; {asked.known.install}"
            return messages.ProviderFound(error=text)
        found, failed = self.on(provider).answer(messages.FindProviderJob(provider=provider), messages.ProviderFound)
        if failed or not found:
            text = f"{failed or 'its worker gives no answer'} while the provider was loaded"
            found = (messages.ProviderFound(error=text, no_adapter=True),)
        error = found[0].error.replace(asked.library or asked.name, asked.name)
        advice = f"; {advise_adapter(asked)}" if error and found[0].no_adapter and asked.uses_vulkan else ""
        return replace(found[0], error=error + advice)

    @property
    def versions(self) -> dict[str, str]:
        """Versions as the worker reported them; empty before its first job."""
        hello = self._worker.hello
        if hello is None:
            return {}
        return {"onnxruntime": hello.onnxruntime, "numpy": hello.numpy, "python": hello.python}

    def examine(self, job: messages.ExperimentJob, progress: Progress | None = None) -> StackResults:
        """Run the experiments of a job, with a new worker after each crash and for each one that asks for it.

        Raises:
            KvdoctorError: the worker does not even start.
        """
        from kvdoctor.decode.experiments import load

        if job.provider != self.provider:
            return self.on(job.provider).examine(job, progress)
        results, left, crashes = StackResults(), job.experiments, 0
        fresh = {experiment.name for experiment in load() if experiment.fresh}
        while left:
            # One worker runs all up to the next experiment that asks for a worker of its own.
            stop = next((at for at, name in enumerate(left) if at and name in fresh), len(left))
            part, later = left[:stop], left[stop:]
            # What a worker keeps is not written over by the one that is started for an experiment.
            kept = job.keep_logits if part[0] not in fresh else None
            self._send(replace(job, experiments=part, keep_logits=kept), results)
            current = _Current(left[0])
            try:
                for event in self._events():
                    if isinstance(event, messages.ExperimentStarted) and progress is not None:
                        name = event.experiment
                        progress(name, job.experiments.index(name) + 1, len(job.experiments))
                    _update_position(event, current)
                    _collect(event, results, tuple(current.steps.values()))
                if left := later:
                    self._restart(results)
            except WorkerDied as crash:
                crashes += 1
                results.runs.append(_crashed_run(job, current, crash, self.versions))
                left = self._skip_pointless(job, left[left.index(current.experiment) + 1 :], current, results)
                self._restart(results)
            if crashes >= MOST_CRASHES:
                reason = f"not run: the worker process crashed {crashes} times"
                results.runs += [_skipped_run(job, name, reason, self.versions) for name in left]
                break
        results.peak_bytes = max(results.peak_bytes, self._worker.peak_bytes)
        return results

    def _skip_pointless(
        self, job: messages.ExperimentJob, left: tuple[str, ...], current: "_Current", results: StackResults
    ) -> tuple[str, ...]:
        """The experiments that are still worth running after a crash; the others are recorded as skipped."""
        from kvdoctor.decode.experiments import uses

        passed = any(run.experiment in LOOPS and run.outcome == "passed" for run in results.runs)
        if passed or current.experiment not in uses():
            return left
        reason = "not run: the worker process crashed in the loop itself"
        results.runs += [_skipped_run(job, name, reason, self.versions) for name in left if name in uses()]
        return tuple(name for name in left if name not in uses())

    def trial(self, job: messages.TrialJob | messages.CompareJob) -> messages.TrialDone:
        """Run one call of a changed graph, or compare the calls of two.

        Raises:
            WorkerDied: the worker crashed; the next job gets a new one.
        """
        done = messages.TrialDone(error="the trial crashed")
        for event in self.ask(job):
            done = event if isinstance(event, messages.TrialDone) else done
        return done

    def ask(self, job: messages.Job) -> Iterator[messages.Event]:
        """Yield the events of any job. After a crash the next job gets a new worker.

        Raises:
            WorkerDied: the worker crashed before the job was done.
            KvdoctorError: it does not even start.
        """
        if job.provider != self.provider:
            yield from self.on(job.provider).ask(job)
            return
        self._send(job, StackResults())
        try:
            yield from self._events()
        except WorkerDied:
            self._restart(StackResults())
            raise

    def _events(self) -> Iterator[messages.Event]:
        """The events of a job. A file during whose opening the worker ends is not opened again."""
        opening: messages.FileOpening | None = None
        try:
            for event in self._worker.events():
                opening = event if isinstance(event, messages.FileOpening) else None
                yield event
        except WorkerDied:
            self._lost += 1
            if opening is not None:
                self._unopened[opening.path, opening.level] = None
            raise

    def answer(self, job: messages.Job, kind: type[Answered]) -> tuple[tuple[Answered, ...], str]:
        """The answers of one kind to a job, and why the job was not carried out; empty if it was.

        Raises:
            KvdoctorError: the worker does not even start.
        """
        found, failed = list[Answered](), ""
        try:
            for event in self.ask(job):
                if isinstance(event, messages.WorkerError):
                    failed = f"it crashed ({event.text.strip().splitlines()[-1]})"
                elif isinstance(event, kind):
                    found.append(event)
        except WorkerDied as crash:
            failed = f"the worker process ended: {crash.how}"
        return tuple(found), failed

    def peak_bytes(self) -> int:
        """The most resident memory that a worker of this runtime had since `forget_peak`."""
        return max([self._worker.peak_bytes, *(other.peak_bytes() for other in self._beside.values())])

    def workers_lost(self) -> int:
        """The workers of this runtime that ended during a job since `forget_peak`."""
        return self._lost + sum(other.workers_lost() for other in self._beside.values())

    def forget_peak(self) -> None:
        """Measure anew, for another model."""
        self._lost = 0
        self._unopened.clear()
        self._diagnosis = time.monotonic_ns()
        self._worker.peak_bytes = 0
        for other in self._beside.values():
            other.forget_peak()

    def _send(self, job: messages.Job, results: StackResults) -> None:
        """Hand over a job; a worker with unread events of another one is replaced: they would be taken for answers."""
        sandboxed, granted = self.limits.sandbox and sys.platform == "linux", self._worker.granted
        reads = readable(job) | {*(devices := device_files(job))} if sandboxed else frozenset[str]()
        writes = writable(job) if sandboxed else frozenset[str]()
        fits = granted is None or (lie_within(reads, granted.reads) and lie_within(writes, granted.writes))
        if not self._worker.is_idle or not fits:
            self._restart(results)
        sandbox = None
        if sandboxed and self._worker.granted is None:
            self._reads, self._writes = self._reads | reads, self._writes | writes
            sandbox = messages.Sandbox(tuple(sorted(self._reads)), tuple(sorted(self._writes)), devices)
            self._worker.granted = sandbox
        job = replace(job, unopened=tuple(self._unopened), diagnosis=self._diagnosis)
        self._worker.send(replace(job, sandbox=sandbox))

    def _restart(self, results: StackResults) -> None:
        results.peak_bytes = max(results.peak_bytes, self._worker.peak_bytes)
        hello = self._worker.hello
        self._worker.stop()
        self._worker = Worker(self.limits, self.python, self._environment)
        self._worker.hello = hello


STARTING = "while it started"


@dataclass(eq=False, repr=False)
class _Current:
    """The worker's position by its last event; `doing` completes "the process ended"."""

    experiment: str
    doing: str = STARTING
    step: int | None = None
    steps: dict[int, Step] = field(default_factory=dict)
    before: tuple[str, int | None] = (STARTING, None)


def _update_position(event: messages.Event, current: _Current) -> None:
    match event:
        case messages.ExperimentStarted():
            current.experiment, current.doing, current.step, current.steps = event.experiment, STARTING, None, {}
        case messages.FileOpening():
            current.before = current.doing, current.step
            current.doing, current.step = f"while it opened {event.file}", None
        case messages.FileOpened():
            current.doing, current.step = current.before
        case messages.CallStarting():
            names = {"step": f"step {event.step}", "reference": "the reference run"}
            current.doing, current.step = f"during {names.get(event.call, f'a {event.call} call')}", event.step
        case messages.StepDone():
            current.steps[event.step.step] = event.step


def _collect(event: messages.Event, results: StackResults, steps: tuple[Step, ...]) -> None:
    """Enter an event into the results; `steps` are those of the current experiment."""
    match event:
        case messages.FileRefused():
            results.refusals.append(event)
        case messages.NodesPlaced():
            results.placed.setdefault(event.file, event)
        case messages.CallTimed():
            results.timings[event.label] = event.seconds
        case messages.Note():
            results.notes.append(event.text)
        case messages.Obstacle():
            results.reasons_not_run.append(event.text)
        case messages.WorkerError():
            results.crashes.append(event.text)
        case messages.RunDone():
            results.runs.append(replace(event.run, steps=steps))
            results.seconds[event.run.experiment] = event.seconds


def _crashed_run(job: messages.ExperimentJob, current: _Current, crash: WorkerDied, versions: dict[str, str]) -> Run:
    run = _skipped_run(job, current.experiment, f"{crash.how} {current.doing}", versions)
    return replace(
        run,
        outcome="died",
        failed_step=current.step,
        died_by=crash.limit or crash.how,
        steps=tuple(current.steps.values()),
    )


def _skipped_run(job: messages.ExperimentJob, experiment: str, reason: str, versions: dict[str, str]) -> Run:
    target = f"onnxruntime=={versions.get('onnxruntime', '?')}"
    return Run(job.stack, experiment, target, job.provider, "all", "skipped", reason=reason)
