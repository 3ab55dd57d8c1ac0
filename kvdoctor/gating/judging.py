"""The verdict over many models: findings weigh more than what could not be checked; healthy is only what all are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvdoctor.errors import Unhealthy
from kvdoctor.gating.jobs import Job
from kvdoctor.gating.knowing import Told
from kvdoctor.report import wording
from kvdoctor.report.document import EXIT_FINDINGS, EXIT_HEALTHY, EXIT_INCOMPLETE, GATE_SCHEMA, Report, exit_code


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict of a gate, the report of each model in the order of the jobs, and the exit code.

    `baseline` is what is to be told of one, `policy` the file that was followed.
    """

    verdict: str
    reports: tuple[Report, ...]
    exit_code: int
    baseline: Told | None = None
    policy: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The document as it is written to JSON."""
        reports = [report.to_dict() for report in self.reports]
        told = None if self.baseline is None else self.baseline.to_dict()
        more = {"policy": self.policy, "baseline": told}
        return {"schema": GATE_SCHEMA, "verdict": self.verdict, **more, "reports": reports}

    def last_lines(self) -> tuple[str, ...]:
        """What is said of all models together, of the policy, and of the baseline."""
        lines = []
        several, kept = len(self.reports) > 1, any(report.measured.get("cached") for report in self.reports)
        if several or kept or any(finding.known for report in self.reports for finding in report.findings):
            lines.append(wording.gate_line(self.verdict, self.reports))
        if self.policy is not None:
            lines.append(f"policy: {self.policy}")
        if self.baseline is not None:
            lines += [f"baseline {self.baseline.file}: {line}" for line in self.baseline.lines()]
        return tuple(lines)

    def __str__(self) -> str:
        """The reports as the command line prints them into a pipe."""
        from kvdoctor.report import formats

        return formats.rendered_gate(self.to_dict, list(self.reports), self.last_lines(), "text")

    def raise_for_findings(self) -> None:
        """Do nothing where the command line would end with exit code 0.

        Raises:
            Unhealthy: a model has findings that count, or could not be checked; the message has all of them in words.
        """
        if self.exit_code == EXIT_HEALTHY:
            return
        said = []
        for report in self.reports:
            try:
                report.raise_for_findings()
            except Unhealthy as reason:
                said.append(str(reason))
        raise Unhealthy("\n".join(said))


def judged(jobs: Sequence[Job], reports: Sequence[Report]) -> Judged:
    """Judge the reports, each by what its job fails on."""
    codes = [exit_code(report, job.options.fail_on) for job, report in zip(jobs, reports, strict=True)]
    verdicts = [report.verdict for report in reports]
    verdict = next((v for v in ("unhealthy", "incomplete", "nothing-found") if v in verdicts), "healthy")
    code = next((code for code in (EXIT_FINDINGS, EXIT_INCOMPLETE) if code in codes), EXIT_HEALTHY)
    return Judged(verdict, tuple(reports), code)
