"""The worker process: the only place where ONNX Runtime runs.

It reads jobs from standard input, runs whole experiments, and writes small facts to standard output as events
(decode/messages.py). It announces every step before it runs it, so that a crash can be attributed to a step. Standard
library, numpy and onnxruntime only, so that it starts in an environment that has nothing else.
"""

import importlib
import io
import os
import platform
import queue
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any, BinaryIO

import numpy as np
import onnxruntime as ort

from kvdoctor.contract import CacheContract
from kvdoctor.decode.experiment_run import ExperimentRunner
from kvdoctor.decode.experiments import Experiment, load
from kvdoctor.decode.messages import (
    CacheCostJob,
    CompareJob,
    DigestJob,
    Event,
    ExperimentJob,
    ExperimentStarted,
    GradeJob,
    Hello,
    Job,
    JobDone,
    MeasureJob,
    Obstacle,
    PairedJob,
    PlayJob,
    RecordJob,
    RunDone,
    SpeedJob,
    StepDone,
    TrialJob,
    WorkerError,
    read_job,
    write_message,
)
from kvdoctor.decode.pipes import take_pipes
from kvdoctor.decode.samples import Samples, read_arrays
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.errors import UsageError
from kvdoctor.runtime.worker.runner import StackRunner
from kvdoctor.runtime.worker.sessions import ProviderMissing, Sessions
from kvdoctor.runtime.worker.trial import run_trial


def run_experiments(job: ExperimentJob, announce: Announce) -> None:
    """Run the experiments of a job, judged by its tolerances."""
    sessions = Sessions(job.folder, job.provider, job.threads, announce, job.settings)
    samples = Samples(job.prompt, read_arrays(job.inputs) if job.inputs else {})
    stack = StackRunner(job.stack, job.contract, sessions, job.seed, announce, samples)
    runner = ExperimentRunner(
        stack,
        keep_logits=job.keep_logits is not None,
        keep_calls=job.keep_calls,
        timed=job.timed,
        tolerances=job.tolerances,
        thresholds=job.thresholds,
        ring=job.ring,
        scratch=job.scratch,
        search=job.search,
    )
    for experiment in _find_experiments(job, announce):
        announce(ExperimentStarted(experiment.name))
        begin = time.perf_counter()
        try:
            run = runner.run(experiment)
        except ProviderMissing as error:
            announce(Obstacle(str(error)))
            break
        except UsageError:
            announce(Obstacle("values of the trace cannot be read; save it again"))
            continue
        except Exception:  # an error of kvdoctor in one experiment must not cost the others
            announce(WorkerError(traceback.format_exc()))
            continue
        announce(RunDone(run, time.perf_counter() - begin))
    if job.keep_logits is not None:
        np.savez(job.keep_logits, **runner.logits)  # type: ignore[arg-type]


def _find_experiments(job: ExperimentJob, announce: Announce) -> Iterator[Experiment]:
    experiments = load()
    if job.trace is not None:
        experiments += _read_trace(str(job.trace), job.trace_run, job.contract, announce)
    yield from (experiment for experiment in experiments if experiment.name in job.experiments)


def _read_trace(path: str, run: str | None, contract: CacheContract, announce: Announce) -> tuple[Experiment, ...]:
    # Modules that few jobs need are imported by them, since every user waits for the start of the worker.
    from kvdoctor.decode.caller_trace.probe import trace_of
    from kvdoctor.decode.caller_trace.read import read_trace
    from kvdoctor.decode.caller_trace.replay import make_replay

    try:
        return (make_replay(read_trace(path) if run is None else trace_of(path, run, contract), contract),)
    except UsageError:
        announce(Obstacle("the trace was changed while it was read; give it again"))
        return ()


ANSWERS: dict[type[Any], tuple[str, str]] = {
    PairedJob: ("paired", "run_paired"),
    DigestJob: ("digests", "write_digests"),
    SpeedJob: ("speed", "measure_speed"),
}
"""The module and function of each job with one answer: loaded when it is asked for."""


def _grade(job: GradeJob | CacheCostJob, announce: Announce) -> Iterator[Event]:
    from kvdoctor.runtime.worker.cache_cost import measure_cost
    from kvdoctor.runtime.worker.grade import grade

    return measure_cost(job, announce) if isinstance(job, CacheCostJob) else grade(job, announce)


def run_job(job: Job, announce: Announce) -> None:
    """Carry out a job and announce its events."""
    match job:
        case ExperimentJob():
            run_experiments(job, announce)
        case TrialJob() | CompareJob():
            announce(run_trial(job))
        case RecordJob() | PlayJob():
            from kvdoctor.runtime.worker import replay

            if isinstance(job, RecordJob):
                replay.record_experiment(job, announce)
            else:
                replay.replay_script(job, announce)
        case PairedJob() | DigestJob() | SpeedJob():
            module, function = ANSWERS[type(job)]
            announce(getattr(importlib.import_module(f"kvdoctor.runtime.worker.{module}"), function)(job, announce))
        case GradeJob() | CacheCostJob():
            for found in _grade(job, announce):
                announce(found)
        case MeasureJob():
            from kvdoctor.runtime.worker.version_limits import measure_limits

            announce(measure_limits())


def main() -> None:
    """Serve jobs until standard input ends."""
    ort.disable_telemetry_events()
    _show_no_window()
    jobs, writer = take_pipes()
    events = io.TextIOWrapper(writer, encoding="utf-8")

    def announce(event: Event) -> None:
        events.write(write_message(event))
        if not isinstance(event, StepDone):  # goes with the next event, which comes before the next call
            events.flush()

    providers = tuple(ort.get_available_providers())
    announce(Hello(ort.__version__, np.__version__, platform.python_version(), providers, os.getpid()))
    for line in _read_lines(jobs):
        try:
            run_job(read_job(line), announce)
        except Exception:  # an error of kvdoctor must reach the parent as a fact, not as a closed pipe
            announce(WorkerError(traceback.format_exc()))
        announce(JobDone())


def _show_no_window() -> None:
    """Let a crash end the process at once: Windows would show a window and wait for the user."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.SetErrorMode(msvcrt.SEM_FAILCRITICALERRORS | msvcrt.SEM_NOGPFAULTERRORBOX)


def _read_lines(jobs: BinaryIO) -> Iterator[str]:
    """Lines from the parent. Their end means that it is gone, and ends this process in the middle of a step.

    Tearing the runtime down would cost time and can itself crash, and nothing is left to save.
    """
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in io.TextIOWrapper(jobs, encoding="utf-8"):
            lines.put(line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    while True:
        yield lines.get()
