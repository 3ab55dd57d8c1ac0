"""For a GitHub workflow: findings as annotations, and the summary of the step.

An annotation is a line `::error file=F,title=T::MESSAGE` (GitHub Docs, Workflow commands). In data `%`, carriage return
and line feed are escaped, in properties `:` and `,` as well, so that a name from a model cannot end a command or begin
one. A step has 10 annotations of each kind, and the runner drops the others: the tenth says how many there are.
"""

import os
from pathlib import Path

from kvdoctor.errors import UsageError
from kvdoctor.findings import Finding
from kvdoctor.report.artifact_paths import path_of
from kvdoctor.report.document import Report
from kvdoctor.report.markdown import render_page
from kvdoctor.report.safe import printable, shortened
from kvdoctor.report.wording.finding import format_headline, list_details

KINDS = {"error": "error", "warning": "warning", "note": "notice"}
MOST_OF_A_KIND = 10
ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
IN_PROPERTIES = {**ESCAPES, ":": "%3A", ",": "%2C"}
SUMMARY_VARIABLE = "GITHUB_STEP_SUMMARY"
MOST_SUMMARY_BYTES = 1 << 20
"""GitHub refuses a longer summary of a step as a whole (GitHub Docs, Workflow commands)."""


def render(report: Report) -> str:
    """One annotation for each finding that counts, and for each essential check that could not run."""
    return render_all([report])


def render_all(reports: list[Report]) -> str:
    """The annotations of all models: errors, then warnings, then notices, in the order of the reports."""
    lines: dict[str, list[str]] = {kind: [] for kind in KINDS.values()}
    for report in reports:
        for finding in report.findings:
            if finding.known is None:
                lines[KINDS[finding.severity]].append(_annotate(report, finding, KINDS[finding.severity]))
        for entry in report.not_checked:
            if entry.essential:
                title, text = f"kvdoctor {entry.code}", f"not checked: {entry.reason}"
                lines["warning"].append(_line("warning", path_of(report), title, text))
    # Known findings are listed last: they must not displace new ones from the ten.
    lines[KINDS["note"]] += [
        _annotate(report, finding, KINDS["note"])
        for report in reports
        for finding in report.findings
        if finding.known is not None
    ]
    return "".join(f"{line}\n" for kind, of_kind in lines.items() for line in _limit(kind, of_kind))


def _limit(kind: str, lines: list[str]) -> list[str]:
    if len(lines) <= MOST_OF_A_KIND:
        return lines
    more = len(lines) - MOST_OF_A_KIND + 1
    words = f"{more} more of these; the summary and the log of the step list all of them"
    return [*lines[: MOST_OF_A_KIND - 1], f"::{kind} title=kvdoctor::{words}"]


def _annotate(report: Report, finding: Finding, kind: str) -> str:
    title = f"kvdoctor {finding.code} {finding.name}"
    words = [format_headline(finding)]
    words += [f"{label}: {text}" if label else text for label, text in list_details(finding)]
    return _line(kind, path_of(report, finding), title, *words)


def _line(kind: str, path: str, title: str, *words: str) -> str:
    properties = f"file={_escape(printable(path), IN_PROPERTIES)},title={_escape(printable(title), IN_PROPERTIES)}"
    text = "\n".join(printable(shortened(line, 600)) for line in words)
    return f"::{kind} {properties}::{_escape(text, ESCAPES)}"


def _escape(text: str, escapes: dict[str, str]) -> str:
    return "".join(escapes.get(character, character) for character in text)


def write_step_summary(verdict: str, reports: list[Report], last: tuple[str, ...]) -> bool:
    """Add the reports of a gate to the summary of the step, where there is one; False where they do not fit.

    Raises:
        UsageError: it cannot be written.
    """
    file = os.environ.get(SUMMARY_VARIABLE)
    if not file:
        return True
    try:
        used = Path(file).stat().st_size if Path(file).exists() else 0
        text = render_page(verdict, reports, last, MOST_SUMMARY_BYTES - used)
        with Path(file).open("ab") as summary:
            summary.write(text.encode("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot write the summary {file!r} ({SUMMARY_VARIABLE}): {error.strerror or error}") from None
    return bool(text)
