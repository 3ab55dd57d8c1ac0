"""A finding on the first screen: a card with the picture of the cache, cause and fix; or a line."""

from collections.abc import Iterator

from rich.text import Text

from kvdoctor.findings import Finding
from kvdoctor.report.safe import cut, shortened
from kvdoctor.report.text_page import STYLES, Page
from kvdoctor.report.wording.alike import FindingGroup, format_places
from kvdoctor.report.wording.cache_lengths import CacheTable
from kvdoctor.report.wording.deciding import list_fixes, name_cause
from kvdoctor.report.wording.finding import format_name, known_reason, list_sources

MARKS = {"error": "\u2717", "warning": "!", "note": "\u00b7"}
LONGEST_FACT = 400


def make_card(page: Page, group: FindingGroup, observed: str, picture: CacheTable | None = None) -> list[Text]:
    """A finding in full: what happens, the picture of the cache, what was `observed`, cause, fix, the other way out."""
    finding = group.first
    place = format_places(group.places)
    if len(group.findings) == 1 and finding.file is not None:
        place = finding.file
    lines = page.head(f"{MARKS[finding.severity]} {format_name(finding)}", place, _style(finding))
    lines += page.lines(f"  {shortened(finding.cause, 300)}", hang=0)
    if picture is not None:
        lines += _draw_cache(page, picture)
    return [*lines, *page.pair_lines(_list_labels(finding, observed))]


def make_line(page: Page, group: FindingGroup) -> list[Text]:
    """A finding in short: its name, where, what happens, and the fix."""
    finding = group.first
    text = f"{MARKS[finding.severity]} {format_name(finding)} ({format_places(group.places)}): {finding.cause}"
    lines = page.lines(shortened(text, 400), _style(finding))
    reason = known_reason(finding)
    label = ("known", reason) if reason is not None else ("fix", finding.repair.command or finding.repair.text)
    return [*lines, *page.pair_lines([(label[0], cut(label[1], LONGEST_FACT))])]


def _style(finding: Finding) -> str:
    return "dim" if finding.known is not None else STYLES[finding.severity]


def _list_labels(finding: Finding, observed: str) -> Iterator[tuple[str, str]]:
    """Label and text: observed, cause, fix, or."""
    if (reason := known_reason(finding)) is not None:
        yield "known", cut(reason, LONGEST_FACT)
    yield "observed", cut(observed, LONGEST_FACT)
    label, text = name_cause(finding)
    yield label, cut(text, LONGEST_FACT)
    # A name such as /model/layers.0/mlp/Mul says the module itself.
    if any(source.line or source.kind for source in finding.sources):
        yield from (("module", cut(text, LONGEST_FACT)) for text in list_sources(finding))
    if finding.confidence == "suspected":
        yield "certainty", "suspected, not confirmed by a run"
    for label, text in list_fixes(finding):
        # A command is only good whole.
        yield label, text if text == finding.repair.command else cut(text, LONGEST_FACT)
    if finding.severity == "error":
        yield "more", f"kvdoctor explain {finding.code}"


def _draw_cache(page: Page, table: CacheTable) -> list[Text]:
    """The steps of the run that shows a finding, with the length of each cache."""
    quote = page.lines(f'        "{table.quote}"', hang=1) if table.quote else []
    return [Text(""), *page.table_lines(table.header, table.rows, indent=4), *quote, Text("")]
