"""The formats by name, and the console that text goes to."""

import io
import sys

from rich.console import Console

from kvdoctor.report import machine, markdown, text
from kvdoctor.report.document import Report

LOG_WIDTH = 120


def rendered(report: Report, name: str) -> str:
    """The report in a format, as one text without colour."""
    if name == "text":
        page = io.StringIO()
        text.render(report, Console(file=page, width=text.PIPE_WIDTH, no_color=True, highlight=False))
        return page.getvalue()
    return machine.render(report) if name == "json" else markdown.render(report)


def rendered_gate(verdict: str, reports: list[Report], name: str) -> str:
    """The reports of a gate in a format: one JSON document, or one text after the other."""
    if name == "json":
        return machine.render_gate(verdict, reports)
    return "\n".join(rendered(report, name) for report in reports)


def console(color: str) -> Console:
    """Standard output: as wide as the terminal; in a pipe one line per fact, whatever its length."""
    terminal = sys.stdout.isatty()
    colored = terminal or color == "always"
    return Console(
        force_terminal=colored,
        color_system=None if color == "never" else "auto",
        width=None if terminal else LOG_WIDTH if colored else text.PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )
