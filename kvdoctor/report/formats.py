"""The formats by name: the one place to add one to. Nothing is loaded before a format is asked for.

A format is a module of this package with `render_all(reports)` where one document holds several models, else with
`render(report)` and with `render_gate(document, reports, last)`, since a gate has a page of its own. What they give for
many models is a text, or its parts, each made when it is written.
"""

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    module = _load(name)
    made = module.render_all([report]) if hasattr(module, "render_all") else module.render(report)
    return "".join(_parts(made))


def write_gate(
    document: Callable[[], dict[str, Any]], reports: "Sequence[Report]", last: tuple[str, ...], name: str
) -> Iterator[str]:
    """The reports of a gate in a format, in parts: no more of the reports is in memory than the part that is written.

    `document` makes the JSON document, `last` are the lines about all models.
    """
    module = _load(name)
    own = hasattr(module, "render_gate")
    return _parts(module.render_gate(document, reports, last) if own else module.render_all(reports))


def _parts(made: str | Iterable[str]) -> Iterator[str]:
    return iter([made] if isinstance(made, str) else made)


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"{__package__}.{MODULES[name]}")
