"""The summary of a step in a GitHub workflow: Markdown that is added to the file in `GITHUB_STEP_SUMMARY`."""

import os
from pathlib import Path

from kvdoctor.errors import UsageError
from kvdoctor.report import gate_page
from kvdoctor.report.document import Report

VARIABLE = "GITHUB_STEP_SUMMARY"
MOST_BYTES = 1 << 20
"""GitHub refuses a longer summary of a step as a whole (GitHub Docs, Workflow commands)."""


def write(verdict: str, reports: list[Report], last: tuple[str, ...]) -> bool:
    """Add the reports of a gate to the summary of the step, where there is one; False where they do not fit.

    Raises:
        UsageError: it cannot be written.
    """
    file = os.environ.get(VARIABLE)
    if not file:
        return True
    try:
        there = Path(file).stat().st_size if Path(file).exists() else 0
        text = gate_page.page(verdict, reports, last, MOST_BYTES - there)
        with Path(file).open("ab") as summary:
            summary.write(text.encode("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot write the summary {file!r} ({VARIABLE}): {error.strerror or error}") from None
    return bool(text)
