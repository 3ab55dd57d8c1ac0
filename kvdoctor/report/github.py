"""The report as annotations of a GitHub workflow, and the summary of its step.

A line is `::error file=F,title=T::MESSAGE` (GitHub Docs, Workflow commands). In data `%`, carriage return and line feed
are escaped, in properties `:` and `,` as well, so that a name from a model cannot end a command or begin one.
"""

import os
from pathlib import Path

from kvdoctor.findings import Finding
from kvdoctor.report import markdown, wording
from kvdoctor.report.document import Report
from kvdoctor.report.places import path_of
from kvdoctor.report.safe import printable, shortened

COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}
SUMMARY = "GITHUB_STEP_SUMMARY"
MOST_SUMMARY = 1 << 20
"""Bytes: GitHub refuses a longer summary of a step."""
ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
IN_PROPERTIES = {**ESCAPES, ":": "%3A", ",": "%2C"}


def render(report: Report) -> str:
    """One annotation for each finding, one for each check without which a model is not called healthy."""
    return render_all([report])


def render_all(reports: list[Report]) -> str:
    """The annotations of all models, errors before warnings before notes in each."""
    return "".join(f"{line}\n" for report in reports for line in _lines(report))


def write_summary(reports: list[Report]) -> None:
    """Add the reports to the summary of the step, where there is one.

    Raises:
        OSError: it cannot be written.
    """
    file = os.environ.get(SUMMARY)
    if file:
        pages = "\n".join(markdown.render(report) for report in reports)
        cut = pages.encode("utf-8")[: MOST_SUMMARY - 200].decode("utf-8", "ignore")
        with Path(file).open("a", encoding="utf-8") as summary:
            summary.write(cut if cut == pages else f"{cut}\n\n(cut: the whole report is in the log)\n")


def _lines(report: Report) -> list[str]:
    lines = [_finding(report, finding) for finding in report.findings]
    open_ends = (entry for entry in report.not_checked if entry.essential)
    return lines + [
        _line("warning", path_of(report), f"kvdoctor {entry.code}", f"not checked: {entry.reason}")
        for entry in open_ends
    ]


def _finding(report: Report, finding: Finding) -> str:
    title = f"kvdoctor {finding.code} {finding.name}"
    words = [wording.headline(finding)]
    words += [f"{label}: {text}" if label else text for label, text in wording.evidence(finding)]
    text = "\n".join(printable(shortened(line, 600)) for line in words)
    command = COMMANDS["note" if finding.known is not None else finding.severity]
    return _line(command, path_of(report, finding), title, text)


def _line(command: str, path: str, title: str, text: str) -> str:
    properties = f"file={_escaped(path, IN_PROPERTIES)},title={_escaped(title, IN_PROPERTIES)}"
    lines = "\n".join(printable(shortened(line, 1200)) for line in text.split("\n"))
    return f"::{command} {properties}::{_escaped(lines, ESCAPES)}"


def _escaped(text: str, escapes: dict[str, str]) -> str:
    text = text if escapes is ESCAPES else printable(text)
    return "".join(escapes.get(character, character) for character in text)
