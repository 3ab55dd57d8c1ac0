"""The page of a gate: its verdict and the models with theirs first, then each model's report."""

from collections.abc import Collection, Sequence

from kvdoctor.report.document import EXIT_FINDINGS, EXIT_HEALTHY, EXIT_INCOMPLETE, Report, exit_code
from kvdoctor.report.page import report as one
from kvdoctor.report.page import verdict
from kvdoctor.report.page.blocks import Place, chip, code, counted, section, table
from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.report.page.shell import KINDS, page

LARGEST = 6_000_000
"""Characters of all reports in full: what comes after that is told in brief."""
LARGEST_BRIEF = 3_000_000
ORDER = ("unhealthy", "incomplete", "nothing-found", "healthy")
MEANS = {
    "unhealthy": "At least one model has findings that count as a failure.",
    "incomplete": "At least one model could not be diagnosed to the end, and none is unhealthy.",
    "nothing-found": "Nothing was found in the files; no model was run.",
    "healthy": "Every model is healthy.",
}
MOST_LINKS = 60


def render(judged: str, reports: Sequence[Report], last: Sequence[str]) -> str:
    """The whole page; `judged` is the verdict over all models, `last` are the lines that are said of all."""
    ordered = sorted(enumerate(reports), key=lambda pair: (ORDER.index(pair[1].verdict), pair[0]))
    codes = [exit_code(report, verdict.fail_on(report)) for report in reports]
    code_number = next((code for code in (EXIT_FINDINGS, EXIT_INCOMPLETE) if code in codes), EXIT_HEALTHY)
    counts = [
        chip(f"{number} {name.replace('-', ' ')}", KINDS[name])
        for name in ORDER
        if (number := sum(report.verdict == name for report in reports))
    ]
    said = [h("p", line) for line in last]
    said.append(h("p", "Exit code ", h("strong", code_number), f": {verdict.EXITS[code_number]}.", class_="exit"))
    top = h(
        "header",
        h("p", "kvdoctor gate", class_="eyebrow"),
        h("h1", counted(len(reports), "model")),
        verdict.banner(judged, MEANS[judged], h("div", counts, class_="chips"), *said),
        class_="report-head",
    )
    models = _models(ordered)
    told = {number for number, _ in ordered[: len(models)]}
    links: list[tuple[str, Content]] = [("models", "Models")]
    links += [(f"m{n}", (_mark(r.verdict), _short(r.model.path))) for n, r in ordered[:MOST_LINKS] if n in told]
    untold = len(ordered) - len(models)
    rest = f"{counted(untold, 'model')} more, of the best verdicts: in the table above and in --format json alone."
    more = h("p", rest, class_="hint") if untold else None
    title = f"{judged}: kvdoctor gate of {counted(len(reports), 'model')}"
    return page(title, links, top, _index(ordered, told), models, more)


def _index(ordered: Sequence[tuple[int, Report]], told: Collection[int]) -> Element:
    """A row for each model, the worst verdict first."""
    rows = [
        (
            h("a", _path(report), href=f"#m{number}") if number in told else _path(report),
            chip(report.verdict, KINDS[report.verdict]),
            h("div", verdict.counts(report), class_="chips"),
            _worst(report),
        )
        for number, report in ordered
    ]
    made = table("models-table", "Models of this gate", ("model", "verdict", "findings", "the worst of them"), rows)
    return section(Place(), "models", "Models", made)


def _path(report: Report) -> Content:
    return code(report.model.path, 300) or "(no path)"


def _worst(report: Report) -> Content:
    if not report.findings:
        return report.not_checked[0].reason[:200] if report.verdict == "incomplete" and report.not_checked else "\u2013"
    finding = report.findings[0]
    return f"{finding.code} {finding.name}"


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
    place = Place(f"m{number}-", 2)
    sections = one.parts(report, place.below()) if in_full else one.brief(report, place.below())
    brief = None if in_full else h("p", "In brief: --format html of this model alone shows the rest.", class_="hint")
    return h(
        "article",
        one.head(report, place),
        brief,
        (content for _, _, content in sections),
        h("p", h("a", "Back to the models", href="#models"), class_="hint"),
        id=f"m{number}",
        class_="model",
        aria_labelledby=place.id("name"),
    )


def _mark(name: str) -> Element:
    return h("span", verdict.MARKS[name], " ", class_=f"nav-mark {KINDS[name]}", title=name)


def _short(path: str) -> str:
    return path if len(path) <= 40 else f"\u2026{path[-38:]}"
