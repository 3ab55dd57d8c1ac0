"""The result of a gate, and the JSON Schemas of its documents: the result, and the baseline.

Findings outweigh models that could not be checked; a gate is healthy if all models are.
"""

from collections.abc import Sequence
from typing import Any, get_args

from kvdoctor.errors import Unhealthy
from kvdoctor.gating.baseline import SCHEMA as BASELINE_SCHEMA
from kvdoctor.gating.baseline import BaselineEntry, BaselineStatus
from kvdoctor.gating.jobs import LeftOut
from kvdoctor.records import record, to_plain
from kvdoctor.report.document import EXIT_HEALTHY, GATE_SCHEMA, SCHEMA, Report, exit_code, exit_code_of_all
from kvdoctor.report.facts import UNDIAGNOSED, Verdict
from kvdoctor.report.schema import DIALECT, define_types, document_schema
from kvdoctor.report.wording.summary import format_gate_verdict, name_worst

MOST_LEFT_OUT = 12


@record
class GateResult:
    """The verdict of a gate, the report of each model in the order of the jobs, and the exit code.

    `baseline` is the status of the baseline, `policy` the path of the policy file, `left_out` what was not checked.
    """

    verdict: str
    reports: Sequence[Report]
    exit_code: int
    baseline: BaselineStatus | None = None
    policy: str | None = None
    left_out: tuple[LeftOut, ...] = ()

    def __repr__(self) -> str:
        """One line: the verdict."""
        return f"<GateResult: {format_gate_verdict(self.verdict, self.reports)}>"

    def to_dict(self) -> dict[str, Any]:
        """The JSON document."""
        document = self.outline()
        return {**document, "reports": list(document["reports"])}

    def outline(self) -> dict[str, Any]:
        """The JSON document, with each report made when it is reached."""
        return {
            "schema": GATE_SCHEMA,
            "verdict": self.verdict,
            "policy": self.policy,
            "baseline": to_plain(self.baseline),
            "left_out": to_plain(self.left_out),
            "reports": (report.to_dict() for report in self.reports),
        }

    def summary_lines(self) -> tuple[str, ...]:
        """The last lines of the text: all models together, the policy, and the baseline."""
        lines = []
        several, cached = len(self.reports) > 1, any(report.measured.get("cached") for report in self.reports)
        if several or cached or any(finding.known for report in self.reports for finding in report.findings):
            lines.append(format_gate_verdict(self.verdict, self.reports))
        lines += [f"left out: {one.path} ({one.reason})" for one in self.left_out[:MOST_LEFT_OUT]]
        if len(self.left_out) > MOST_LEFT_OUT:
            lines.append(f"left out: {len(self.left_out) - MOST_LEFT_OUT} more (--format json has all)")
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
        if self.exit_code != EXIT_HEALTHY:
            failed = [report for report in self.reports if exit_code(report, report.fail_on) != EXIT_HEALTHY]
            raise Unhealthy("\n".join(f"{name_worst(report)}\n{report}" for report in failed))


def judge(reports: Sequence[Report]) -> GateResult:
    """Judge the reports, each by its `fail_on`; what may stay incomplete decides only where there is nothing else."""
    found = [(report.verdict, report.allowance is None) for report in reports]
    verdicts = [verdict for verdict, decides in found if decides] or [verdict for verdict, _ in found]
    verdict = next((v for v in ("unhealthy", *UNDIAGNOSED, "nothing-found") if v in verdicts), "healthy")
    return GateResult(verdict, reports, exit_code_of_all(reports))


def gate_schema() -> dict[str, Any]:
    """The schema of `gate --format json`."""
    report = document_schema(Report, SCHEMA)
    definitions = report.pop("$defs")
    del report["$schema"]
    return {
        "$schema": DIALECT,
        "title": GATE_SCHEMA,
        "type": "object",
        "properties": {
            "schema": {"const": GATE_SCHEMA},
            "policy": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "baseline": {"anyOf": [{"$ref": "#/$defs/BaselineStatus"}, {"type": "null"}]},
            "left_out": {"type": "array", "items": {"$ref": "#/$defs/LeftOut"}},
            "verdict": {"enum": list(get_args(Verdict))},
            "reports": {"type": "array", "items": report},
        },
        "required": ["schema", "verdict", "reports"],
        "$defs": {**definitions, **define_types(BaselineStatus), **define_types(LeftOut)},
    }


def baseline_schema() -> dict[str, Any]:
    """The schema of a baseline's file."""
    definitions = define_types(BaselineEntry)
    properties = definitions["BaselineEntry"]["properties"]
    properties["reason"]["pattern"] = r"\S"
    properties["until"] = {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]}
    entries = {"type": "array", "items": {"$ref": "#/$defs/BaselineEntry"}}
    return {
        "$schema": DIALECT,
        "title": BASELINE_SCHEMA,
        "type": "object",
        "properties": {"schema": {"const": BASELINE_SCHEMA}, "entries": entries},
        "required": ["schema", "entries"],
        "additionalProperties": False,
        "$defs": definitions,
    }
