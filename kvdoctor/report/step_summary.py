"""The summary of a step in a GitHub workflow: Markdown that is added to the file in `GITHUB_STEP_SUMMARY`.

A table of all models, then the report of each that is not healthy. GitHub refuses a summary above 1 MiB as a whole, so
reports that do not fit are left out whole, and named.
"""

import os
from pathlib import Path

from kvdoctor.errors import UsageError
from kvdoctor.report import markdown, wording
from kvdoctor.report.document import Report
from kvdoctor.report.safe import code
from kvdoctor.report.safe import markdown as escaped

VARIABLE = "GITHUB_STEP_SUMMARY"
MOST_BYTES = 1 << 20
MOST_ROWS = 2000
SPARE = 4096


def page(verdict: str, reports: list[Report], room: int = MOST_BYTES) -> str:
    """The summary, of at most `room` bytes."""
    healthy = sum(report.verdict == "healthy" for report in reports)
    lines = [f"## kvdoctor: {verdict}", "", f"{healthy} of {len(reports)} models healthy.", ""]
    rows = [[code(report.model.path), report.verdict, escaped(wording.counts(report))] for report in reports]
    rows.sort(key=lambda row: row[1] == "healthy")
    text = "\n".join([*lines, *markdown.table(["model", "verdict", "findings"], rows[:MOST_ROWS])]) + "\n"
    if len(rows) > MOST_ROWS:
        text += f"\n... and {len(rows) - MOST_ROWS} models more\n"
    left, used = 0, len(text.encode("utf-8"))
    for report in (report for report in reports if report.verdict != "healthy"):
        part = "\n" + markdown.within(markdown.MOST_CHARACTERS, report)
        size = len(part.encode("utf-8"))
        if used + size > room - SPARE:
            left += 1
            continue
        text, used = text + part, used + size
    if left:
        text += f"\n{left} reports did not fit here; the log has them.\n"
    return text if len(text.encode("utf-8")) <= room else ""


def write(verdict: str, reports: list[Report]) -> None:
    """Add the summary to that of the step, where there is one.

    Raises:
        UsageError: it cannot be written.
    """
    file = os.environ.get(VARIABLE)
    if not file:
        return
    try:
        there = Path(file).stat().st_size if Path(file).exists() else 0
        with Path(file).open("ab") as summary:
            summary.write(page(verdict, reports, MOST_BYTES - there).encode("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot write the summary {file!r} ({VARIABLE}): {error.strerror or error}") from None
