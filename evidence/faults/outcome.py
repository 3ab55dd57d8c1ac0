"""What kvdoctor says of an export that was made sick."""

import re
from dataclasses import dataclass
from pathlib import Path

from evidence.faults.base_models import BASES, Export
from evidence.faults.registry import Fault
from evidence.zoo.making import Maker
from evidence.zoo.tables import ROWS
from kvdoctor.decode.experiments import load
from kvdoctor.diagnose.pipeline import step_test
from kvdoctor.findings import Finding, find_check
from kvdoctor.options import Options
from kvdoctor.report.document import Report
from kvdoctor.runtime.client import Runtime

EXPERIMENTS = {experiment.name for experiment in load()}


@dataclass(frozen=True)
class Outcome:
    """A diagnosis, compared with what was done.

    Attributes:
        found: Whether anything of the fault's severity was found; of something harmless, whether nothing was.
        called: The name of the leading finding, with its severity where that alone is another than the fault's; the
            verdict where nothing was found.
        named: Whether that is the name it must have, at the right severity.
        decided_by: What the leading finding rests on: an experiment, the graph, the file.
        errors: The names of all errors.
        details: Findings and what was not checked, for the reader of a failed test.
    """

    found: bool
    called: str
    named: bool
    decided_by: str
    errors: tuple[str, ...]
    details: str


class Missing(Exception):
    """An export cannot be made here."""


def healthy_export(name: str, maker: Maker) -> Export:
    """Read the export of a base, which is made where it is not committed.

    Raises:
        Missing: it cannot be made.
    """
    base = BASES[name]
    wanted = (base.exporter, base.architecture, "exported")
    row = next(row for row in ROWS if (row.exporter, row.architecture, row.variant) == wanted)
    made = maker.make(row)
    if made.obstacle or made.failure:
        raise Missing(made.obstacle or made.failure)
    return base.read(made.folder)


def treat(fault: Fault, export: Export, folder: Path, runtime: Runtime) -> Outcome:
    """Break the export, and diagnose it."""
    fault.harm(export)
    report = step_test(str(export.write(folder)), Options(consumer=fault.consumer, thorough=fault.thorough), runtime)
    notes = fault.severity == "note"
    findings = [finding for finding in report.findings if finding.severity != "note" or notes]
    details = "\n".join(_details(report))
    errors = tuple(finding.name for finding in findings if finding.severity == "error")
    if not fault.check:
        healthy = not findings and report.verdict == "healthy"
        return Outcome(healthy, findings[0].name if findings else report.verdict, healthy, "", errors, details)
    if notes:
        findings = [f for f in findings if f.name == fault.check] if {f.severity for f in findings} == {"note"} else []
    if not findings:
        return Outcome(False, report.verdict, False, "", errors, details)
    first = findings[0]
    named = (first.name, first.severity) == (fault.check, fault.severity)
    called = f"{first.name} ({first.severity})" if first.name == fault.check and not named else first.name
    return Outcome(True, called, named, _decided_by(first), errors, details)


def _decided_by(finding: Finding) -> str:
    places = (finding.experiment, *(line.partition(":")[0] for line in finding.effects))
    if (experiment := next((place for place in places if place in EXPERIMENTS), None)) is not None:
        return experiment
    check = find_check(finding.name)
    assert check is not None
    if "file" in check.rounds:
        return "the file"
    return "plain-loop" if re.match(r"(decode )?step \d", finding.observed) else "the graph"


def _details(report: Report) -> list[str]:
    lines = [f"{f.severity} {f.name}: {f.where}; {f.cause}; {f.observed}" for f in report.findings]
    return [report.verdict, *lines, *(f"not checked {item.code}: {item.reason}" for item in report.not_checked)]
