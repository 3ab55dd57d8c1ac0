"""The report as one HTML page under its verdict: no script, nothing is loaded, every text escaped (docs/html.md)."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from kvdoctor.findings import Finding
from kvdoctor.report.blocks import Section, capitalized, plain
from kvdoctor.report.document import EXIT_FINDINGS, EXIT_HEALTHY, EXIT_INCOMPLETE, Report, exit_code, exit_code_of_all
from kvdoctor.report.escaping import shortened
from kvdoctor.report.facts import UNDIAGNOSED
from kvdoctor.report.page import elements
from kvdoctor.report.page.elements import KINDS, Content, Element, PagePosition, chip, code, h, label_list, table
from kvdoctor.report.page.write import write_section, write_title, write_value
from kvdoctor.report.sections.findings import find_deciding, make_short_card
from kvdoctor.report.sections.repair import format_copy
from kvdoctor.report.sections.whole import list_sections
from kvdoctor.report.wording import format_count
from kvdoctor.report.wording.finding import FindingGroup, format_places, group_findings
from kvdoctor.report.wording.health import explain_undecided
from kvdoctor.report.wording.summary import format_reproducer, name_verdict

MOST_LINKS, LONGEST_LINK, MOST_ROWS = 60, 46, 10_000
LARGEST = 6_000_000
"""Characters of all reports together: models beyond that are rows of the table alone."""
ORDER = ("unhealthy", "incomplete", "not-applicable", "nothing-found", "healthy")
GATE_MEANS = {
    "unhealthy": "At least one model has findings that count as a failure.",
    "incomplete": "At least one model could not be fully diagnosed, and none is unhealthy.",
    "not-applicable": "At least one model is no decoder with a KV cache; the others show no failure.",
    "nothing-found": "Nothing was found in the files; no model was run.",
    "healthy": "Every model is healthy.",
}

Part = tuple[str, Content, Element]
"""The id of a section, its name in the list of contents, and the section."""


def render(report: Report) -> str:
    """The whole page of one report."""
    sections = list(_write_sections(list_sections(report), PagePosition()))
    links = [(name, title) for name, title, _ in sections]
    title = f"{report.verdict}: kvdoctor {report.command} {report.model.path[:200]}"
    head = verdict_header(report, PagePosition(level=1))
    return elements.write_page(title, links, head, [content for _, _, content in sections])


def render_gate(document: Callable[[], dict[str, Any]], reports: Sequence[Report], last: tuple[str, ...]) -> str:
    """The page of a gate: a table of the models, then each, and the `last` lines; one model needs no table."""
    if len(reports) == 1 and not last:
        return render(reports[0])
    overall: str = document()["verdict"]
    verdicts = [report.verdict for report in reports]
    ordered = sorted(range(len(reports)), key=lambda number: ORDER.index(verdicts[number]))
    models = _models(ordered, reports)
    shown = set(ordered[: len(models)])
    links: list[tuple[str, Content]] = [("models", "Models")]
    for number in ordered[:MOST_LINKS]:
        name, path = verdicts[number], reports[number].model.path
        mark = h("span", MARKS[name], " ", class_=f"nav-mark {KINDS[name]}", title=name)
        short = path if len(path) <= 40 else f"\u2026{path[-38:]}"
        links += [(f"m{number}", (mark, short))] if number in shown else []
    left_out = len(ordered) - len(models)
    where = "with the best verdicts, are only in the table above and in --format json."
    more = h("p", f"{format_count(left_out, 'model')} more, {where}", class_="hint") if left_out else None
    title = f"{overall}: kvdoctor gate of {format_count(len(reports), 'model')}"
    return elements.write_page(
        title, links, _gate_header(overall, reports, last), _index(ordered, reports, shown), models, more
    )


def _write_sections(sections: Iterable[Section], place: PagePosition) -> Iterator[Part]:
    """The sections under the verdict, in the order in which they are read."""
    for one in sections:
        if (written := write_section(one, place, one.name)) is not None:
            yield place.id(one.name), plain(capitalized(one.title))[:LONGEST_LINK], written


def _gate_header(overall: str, reports: Sequence[Report], last: Sequence[str]) -> Element:
    code_number = exit_code_of_all(reports)
    verdicts = Counter[str](report.verdict for report in reports)
    counts = [chip(f"{verdicts[name]} {name.replace('-', ' ')}", KINDS[name]) for name in ORDER if verdicts[name]]
    lines: list[Content] = [h("p", line) for line in last]
    worst = next((report for report in reports if report.verdict == overall and find_worst(report)), None)
    if overall == "unhealthy" and worst is not None:
        lines = [h("p", "The first of them, ", _path(worst), ":"), show_worst(worst), *lines]
    lines.append(_explain_exit(code_number, reports))
    return h(
        "header",
        h("p", "kvdoctor gate", class_="eyebrow"),
        h("h1", format_count(len(reports), "model")),
        banner(overall, GATE_MEANS[overall], h("div", counts, class_="chips"), *lines),
        class_="report-head",
    )


def _index(ordered: Sequence[int], reports: Sequence[Report], shown: Collection[int]) -> Element:
    """A row for each model, the worst verdict first."""
    rows: list[tuple[Content, ...]] = [
        (
            h("a", _path(report), href=f"#m{number}") if number in shown else _path(report),
            chip(report.verdict.replace("-", " "), KINDS[report.verdict]),
            h("div", count_chips(report), class_="chips"),
            _cell_of_worst(report),
        )
        for number, report in ((number, reports[number]) for number in ordered[:MOST_ROWS])
    ]
    if len(ordered) > MOST_ROWS:
        rows.append((f"{len(ordered) - MOST_ROWS} more", "", "", "--format json has all"))
    header = ("model", "verdict", "findings", "worst finding")
    return elements.section(
        PagePosition(), "models", "Models", table("models-table", "Models of this gate", header, rows)
    )


def _path(report: Report) -> Content:
    return code(report.model.path, 300) or "(no path)"


def _cell_of_worst(report: Report) -> Content:
    if (group := find_worst(report)) is None:
        return report.not_checked[0].reason[:200] if report.verdict in UNDIAGNOSED and report.not_checked else "\u2013"
    return f"{group.first.code} {group.first.name}", h("p", shortened(group.first.cause, 200), class_="hint")


def _models(ordered: Sequence[int], reports: Sequence[Report]) -> list[Element]:
    """The first of the reports, until they get too long together."""
    made: list[Element] = []
    size = 0
    for number in ordered:
        if size > LARGEST:
            break
        made.append(_model(number, reports[number]))
        size += len(str(made[-1]))
    return made


def _model(number: int, report: Report) -> Element:
    place = PagePosition(f"m{number}-", 2)
    return h(
        "article",
        verdict_header(report, place),
        (content for _, _, content in _write_sections(list_sections(report), place.below())),
        h("p", h("a", "Back to the models", href="#models"), class_="hint"),
        id=f"m{number}",
        class_="model",
        aria_labelledby=place.id("name"),
    )


MEANS = {
    "healthy": "Decode steps were run with and without the cache, and their logits agree.",
    "unhealthy": "At least one finding counts as a failure. This is the worst:",
    "incomplete": "A check could not run that is essential for the verdict. The model may or may not be healthy.",
    "not-applicable": "The model is no decoder with a KV cache: there is nothing to diagnose.",
    "nothing-found": "Nothing was found in the files. The model was not run; step-test runs decode steps.",
}
HARMLESS = "A finding that does not count as a failure:"
EXITS = {
    EXIT_HEALTHY: "every check ran as requested, and no finding counts as a failure",
    EXIT_FINDINGS: "at least one finding counts as a failure",
    EXIT_INCOMPLETE: "the diagnosis could not be completed, which is not the same as healthy",
}
MARKS = {"healthy": "\u2713", "unhealthy": "\u2715", "incomplete": "?"}
MARKS |= dict.fromkeys(("not-applicable", "nothing-found"), "\u2013")


def count_chips(report: Report) -> list[Element]:
    """The number of findings of each severity, those with the same facts once, and of checks that could not run."""
    found = Counter(group.first.severity for group in group_findings(_list_decisive(report)))
    made = [chip(format_count(number, word), word) for word in ("error", "warning", "note") if (number := found[word])]
    if report.open_checks:
        made.append(chip(f"{len(report.open_checks)} not checked", "open"))
    return made


def banner(verdict: str, meaning: Content, *content: Content) -> Element:
    """The verdict in large letters, with its meaning."""
    mark = h("span", MARKS[verdict], class_="mark", aria_hidden="true")
    return h(
        "div",
        h("p", mark, verdict.replace("-", " "), class_="verdict"),
        h("p", meaning, class_="meaning"),
        content,
        class_=f"banner {KINDS[verdict]}",
    )


def verdict_header(report: Report, place: PagePosition) -> Element:
    """The command, the model, and the verdict on it."""
    code_number = exit_code(report, report.fail_on)
    threshold = f" (--fail-on {report.fail_on})" if code_number != EXIT_INCOMPLETE else ""
    # What it rests on: the worst finding, or why there is no verdict and what would give one.
    rows = explain_undecided(report, "under \u201cNot checked\u201d")
    is_open = report.verdict in UNDIAGNOSED and rows[0][0] == "why"
    reasons = label_list((label, write_value(text)) for label, text in rows) if is_open else show_worst(report)
    lines: list[Content] = [reasons]
    if _list_decisive(report) or report.open_checks:
        lines.append(h("div", count_chips(report), class_="chips"))
    lines.append(_explain_exit(code_number, [report], threshold))
    if report.repair is not None:
        lines.append(h("p", format_copy(report.repair)))
    if made := format_reproducer(report):
        lines.append(h("p", made))
    means = MEANS[report.verdict]
    if report.repair is not None and report.repair.is_planned:
        means = f"{name_verdict(report)}."
    elif report.verdict in ("healthy", "nothing-found") and find_worst(report) is not None:
        means = f"{means} {HARMLESS}"
    return h(
        "header",
        h("p", f"kvdoctor {report.command}", class_="eyebrow"),
        place.heading(code(report.model.path, 600) or "(no path)", id_=place.id("name")),
        banner(report.verdict, means, lines),
        class_="report-head",
    )


def _explain_exit(number: int, reports: Sequence[Report], threshold: str = "") -> Element:
    """The exit code and its meaning; what may stay unchecked is no check that ran."""
    allowed = dict.fromkeys(filter(None, (report.allowance for report in reports))) if number == EXIT_HEALTHY else {}
    meaning = (
        f"no finding counts, and what was not checked is allowed: {'; '.join(allowed)}" if allowed else EXITS[number]
    )
    return h("p", "Exit code ", h("strong", number), f": {meaning}{threshold}.", class_="exit")


def find_worst(report: Report) -> FindingGroup | None:
    """The worst of the findings that the verdict is about; none that is known, and no note that does not count."""
    groups = find_deciding(report, group_findings(_list_decisive(report)))
    return next((group for group in groups if group.first.known is None), None)


def show_worst(report: Report) -> Content:
    """The worst finding in short: what happens, the cause, and the fix."""
    if (group := find_worst(report)) is None:
        return None
    card = replace(make_short_card(report, group, picture=False), place=format_places(group.places))
    rows = [*(row for row in card.facts if row[0] in ("cause", "where")), *card.fix]
    return h("p", write_title(card)), h("p", card.cause), label_list((label, write_value(text)) for label, text in rows)


def _list_decisive(report: Report) -> tuple[Finding, ...]:
    """The findings that the verdict is about: after a dry run those of the original, which stays as it is."""
    record = report.repair
    return record.before.findings if record is not None and record.is_planned else report.findings
