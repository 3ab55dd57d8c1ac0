"""The report as annotations of a GitHub workflow.

A line is `::error file=F,title=T::MESSAGE` (GitHub Docs, Workflow commands). In data `%`, carriage return and line feed
are escaped, in properties `:` and `,` as well, so that a name from a model cannot end a command or begin one. A step
has 10 annotations of each kind, the runner drops the others: the tenth says how many there are.
"""

from kvdoctor.findings import Finding
from kvdoctor.report import wording
from kvdoctor.report.document import Report
from kvdoctor.report.places import path_of
from kvdoctor.report.safe import printable, shortened

KINDS = {"error": "error", "warning": "warning", "note": "notice"}
MOST_OF_A_KIND = 10
ESCAPES = {"%": "%25", "\r": "%0D", "\n": "%0A"}
IN_PROPERTIES = {**ESCAPES, ":": "%3A", ",": "%2C"}


def render(report: Report) -> str:
    """One annotation for each finding that counts, one for each check without which a model is not called healthy."""
    return render_all([report])


def render_all(reports: list[Report]) -> str:
    """The annotations of all models: errors, then warnings, then notices, in the order of the reports."""
    lines: dict[str, list[str]] = {kind: [] for kind in KINDS.values()}
    for report in reports:
        for finding in report.findings:
            if finding.known is None:
                lines[KINDS[finding.severity]].append(_finding(report, finding, KINDS[finding.severity]))
        for entry in report.not_checked:
            if entry.essential:
                title, text = f"kvdoctor {entry.code}", f"not checked: {entry.reason}"
                lines["warning"].append(_line("warning", path_of(report), title, text))
    # What is known is no news: it stays in sight behind all that is.
    lines[KINDS["note"]] += [
        _finding(report, finding, KINDS["note"])
        for report in reports
        for finding in report.findings
        if finding.known is not None
    ]
    return "".join(f"{line}\n" for kind, told in lines.items() for line in _fitting(kind, told))


def _fitting(kind: str, lines: list[str]) -> list[str]:
    if len(lines) <= MOST_OF_A_KIND:
        return lines
    more = len(lines) - MOST_OF_A_KIND + 1
    words = f"{more} more of these; the summary of the step and its log have them all"
    return [*lines[: MOST_OF_A_KIND - 1], f"::{kind} title=kvdoctor::{words}"]


def _finding(report: Report, finding: Finding, kind: str) -> str:
    title = f"kvdoctor {finding.code} {finding.name}"
    words = [wording.headline(finding)]
    words += [f"{label}: {text}" if label else text for label, text in wording.evidence(finding)]
    return _line(kind, path_of(report, finding), title, *words)


def _line(kind: str, path: str, title: str, *words: str) -> str:
    properties = f"file={_escaped(printable(path), IN_PROPERTIES)},title={_escaped(printable(title), IN_PROPERTIES)}"
    text = "\n".join(printable(shortened(line, 600)) for line in words)
    return f"::{kind} {properties}::{_escaped(text, ESCAPES)}"


def _escaped(text: str, escapes: dict[str, str]) -> str:
    return "".join(escapes.get(character, character) for character in text)
