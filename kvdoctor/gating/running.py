"""Where the models of a gate are run: one after the other, on one warm worker."""

from collections.abc import Sequence
from dataclasses import replace

from kvdoctor.doctor import step_test
from kvdoctor.gating.jobs import Job
from kvdoctor.report.document import Report
from kvdoctor.runtimes import Runtime


def diagnosed(jobs: Sequence[Job]) -> list[Report]:
    """The report of each job, in the order of the jobs.

    Raises:
        UsageError: there is nothing at one of the paths.
        KvdoctorError: the worker cannot start ONNX Runtime.
    """
    with Runtime(jobs[0].options.limits) as runtime:
        reports = [step_test(job.path, job.options, runtime) for job in jobs]
    return [replace(report, command="gate") for report in reports]
