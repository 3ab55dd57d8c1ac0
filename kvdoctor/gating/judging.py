"""The verdict over many models: findings weigh more than what could not be checked; healthy is only what all are."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvdoctor.gating.jobs import Job
from kvdoctor.report.document import EXIT_FINDINGS, EXIT_HEALTHY, EXIT_INCOMPLETE, Report, exit_code


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict of a gate, the report of each model in the order of the jobs, and the exit code."""

    verdict: str
    reports: tuple[Report, ...]
    exit_code: int


def judged(jobs: Sequence[Job], reports: Sequence[Report]) -> Judged:
    """Judge the reports, each by what its job fails on."""
    codes = [exit_code(report, job.options.fail_on) for job, report in zip(jobs, reports, strict=True)]
    verdicts = [report.verdict for report in reports]
    verdict = next((v for v in ("unhealthy", "incomplete", "nothing-found") if v in verdicts), "healthy")
    code = next((code for code in (EXIT_FINDINGS, EXIT_INCOMPLETE) if code in codes), EXIT_HEALTHY)
    return Judged(verdict, tuple(reports), code)
