"""The formats by name, and the console that text goes to."""

import importlib
import io
import sys
from typing import Any

from rich.console import Console

from kvdoctor.report import machine, text
from kvdoctor.report.document import Report

LOG_WIDTH = 120


def rendered(report: Report, name: str) -> str:
    """The report in a format, as one text without colour."""
    return rendered_all([report], name)


def rendered_all(reports: list[Report], name: str) -> str:
    """Several reports in a format: one document where the format has one for all, else one text after the other.

    A format is a module of this package, with `render`, and `render_all` where one document holds many models.
    """
    if name == "json":
        return "\n".join(machine.render(report) for report in reports)
    if name == "text":
        return "\n".join(_plain(report) for report in reports)
    module = importlib.import_module(f"{__package__}.{name}")
    if hasattr(module, "render_all"):
        return str(module.render_all(reports))
    return "\n".join(module.render(report) for report in reports)


def rendered_gate(document: dict[str, Any], reports: list[Report], name: str) -> str:
    """The reports of a gate in a format; `document` is what JSON holds."""
    return machine.dump(document) if name == "json" else rendered_all(reports, name)


def _plain(report: Report) -> str:
    page = io.StringIO()
    text.render(report, Console(file=page, width=text.PIPE_WIDTH, no_color=True, highlight=False))
    return page.getvalue()


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
