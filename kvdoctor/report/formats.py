"""The formats by name: the one place to add one to. Nothing is loaded before a format is asked for.

A format is a module of this package with `render_all(reports)` where one document holds several models, else with
`render(report)`, and one text follows the other; with `render_gate(document, reports, last)` where a gate has a page of
its own.
"""

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdoctor.report.document import Report

MODULES = {
    "text": "text",
    "json": "json_format",
    "markdown": "markdown",
    "html": "html",
    "sarif": "sarif",
    "junit": "junit",
    "github": "github",
}
FORMATS = tuple(MODULES)
SUFFIXES = {
    ".txt": "text",
    ".json": "json",
    ".md": "markdown",
    ".html": "html",
    ".htm": "html",
    ".sarif": "sarif",
    ".xml": "junit",
}
"""The format of a file that is given without one, by its suffix."""


def render(report: "Report", name: str) -> str:
    """The report in a format, as one text without color."""
    return render_all([report], name)


def render_all(reports: "list[Report]", name: str) -> str:
    """Several reports in a format: one document where the format has one for all, else one text after the other."""
    module = _load(name)
    if hasattr(module, "render_all"):
        return str(module.render_all(reports))
    return "\n".join(module.render(report) for report in reports)


def render_gate(
    document: Callable[[], dict[str, Any]], reports: "list[Report]", last: tuple[str, ...], name: str
) -> str:
    """The reports of a gate in a format; `document` makes the JSON document, `last` are the lines about all models."""
    module = _load(name)
    if hasattr(module, "render_gate"):
        return str(module.render_gate(document, reports, last))
    return render_all(reports, name)


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{MODULES[name]}")
