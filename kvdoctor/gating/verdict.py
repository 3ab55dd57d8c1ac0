"""The result of a gate. Findings outweigh models that could not be checked; it is healthy if all models are."""

from collections.abc import Sequence
from typing import Any

from kvdoctor.errors import Unhealthy
from kvdoctor.gating.baseline_match import BaselineStatus
from kvdoctor.gating.jobs import GateJob
from kvdoctor.records import record
from kvdoctor.report.document import EXIT_HEALTHY, GATE_SCHEMA, Report, exit_code, exit_code_of_all
from kvdoctor.report.wording.summary import format_gate_verdict


@record
class GateResult:
    """The verdict of a gate, the report of each model in the order of the jobs, and the exit code.

    `baseline` is the status of the baseline, `policy` the path of the policy file.
    """

    verdict: str
    reports: tuple[Report, ...]
    exit_code: int
    baseline: BaselineStatus | None = None
    policy: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        reports = [report.to_dict() for report in self.reports]
        return {
            "schema": GATE_SCHEMA,
            "verdict": self.verdict,
            "policy": self.policy,
            "baseline": None if self.baseline is None else self.baseline.to_dict(),
            "reports": reports,
        }

    def summary_lines(self) -> tuple[str, ...]:
        """The last lines of the text: all models together, the policy, and the baseline."""
        lines = []
        several, cached = len(self.reports) > 1, any(report.measured.get("cached") for report in self.reports)
        if several or cached or any(finding.known for report in self.reports for finding in report.findings):
            lines.append(format_gate_verdict(self.verdict, self.reports))
        if self.policy is not None:
            lines.append(f"policy: {self.policy}")
        if self.baseline is not None:
            lines += [f"baseline {self.baseline.file}: {line}" for line in self.baseline.lines()]
        return tuple(lines)

    def __str__(self) -> str:
        """The reports in short: verdicts and the findings that count. `kvdoctor.render` writes all of them."""
        return "\n".join([*map(str, self.reports), *self.summary_lines()])

    def raise_for_findings(self) -> None:
        """Raise an error unless the command line would end with exit code 0.

        Raises:
            Unhealthy: a model has findings that count, or could not be checked; the message lists all of them.
        """
        if self.exit_code == EXIT_HEALTHY:
            return
        messages = []
        for report in self.reports:
            try:
                report.raise_for_findings()
            except Unhealthy as reason:
                messages.append(str(reason))
        raise Unhealthy("\n".join(messages))


def judge(jobs: Sequence[GateJob], reports: Sequence[Report]) -> GateResult:
    """Judge the reports, each by the `fail_on` option of its job."""
    codes = [exit_code(report, job.options.fail_on) for job, report in zip(jobs, reports, strict=True)]
    verdicts = [report.verdict for report in reports]
    verdict = next((v for v in ("unhealthy", "incomplete", "nothing-found") if v in verdicts), "healthy")
    return GateResult(verdict, tuple(reports), exit_code_of_all(codes))
