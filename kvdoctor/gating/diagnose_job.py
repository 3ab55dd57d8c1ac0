"""One job to one report: runs in this process, in a process of the pool, and on a cluster.

A model that could not be diagnosed has a report as well: it is never healthy, and never stops the other models.
"""

import atexit
import threading
from dataclasses import replace

from kvdoctor.diagnose.build_report import environment
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.diagnose.pipeline import RunPlan, step_test
from kvdoctor.diagnose.run_checks import CheckResults, FindingOrigin, make_finding
from kvdoctor.errors import KvdoctorError, UnreadableError, UsageError, WorkerDied, describe_crash
from kvdoctor.findings import Advice, Fault, NotChecked, find_check
from kvdoctor.gating.jobs import WORKERS_LOST, GateJob
from kvdoctor.repair.check_advice import check_advice
from kvdoctor.report.document import Report, decide
from kvdoctor.report.facts import ModelFacts
from kvdoctor.runtime.client import Runtime

MAX_IDLE_BYTES = 1 << 30
"""A worker that grew beyond this size is not reused: the next model would lack the memory that it does not return."""
PROCESS_LOST = "worker-died"
GOLDEN_DIFFERS = "golden-differs"

_THREAD = threading.local()


def diagnose_job(job: GateJob) -> Report:
    """Step-test a model in the worker of this thread, which is reused.

    A model whose diagnosis fails (a file is removed or not readable, a bug in kvdoctor) affects only its own report,
    which says that it was not diagnosed, and why.

    Raises:
        UsageError: the options cannot be carried out, for this model or any other.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    runtime: Runtime | None = getattr(_THREAD, "runtime", None)
    if runtime is None or runtime.limits != job.options.limits:
        release_runtime()
        _THREAD.runtime = runtime = Runtime(job.options.limits, reads=job.reads)
    runtime.forget_peak()
    try:
        report = step_test(job.path, job.options, runtime, RunPlan(job.at, check_advice=check_advice))
    except UsageError:
        if job.location.exists():
            raise
        return report_not_diagnosed(job, f"{job.path!r} was removed, or is not visible where it was to run")
    except (WorkerDied, UnreadableError) as error:
        return report_not_diagnosed(job, str(error))
    except KvdoctorError:
        raise
    except OSError as error:
        return report_not_diagnosed(job, f"{job.path!r} cannot be read: {error.strerror or error}")
    except Exception as error:  # a bug of ours must not stop the other models
        release_runtime()
        return report_not_diagnosed(job, describe_crash("the diagnosis", error))
    if lost := runtime.workers_lost():
        report = replace(report, measured={**report.measured, WORKERS_LOST: lost})
    if runtime.peak_bytes() > MAX_IDLE_BYTES:
        release_runtime()
    return replace(report, command="gate")


def inspect_job(job: GateJob) -> Report:
    """Inspect a model without running it. The report never says healthy. Raises UsageError: the path does not exist."""
    report = inspect(job.path, job.options, check_advice)
    options, check, left = job.options, find_check(GOLDEN_DIFFERS), report.not_checked
    if options.against is not None and check is not None and options.selection.takes(check.code, check.name):
        # A policy that is shared with gates that run models may name golden numbers.
        why = f"not compared with {options.against}, which the policy names: --static runs nothing"
        left = (*left, NotChecked(None, check.code, why))
    return replace(report, command="gate", arguments={**report.arguments, "static": True}, not_checked=left)


def release_runtime() -> None:
    """End the worker of this thread."""
    runtime: Runtime | None = getattr(_THREAD, "runtime", None)
    if runtime is not None:
        del _THREAD.runtime
        runtime.__exit__()


def report_not_diagnosed(job: GateJob, reason: str) -> Report:
    """The report that says why nothing was checked."""
    return _report(job, CheckResults(not_checked=(NotChecked(None, "*", reason, essential=True),)))


def report_lost_process(job: GateJob, how: str, times: int) -> Report:
    """The report of a model whose process was lost this many times; `how` says how it ended the last time."""
    fault = Fault(
        severity="error",
        subject=(job.path,),
        where="the diagnosis as a whole",
        declared="a report",
        observed=f"the process of the diagnosis was lost {times} times; the last time, {how}",
        cause="reading or running this model ends the process that does it, or there is not enough memory",
        repair=Advice("caller", "run it alone where more memory is free; if it ends again, please report it"),
    )
    selection, check = job.options.selection, find_check(PROCESS_LOST)
    if check is None or not selection.takes(check.code, check.name):
        return report_not_diagnosed(job, fault.observed)
    return _report(job, CheckResults(findings=(make_finding(check, fault, FindingOrigin()),)))


def _report(job: GateJob, results: CheckResults) -> Report:
    return Report(
        command="gate",
        arguments=job.options.as_arguments(),
        seed=job.options.seed,
        verdict=decide("gate", results.findings, results.not_checked, job.options.fail_on),
        environment=environment(),
        model=ModelFacts(job.path, ()),
        findings=results.findings,
        not_checked=results.not_checked,
    )


atexit.register(release_runtime)
