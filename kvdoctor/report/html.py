"""The report as one HTML page: no script, nothing loaded from anywhere, every text escaped (docs/html.md)."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from kvdoctor.report.document import Report, exit_code, exit_code_of_all
from kvdoctor.report.page import findings, overview, repair, stack
from kvdoctor.report.page.blocks import APPENDIX, KINDS, PagePosition, chip, code, section, table, write_page
from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.report.safe import shortened
from kvdoctor.report.wording.units import format_count

MOST_STACKS = 8
MOST_LINKS, MOST_IN_BRIEF = 60, 20
LARGEST = 6_000_000
"""Characters of all reports in full: reports beyond that are shown in brief."""
LARGEST_BRIEF = 3_000_000
ORDER = ("unhealthy", "incomplete", "nothing-found", "healthy")
GATE_MEANS = {
    "unhealthy": "At least one model has findings that count as a failure.",
    "incomplete": "At least one model could not be fully diagnosed, and none is unhealthy.",
    "nothing-found": "Nothing was found in the files; no model was run.",
    "healthy": "Every model is healthy.",
}

Part = tuple[str, Content, Element]
"""The id of a section, its name in the list of contents, and the section."""


def render(report: Report) -> str:
    """The whole page of one report."""
    sections = list(_sections(report, PagePosition()))
    links = [(name, title) for name, title, _ in sections]
    title = f"{report.verdict}: kvdoctor {report.command} {report.model.path[:200]}"
    head = overview.verdict_header(report, PagePosition(level=1))
    return write_page(title, links, head, [content for _, _, content in sections])


def render_gate(document: Callable[[], dict[str, Any]], reports: list[Report], last: tuple[str, ...]) -> str:
    """The page of a gate: a table of the models, then each; one model needs no table.

    `last` are the lines about all models.
    """
    if len(reports) == 1 and not last:
        return render(reports[0])
    verdict: str = document()["verdict"]
    ordered = sorted(enumerate(reports), key=lambda pair: (ORDER.index(pair[1].verdict), pair[0]))
    models = _models(ordered)
    shown = {number for number, _ in ordered[: len(models)]}
    links: list[tuple[str, Content]] = [("models", "Models")]
    links += [(f"m{n}", (_mark(r.verdict), _shorten(r.model.path))) for n, r in ordered[:MOST_LINKS] if n in shown]
    left_out = len(ordered) - len(models)
    rest = (
        f"{format_count(left_out, 'model')} more, with the best verdicts, are only in the table above and in "
        "--format json."
    )
    more = h("p", rest, class_="hint") if left_out else None
    title = f"{verdict}: kvdoctor gate of {format_count(len(reports), 'model')}"
    return write_page(title, links, _gate_header(verdict, reports, last), _index(ordered, shown), models, more)


def _sections(report: Report, place: PagePosition) -> Iterator[Part]:
    """The sections under the verdict, in the order in which they are read."""
    if report.repair is not None:
        yield from repair.repair_sections(report, report.repair, place)
    title = "Findings" if report.repair is None else "Findings now"
    if report.repair is not None and report.repair.is_planned:
        title = "Findings that the copy would have"
    yield _part(place, "findings", title, *findings.show_findings(report.findings, place.below("now"), report))
    for number, facts in enumerate(report.stacks[:MOST_STACKS]):
        name = f"stack-{number}"
        yield place.id(name), f"Stack {facts.name[:40]}", stack.stack_section(facts, report, place, name)
    if report.variants:
        yield _part(place, "variants", "Variants", *overview.show_variants(report, place))
    if report.speed:
        yield _part(place, "speed", "Speed", *overview.show_speed(report, place))
    if report.drafts:
        yield _part(place, "drafts", "Draft", *overview.show_drafts(report))
    if left := [facts.name for facts in report.stacks[MOST_STACKS:]]:
        yield _part(place, "more", "More stacks", h("p", f"{len(left)} more are in --format json: {', '.join(left)}"))
    yield _part(place, "not-checked", "Not checked", *findings.show_not_checked(report.not_checked, place))
    if report.notes:
        yield _part(place, "notes", "Notes", *overview.show_notes(report), class_=APPENDIX)
    yield _part(place, "environment", "Environment", *overview.show_environment(report), class_=APPENDIX)
    yield _part(place, "files", "Files", *overview.show_files(report, place), class_=APPENDIX)


def _brief_sections(report: Report, place: PagePosition) -> Iterator[Part]:
    """The sections that no reader can do without."""
    found, unchecked = report.findings[:MOST_IN_BRIEF], report.not_checked[:MOST_IN_BRIEF]
    yield _part(place, "findings", "Findings", *findings.show_findings(found, place.below("now"), report))
    yield _part(place, "not-checked", "Not checked", *findings.show_not_checked(unchecked, place))


def _part(place: PagePosition, name: str, title: str, *content: Content, class_: str | None = None) -> Part:
    return place.id(name), title, section(place, name, title, *content, class_=class_)


def _gate_header(verdict: str, reports: Sequence[Report], last: Sequence[str]) -> Element:
    code_number = exit_code_of_all(exit_code(report, report.fail_on) for report in reports)
    counts = [
        chip(f"{number} {name.replace('-', ' ')}", KINDS[name])
        for name in ORDER
        if (number := sum(report.verdict == name for report in reports))
    ]
    lines: list[Content] = [h("p", line) for line in last]
    worst = next((report for report in reports if report.verdict == verdict and overview.find_worst(report)), None)
    if verdict == "unhealthy" and worst is not None:
        lines = [h("p", "The first of them, ", _path(worst), ":"), overview.show_worst(worst), *lines]
    lines.append(h("p", "Exit code ", h("strong", code_number), f": {overview.EXITS[code_number]}.", class_="exit"))
    return h(
        "header",
        h("p", "kvdoctor gate", class_="eyebrow"),
        h("h1", format_count(len(reports), "model")),
        overview.banner(verdict, GATE_MEANS[verdict], h("div", counts, class_="chips"), *lines),
        class_="report-head",
    )


def _index(ordered: Sequence[tuple[int, Report]], shown: Collection[int]) -> Element:
    """A row for each model, the worst verdict first."""
    rows = [
        (
            h("a", _path(report), href=f"#m{number}") if number in shown else _path(report),
            chip(report.verdict, KINDS[report.verdict]),
            h("div", overview.count_chips(report), class_="chips"),
            _worst(report),
        )
        for number, report in ordered
    ]
    header = ("model", "verdict", "findings", "worst finding")
    return section(PagePosition(), "models", "Models", table("models-table", "Models of this gate", header, rows))


def _path(report: Report) -> Content:
    return code(report.model.path, 300) or "(no path)"


def _worst(report: Report) -> Content:
    if (group := overview.find_worst(report)) is None:
        return report.not_checked[0].reason[:200] if report.verdict == "incomplete" and report.not_checked else "\u2013"
    return f"{group.first.code} {group.first.name}", h("p", shortened(group.first.cause, 200), class_="hint")


def _models(ordered: Sequence[tuple[int, Report]]) -> list[Element]:
    """The first of the reports; where they get too long together, the later ones in brief, and then no more."""
    made: list[Element] = []
    size = 0
    for number, report in ordered:
        if size > LARGEST + LARGEST_BRIEF:
            break
        model = _model(number, report, in_full=size <= LARGEST)
        size += len(str(model))
        made.append(model)
    return made


def _model(number: int, report: Report, in_full: bool) -> Element:
    place = PagePosition(f"m{number}-", 2)
    sections = _sections(report, place.below()) if in_full else _brief_sections(report, place.below())
    brief = None if in_full else h("p", "In brief: --format html of this model alone shows the rest.", class_="hint")
    return h(
        "article",
        overview.verdict_header(report, place),
        brief,
        (content for _, _, content in sections),
        h("p", h("a", "Back to the models", href="#models"), class_="hint"),
        id=f"m{number}",
        class_="model",
        aria_labelledby=place.id("name"),
    )


def _mark(verdict: str) -> Element:
    return h("span", overview.MARKS[verdict], " ", class_=f"nav-mark {KINDS[verdict]}", title=verdict)


def _shorten(path: str) -> str:
    return path if len(path) <= 40 else f"\u2026{path[-38:]}"
