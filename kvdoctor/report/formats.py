"""The formats by name: the one place to add one to. Nothing is loaded before a format is asked for.

A format is a module of this package. It has `render(report)`; `render_all(reports)` where one document holds many
models, else one text follows the other; `render_gate(document, reports, last)` where a gate says more than its reports.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from kvdoctor.report.document import Report

MODULES = {
    "text": "plain_text",
    "json": "machine",
    "markdown": "markdown",
    "html": "html",
    "sarif": "sarif",
    "junit": "junit",
    "github": "github",
}
FORMATS = tuple(MODULES)
LOG_WIDTH = 120


def rendered(report: "Report", name: str) -> str:
    """The report in a format, as one text without colour."""
    return str(_module(name).render(report))


def rendered_all(reports: "list[Report]", name: str) -> str:
    """Several reports in a format: one document where the format has one for all, else one text after the other."""
    module = _module(name)
    if hasattr(module, "render_all"):
        return str(module.render_all(reports))
    return "\n".join(module.render(report) for report in reports)


def rendered_gate(
    document: "Callable[[], dict[str, Any]]", reports: "list[Report]", last: tuple[str, ...], name: str
) -> str:
    """The reports of a gate in a format; `document` makes what JSON holds, `last` what is said of all models."""
    module = _module(name)
    if hasattr(module, "render_gate"):
        return str(module.render_gate(document, reports, last))
    return rendered_all(reports, name)


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{MODULES[name]}")


def console(color: str) -> "Console":
    """Standard output: as wide as the terminal; in a pipe one line per fact, whatever its length."""
    from rich.console import Console

    from kvdoctor.report.text import PIPE_WIDTH

    terminal = sys.stdout.isatty()
    colored = terminal or color == "always"
    return Console(
        force_terminal=colored,
        color_system=None if color == "never" else "auto",
        width=None if terminal else LOG_WIDTH if colored else PIPE_WIDTH,
        highlight=False,
        markup=False,
        emoji=False,
    )
