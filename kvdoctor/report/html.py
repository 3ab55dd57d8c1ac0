"""The report as one HTML page: no script, nothing loaded from anywhere, every text escaped (docs/html.md)."""

from collections.abc import Callable
from typing import Any

from kvdoctor.report.document import Report
from kvdoctor.report.page import gate
from kvdoctor.report.page import report as one
from kvdoctor.report.page.blocks import Place
from kvdoctor.report.page.shell import page


def render(report: Report) -> str:
    """The whole page of one report."""
    sections = list(one.parts(report, Place()))
    links = [(name, title) for name, title, _ in sections]
    title = f"{report.verdict}: kvdoctor {report.command} {report.model.path[:200]}"
    return page(title, links, one.head(report, Place(level=1)), [content for _, _, content in sections])


def render_gate(document: Callable[[], dict[str, Any]], reports: list[Report], last: tuple[str, ...]) -> str:
    """The page of a gate: an index of the models, then each; one model needs no index."""
    if len(reports) == 1 and not last:
        return render(reports[0])
    return gate.render(document()["verdict"], reports, last)
