"""Writes blocks as Markdown, to paste into an issue. Every name is data, also after GitHub has rendered the text."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Any

from kvdoctor.findings import Finding
from kvdoctor.report import blocks
from kvdoctor.report.blocks import Span, Text, capitalized, pieces, plain
from kvdoctor.report.document import Report
from kvdoctor.report.escaping import code, markdown, shortened
from kvdoctor.report.facts import UNDIAGNOSED
from kvdoctor.report.sections.repair import format_copy
from kvdoctor.report.sections.whole import list_sections
from kvdoctor.report.wording import format_count, join_some
from kvdoctor.report.wording.finding import group_open_checks, known_reason, link_check
from kvdoctor.report.wording.health import BETWEEN, explain_undecided, list_tally
from kvdoctor.report.wording.summary import format_reproducer, tabulate_models

MOST_CHARACTERS = 65_536
"""The length limit of a GitHub issue."""
SPARE, MOST_NAMED = 600, 4
MOST_LAST, MOST_LISTED, LONGEST_LINE = 5, 20, 300
"""Lines about all models, and models and faults, in the summary of a step; characters of a text there."""
FAULTY, EFFECTS = ("failed", "differs", "died", "wrong"), ("worse", "better")
"""Kinds of pieces that are written in bold, and those that stand before the text in place of its color."""
VALUES = ("name", "command", "wrong", "gone", "new", "changed", "same", "neutral", *EFFECTS)
"""Kinds of pieces that are written as code; other ones are text."""


def render(report: Report) -> str:
    """The report as one Markdown text that fits into an issue; what does not fit is named."""
    return render_within(MOST_CHARACTERS, report)


def render_gate(document: Callable[[], dict[str, Any]], reports: Sequence[Report], last: tuple[str, ...]) -> str:
    """Several models on a page that fits into an issue: the summary, and the reports that have room, each whole."""
    if len(reports) == 1 and not last:
        return render(reports[0])
    text, left = render_summary(document()["verdict"], reports, last), 0
    for report in (report for report in reports if report.verdict != "healthy"):
        part = "\n" + render_within(MOST_CHARACTERS // 2, report)
        fits = len(text) + len(part) <= MOST_CHARACTERS - SPARE
        text, left = text + part if fits else text, left + (not fits)
    more = f"\n{format_count(left, 'report')} did not fit; `--format text` and `--format json` have all.\n"
    return text + more if left else text


def render_whole(report: Report) -> str:
    """The report as one Markdown text, of any length."""
    return _write_head(report) + write(list_sections(report))


def render_within(limit: int, report: Report) -> str:
    """The report in at most `limit` characters: without folded parts, and without the sections that do not fit."""
    head = _write_head(report)
    written, left = _cut(head, limit - SPARE), limit - SPARE - len(head)
    dropped = []
    for section in map(blocks.drop_folded, list_sections(report)):
        part, title = write([section]), plain(capitalized(section.title))
        if len(part) <= left:
            written, left = written + part, left - len(part)
        elif section.name == "findings" and left > SPARE:
            written, left = written + _cut(part, left), 0
            dropped.append("the last findings")
        else:
            dropped.append(title[:100])
    note = "Steps of runs that passed, slots, inputs and outputs are in `--format html` and in text with `-vv`."
    if dropped:
        named = markdown(join_some(dropped, MOST_NAMED, "; "))
        note = f"Left out, because the limit is {limit} characters: {named}. `--format json` has everything."
    return written.rstrip("\n") + f"\n\n{note}\n"


def _cut(text: str, limit: int) -> str:
    """The first lines of a text that fit, each whole."""
    return text if len(text) <= limit else text[: text.rfind("\n", 0, max(limit, 1)) + 1]


def render_summary(verdict: str, reports: Sequence[Report], last: tuple[str, ...]) -> str:
    """Several models for the summary of a step: the table, a line for each fault, and what was not checked."""
    groups = ((report for report in reports if (report.verdict == "healthy") is healthy) for healthy in (False, True))
    first = islice(chain.from_iterable(groups), MOST_LISTED)
    head = [f"## kvdoctor: {verdict.replace('-', ' ')}", ""]
    head += [part for line in last[:MOST_LAST] for part in (markdown(line), "")]
    table = _write_table(tabulate_models(first, len(reports) - MOST_LISTED)).splitlines()
    faults: dict[tuple[str, str], tuple[Finding, list[str]]] = {}
    undecided: dict[str, list[str]] = {}
    for report in reports:
        for finding in (finding for finding in report.findings if finding.severity != "note"):
            faults.setdefault((finding.code, finding.cause), (finding, []))[1].append(report.model.path)
        for group in (group for group in group_open_checks(report.not_checked) if group.essential):
            undecided.setdefault(group.describe(LONGEST_LINE), []).append(report.model.path)
    lines = [_write_fault(finding, paths) for finding, paths in faults.values()]
    lines += [f"- not checked in {_name_models(paths)}: {_write_short(text)}" for text, paths in undecided.items()]
    more = [f"- ... and {len(lines) - MOST_LISTED} more"] if len(lines) > MOST_LISTED else []
    return "\n".join([*head, *table, "", *lines[:MOST_LISTED], *more]) + "\n"


def _write_fault(finding: Finding, paths: list[str]) -> str:
    """A finding as one line: its code as a link, the models, what happens, and the fix or why it is known."""
    reason, fix = known_reason(finding), finding.repair
    way = f"fix: {code(fix.command) if fix.command else _write_short(fix.text)}"
    way = f"known: {_write_short(reason)}" if reason else way
    name = f"{finding.severity} [{finding.code}]({link_check(finding)}) {finding.name}"
    return f"- {name} in {_name_models(paths)}: {_write_short(finding.cause)}; {way}"


def _name_models(paths: list[str]) -> str:
    return join_some([code(path) for path in dict.fromkeys(paths)], MOST_NAMED)


def _write_short(text: str) -> str:
    return markdown(shortened(text, LONGEST_LINE))


def _write_head(report: Report) -> str:
    """The verdict, the model and the versions; where there is no verdict, why, and what decides."""
    versions = ", ".join(f"{markdown(name)} {markdown(version)}" for name, version in report.environment.items())
    content: list[blocks.Block] = [blocks.Lines((BETWEEN.join(list_tally(report)),), "strong")]
    if report.verdict in UNDIAGNOSED:
        content.append(blocks.Pairs(tuple(explain_undecided(report, "under Not checked"))))
    copy = [format_copy(report.repair)] if report.repair is not None else []
    content.append(blocks.Lines((*copy, *filter(None, [format_reproducer(report)]))))
    title = f"# kvdoctor {report.command}: {report.verdict.replace('-', ' ')}\n\n"
    title += f"Model {code(report.model.path)}; {versions}\n"
    return title + write(content)


def write(content: Iterable[blocks.Block], level: int = 2) -> str:
    """Blocks as Markdown; `level` is that of their headings."""
    return "".join(f"\n{part}\n" for block in content for part in _write_block(block, level))


def _write_block(block: blocks.Block, level: int) -> Iterator[str]:
    """The paragraphs, lists and tables of a block, each without the empty lines around it."""
    match block:
        case blocks.Lines(listed=True):
            yield "\n".join(f"- {_write_text(text)}" for text in block.lines)
        case blocks.Lines():
            written = map(_write_text, block.lines)
            yield from map(_make_bold, written) if block.style == "strong" else written
        case blocks.Pairs():
            yield _write_table(blocks.Table(("", ""), block.rows))
        case blocks.Table():
            yield from [f"{markdown(plain(capitalized(block.title)))}:"] if block.title else []
            yield _write_table(block)
        case blocks.Cards():
            yield from (part for card in block.cards for part in _write_card(card, level))
        case blocks.Picture():
            yield from (part for inner in block.instead for part in _write_block(inner, level))
        case blocks.Section():
            parts = [part for inner in block.content for part in _write_block(inner, level + 1)]
            yield from [_write_heading(_write_text(capitalized(block.title)), level), *parts] if parts else []


def _write_heading(title: str, level: int) -> str:
    return f"{'#' * min(level, 6)} {title}"


def _make_bold(text: str) -> str:
    return f"**{text}**" if text.strip() else text


def _write_card(card: blocks.Card, level: int) -> Iterator[str]:
    """A finding under a heading of its own: what happens, the picture of the cache, label and text."""
    place = f" ({card.place})" if card.place else ""
    yield _write_heading(markdown(f"{card.title}{place}"), level)
    yield _make_bold(markdown(card.cause))
    if card.picture is not None:
        yield from _write_block(card.picture, level)
    if card.quote:
        yield code(card.quote)
    rows = []
    for label, text in (*card.facts, *card.fix, *card.more):
        # Facts are code, names and all, but for a link.
        has_link = any(isinstance(part, Span) and part.kind == "link" for part in pieces(text))
        rows.append(f"- {label + ': ' if label else ''}{_write_text(text) if has_link else code(plain(text))}")
    yield "\n".join(rows)


def _write_text(text: Text) -> str:
    """A line: names and values as code, all else escaped."""
    parts = ((part, "") if isinstance(part, str) else (part.text, part.kind or "name") for part in pieces(text))
    return "".join(
        f"<{shown}>" if kind == "link" else code(shown) if kind else markdown(shown) for shown, kind in parts
    )


def _write_table(table: blocks.Table) -> str:
    """Plain cells are code as well: shapes and numbers stay readable in the source, and names are harmless."""
    lines = [map(markdown, table.header), ["---"] * len(table.header), *(map(_write_cell, row) for row in table.rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _write_cell(cell: Text) -> str:
    kind = cell.kind if isinstance(cell, Span) else "name"
    text = code(plain(cell)) if kind in VALUES else markdown(plain(cell))
    if kind in EFFECTS:
        return f"**{kind}** {text}"
    return _make_bold(text) if kind in FAULTY else text
