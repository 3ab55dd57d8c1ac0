"""The report as SARIF 2.1.0 (OASIS), for code scanning.

A model is no text: a result has no region, but names the node or value as a logical location. GitHub knows a finding
again by `partialFingerprints`, shows 5,000 results of a run and takes 25,000 (Code scanning, SARIF support).
"""

from collections.abc import Iterator
from typing import Any

from kvdoctor import __version__
from kvdoctor.findings import Check, Finding, NotChecked, all_checks
from kvdoctor.report import machine, wording
from kvdoctor.report.document import Report
from kvdoctor.report.places import path_of, uri
from kvdoctor.report.safe import printable, shortened

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
HOME = "https://github.com/kvdoctor/kvdoctor"
MOST_RESULTS = 25_000
LONGEST_NAME, LONGEST_TEXT = 200, 4000
FINGERPRINT = "kvdoctorFinding/v1"


def render(report: Report) -> str:
    """One run with the findings of one model."""
    return render_all([report])


def render_all(reports: list[Report]) -> str:
    """One run with the findings of all models: code scanning takes few runs in a file, and many results in a run."""
    known = {check.code: check for check in all_checks()}
    found = [(report, finding) for report in reports for finding in report.findings][:MOST_RESULTS]
    codes = sorted({finding.code for _, finding in found})
    run = {
        "tool": {
            "driver": {
                "name": "kvdoctor",
                "version": __version__,
                "informationUri": HOME,
                "rules": [_rule(known[code]) for code in codes],
            }
        },
        "automationDetails": {"id": f"kvdoctor/{reports[0].command if reports else 'gate'}"},
        "columnKind": "unicodeCodePoints",
        "invocations": [_invocation(reports)],
        "results": _suppressed(
            [_result(report, finding, codes.index(finding.code)) for report, finding in found],
            [finding for _, finding in found],
        ),
    }
    return machine.dump({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]})


def _rule(check: Check) -> dict[str, Any]:
    return {
        "id": check.code,
        "name": "".join(word.capitalize() for word in check.name.split("-")),
        "shortDescription": {"text": check.summary},
        "fullDescription": {"text": check.summary},
        "help": {"text": check.documentation},
        "properties": {"tags": ["onnx", "kv-cache", check.name]},
    }


def _result(report: Report, finding: Finding, rule: int) -> dict[str, Any]:
    words = [wording.headline(finding)]
    words += [f"{label}: {text}" if label else text for label, text in wording.evidence(finding)]
    subjects = list(dict.fromkeys((finding.where, *finding.subject)))
    return {
        "ruleId": finding.code,
        "ruleIndex": rule,
        "level": finding.severity,
        "message": {"text": "\n".join(_text(line, LONGEST_TEXT) for line in words)},
        "locations": [
            {
                "physicalLocation": {"artifactLocation": {"uri": uri(path_of(report, finding))}},
                "logicalLocations": [{"fullyQualifiedName": _text(name)} for name in subjects],
            }
        ],
        "partialFingerprints": {FINGERPRINT: f"{uri(path_of(report, finding))}:{finding.fingerprint}"},
        "properties": {"confidence": finding.confidence, "stack": _text(finding.stack or "")},
    }


def _suppressed(results: list[dict[str, Any]], findings: list[Finding]) -> list[dict[str, Any]]:
    """Results with their suppressions: where one of a run has some, all must say whether they have (SARIF 3.27.23)."""
    reasons = [wording.known_reason(finding) for finding in findings]
    if not any(reason is not None for reason in reasons):
        return results
    return [
        {**result, "suppressions": [] if reason is None else [_suppression(reason)]}
        for result, reason in zip(results, reasons, strict=True)
    ]


def _suppression(reason: str) -> dict[str, Any]:
    return {"kind": "external", "status": "accepted", "justification": _text(reason, LONGEST_TEXT)}


def _invocation(reports: list[Report]) -> dict[str, Any]:
    """What could not be checked is no result, and must not be lost: it is told as a notification of the tool."""
    return {
        "executionSuccessful": not any(entry.essential for report in reports for entry in report.not_checked),
        "toolExecutionNotifications": [
            note for report in reports for entry in report.not_checked for note in _notifications(report, entry)
        ],
    }


def _notifications(report: Report, entry: NotChecked) -> Iterator[dict[str, Any]]:
    stack = f" ({entry.stack})" if entry.stack else ""
    yield {
        "level": "warning" if entry.essential else "note",
        "message": {"text": _text(f"not checked: {entry.code}{stack}: {entry.reason}", LONGEST_TEXT)},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri(path_of(report))}}}],
    }


def _text(text: str, longest: int = LONGEST_NAME) -> str:
    return printable(shortened(text, longest))
