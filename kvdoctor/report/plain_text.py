"""The report as text without colour, one fact a line: what `text` is in a file and in a pipe."""

import io
from collections.abc import Callable
from typing import Any

from rich.console import Console

from kvdoctor.report import text
from kvdoctor.report.document import Report


def render(report: Report) -> str:
    """One report."""
    page, console = _page()
    text.render(report, console)
    return page.getvalue()


def render_gate(_document: Callable[[], dict[str, Any]], reports: list[Report], last: tuple[str, ...]) -> str:
    """Many models: those that are healthy in a line each, then what is said of all."""
    page, console = _page()
    text.render_gate(reports, last, console)
    return page.getvalue()


def _page() -> tuple[io.StringIO, Console]:
    page = io.StringIO()
    return page, Console(file=page, width=text.PIPE_WIDTH, no_color=True, highlight=False, markup=False, emoji=False)
