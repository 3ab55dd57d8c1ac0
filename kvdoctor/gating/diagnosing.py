"""One job to one report: the function that runs in this process, in one of its slots, and on a cluster alike."""

import atexit
import threading
from dataclasses import replace

from kvdoctor.child import Limits
from kvdoctor.doctor import step_test
from kvdoctor.errors import KvdoctorError, UnreadableError, UsageError, WorkerDied
from kvdoctor.gating.jobs import Job
from kvdoctor.gating.lost import not_diagnosed
from kvdoctor.report.document import Report
from kvdoctor.runtimes import Runtime

ROOMY_BYTES = 1 << 30
"""A worker that grew beyond this is not kept: what it does not give back would be missed by the next model."""

_WARM = threading.local()


def diagnose(job: Job) -> Report:
    """Step-test a model on the warm worker of this thread.

    A model that takes its own diagnosis down (a file that vanishes or may not be read, a fault of kvdoctor) costs
    itself only: its report says that it was not diagnosed, and why.

    Raises:
        UsageError: what was asked for cannot be carried out, for this model or any other.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    runtime = _warm(job.options.limits)
    try:
        report = step_test(job.path, job.options, runtime, at=job.at)
    except UsageError:
        if job.place.exists():
            raise
        return not_diagnosed(job, f"{job.path!r} is not there any more, or not seen from where it was to be run")
    except (WorkerDied, UnreadableError) as error:
        return not_diagnosed(job, str(error))
    except KvdoctorError:
        raise
    except OSError as error:
        return not_diagnosed(job, f"{job.path!r} cannot be read: {error.strerror or error}")
    except Exception as error:  # a fault of ours must not cost the other models
        release()
        return not_diagnosed(job, f"the diagnosis crashed ({type(error).__name__}: {error}); please report it")
    if runtime.peak_bytes() > ROOMY_BYTES:
        release()
    return replace(report, command="gate")


def release() -> None:
    """End the warm worker of this thread."""
    runtime: Runtime | None = getattr(_WARM, "runtime", None)
    if runtime is not None:
        del _WARM.runtime
        runtime.__exit__()


def _warm(limits: Limits) -> Runtime:
    """The warm worker of this thread, under these limits, with the measuring of its memory begun afresh."""
    runtime: Runtime | None = getattr(_WARM, "runtime", None)
    if runtime is None or runtime.limits != limits:
        release()
        _WARM.runtime = runtime = Runtime(limits)
    runtime.forget_peak()
    return runtime


atexit.register(release)
