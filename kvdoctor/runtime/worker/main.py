"""The worker process: the only place where ONNX Runtime runs.

It reads jobs from standard input, runs whole experiments, and writes small facts to standard output as events
(decode/messages.py). It announces every step before it runs it, so that a crash can be attributed to a step. Standard
library, numpy and onnxruntime only, so that it starts in an environment that has nothing else.
"""

import importlib
import io
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import chain

import numpy as np
import onnxruntime as ort

from kvdoctor.decode import messages
from kvdoctor.decode.experiment_run import ExperimentRunner
from kvdoctor.decode.experiments import Experiment, load
from kvdoctor.decode.samples import Samples, read_arrays
from kvdoctor.decode.stack_driver import Announce
from kvdoctor.errors import UsageError
from kvdoctor.runtime.worker.runner import open_stack
from kvdoctor.runtime.worker.sandbox import describe_sandbox, restrict
from kvdoctor.runtime.worker.sessions import ProviderMissing


def run_experiments(job: messages.ExperimentJob, announce: Announce) -> None:
    """Run the experiments of a job, judged by its tolerances."""
    samples = Samples(job.prompt, read_arrays(job.inputs) if job.inputs else {})
    runner = ExperimentRunner(
        open_stack(job, job, announce, samples),
        job,
        keep_logits=job.keep_logits is not None,
        keep_calls=job.keep_calls,
        keep_step=job.keep_step,
        timed=job.timed,
    )
    for experiment in _find_experiments(job, announce):
        announce(messages.ExperimentStarted(experiment.name))
        begin = time.perf_counter()
        try:
            run = runner.run(experiment)
        except ProviderMissing as error:
            announce(messages.Obstacle(str(error)))
            break
        except UsageError:
            announce(messages.Obstacle("values of the trace cannot be read; save it again"))
            continue
        except Exception:  # an error of kvdoctor in one experiment must not cost the others
            announce(messages.WorkerError(traceback.format_exc()))
            continue
        announce(messages.RunDone(run, time.perf_counter() - begin))
    if job.keep_logits is not None:
        np.savez(job.keep_logits, **runner.logits)  # type: ignore[arg-type]


def _find_experiments(job: messages.ExperimentJob, announce: Announce) -> Iterator[Experiment]:
    experiments = load()
    for added in job.added:
        try:
            module = importlib.import_module(added.module)
            experiments += (module.make_experiment(job.contract, added.data),)
        except UsageError as error:
            announce(messages.Obstacle(str(error)))
    yield from (experiment for experiment in experiments if experiment.name in job.experiments)


ANSWERS: dict[type[messages.Job], tuple[str, str]] = {
    messages.TrialJob: ("runtime.worker.trial", "run_trial"),
    messages.CompareJob: ("runtime.worker.trial", "run_trial"),
    messages.DigestJob: ("runtime.worker.decoding", "make_digests"),
    messages.SettleJob: ("runtime.worker.runner", "settle_readings"),
    messages.GradeJob: ("runtime.worker.decoding", "grade"),
    messages.SpeedJob: ("runtime.worker.decoding", "measure_speed"),
    messages.MeasureJob: ("runtime.worker.sessions", "measure_limits"),
    messages.FindProviderJob: ("runtime.worker.trial", "find_provider"),
}
"""The module and the function that answers each job: few jobs need them, and every user waits for the start."""

BEFORE_OTHERS = (messages.StepDone, messages.RunDone, messages.ExperimentStarted, messages.FileOpened)
"""Events that go with the next one, which comes before the next call: each that is sent wakes the parent."""


def run_job(job: messages.Job, announce: Announce) -> None:
    """Carry out a job and announce its events."""
    if isinstance(job, messages.ExperimentJob):
        run_experiments(job, announce)
        return
    # The messages of an add-on say which module and function of it answer its jobs.
    module, function = ANSWERS.get(type(job)) or sys.modules[type(job).__module__].WORK[type(job)]
    found = getattr(importlib.import_module(f"kvdoctor.{module}"), function)(job, announce)
    for event in (found,) if isinstance(found, messages.Event) else found:
        announce(event)


def _enter_sandbox(line: str) -> str:
    """Restrict this process as the first job says; the error if the kernel refuses, else empty."""
    try:
        sandbox = messages.read_message(line).sandbox
        if sandbox is not None:
            restrict(sandbox)
    except Exception:  # the parent must learn the reason
        return traceback.format_exc()
    return ""


def main() -> None:
    """Serve jobs until standard input ends."""
    ort.disable_telemetry_events()
    _show_no_window()
    jobs, writer = messages.take_pipes()
    events = io.TextIOWrapper(writer, encoding="utf-8")

    def announce(event: messages.Event) -> None:
        events.write(messages.write_message(event))
        if not isinstance(event, BEFORE_OTHERS):
            events.flush()

    providers = tuple(ort.get_available_providers())
    versions = ort.__version__, np.__version__, platform.python_version()
    announce(messages.Hello(*versions, providers, os.getpid(), describe_sandbox()))
    lines = io.TextIOWrapper(jobs, encoding="utf-8")
    first = next(lines, None)
    if first is None:
        os._exit(0)  # as `read_until_gone` ends: tearing the runtime down could itself crash
    # The thread that reads the next jobs would not be restricted if it ran already.
    if refused := _enter_sandbox(first):
        announce(messages.WorkerError(refused))
        announce(messages.JobDone())
        return
    for line in chain((first,), messages.read_until_gone(lambda: next(lines))):
        try:
            run_job(messages.read_message(line), announce)
        except Exception:  # an error of kvdoctor must reach the parent as a fact, not as a closed pipe
            announce(messages.WorkerError(traceback.format_exc()))
        announce(messages.JobDone())


def _show_no_window() -> None:
    """Let a crash end the process at once: Windows would show a window and wait for the user."""
    if sys.platform == "win32":
        import msvcrt

        msvcrt.SetErrorMode(msvcrt.SEM_FAILCRITICALERRORS | msvcrt.SEM_NOGPFAULTERRORBOX)
