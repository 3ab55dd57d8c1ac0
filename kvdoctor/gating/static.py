"""A gate that runs nothing: what can be read from the files alone, in the time that a commit may take."""

from collections.abc import Sequence
from dataclasses import replace

from kvdoctor.doctor import inspect
from kvdoctor.gating.jobs import Job
from kvdoctor.report.document import Report


def inspected(jobs: Sequence[Job]) -> list[Report]:
    """The report of each job, in the order of the jobs, of which none says healthy.

    Raises:
        UsageError: there is nothing at one of the paths.
    """
    return [_of_gate(inspect(job.path, job.options)) for job in jobs]


def _of_gate(report: Report) -> Report:
    return replace(report, command="gate", arguments={**report.arguments, "static": True})
