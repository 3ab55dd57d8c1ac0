"""The verdict, first on every page: what it means, what it counts, and the exit code that goes with it."""

from collections import Counter

from kvdoctor.choices import FAIL_ON, FailOn
from kvdoctor.report import cure_text, wording
from kvdoctor.report.document import EXIT_FINDINGS, EXIT_HEALTHY, EXIT_INCOMPLETE, Report, exit_code
from kvdoctor.report.page.blocks import Place, chip, code, counted
from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.report.page.shell import KINDS

MEANS = {
    "healthy": "Decode steps were run with and without the cache, and the logits agree.",
    "unhealthy": "Something is wrong that counts as a failure here; it is named below, the worst first.",
    "incomplete": "Something could not be checked without which a model is not called healthy.",
    "nothing-found": "Nothing was found without running the model; step-test runs decode steps.",
}
EXITS = {
    EXIT_HEALTHY: "all that was asked for ran, nothing counts as a failure",
    EXIT_FINDINGS: "findings that count as a failure",
    EXIT_INCOMPLETE: "the diagnosis could not be completed, which is not the same as healthy",
}
MARKS = {"healthy": "\u2713", "unhealthy": "\u2715", "incomplete": "?", "nothing-found": "\u2013"}


def fail_on(report: Report) -> FailOn:
    """The lowest severity that counts as a failure."""
    asked = report.arguments.get("fail_on", "error")
    return next((level for level in FAIL_ON if level == asked), "error")


def counts(report: Report) -> list[Element]:
    """How many findings of each severity, and how much was not checked."""
    found = Counter(finding.severity for finding in report.findings)
    made = [chip(counted(number, word), word) for word in ("error", "warning", "note") if (number := found[word])]
    if report.not_checked:
        made.append(chip(f"{len(report.not_checked)} not checked", "open"))
    return made


def banner(verdict: str, meaning: Content, *content: Content) -> Element:
    """The verdict in large letters, with what it means."""
    mark = h("span", MARKS[verdict], class_="mark", aria_hidden="true")
    return h(
        "div",
        h("p", mark, verdict.replace("-", " "), class_="verdict"),
        h("p", meaning, class_="meaning"),
        content,
        class_=f"banner {KINDS[verdict]}",
    )


def head(report: Report, place: Place) -> Element:
    """What was examined and the verdict on it."""
    code_number = exit_code(report, fail_on(report))
    threshold = f" (--fail-on {fail_on(report)})" if code_number != EXIT_INCOMPLETE else ""
    said: list[Content] = [h("div", counts(report), class_="chips")] if report.findings or report.not_checked else []
    said.append(h("p", "Exit code ", h("strong", code_number), f": {EXITS[code_number]}{threshold}.", class_="exit"))
    if report.repair is not None:
        said.append(h("p", cure_text.outcome_line(report.repair)))
    if made := wording.reproducer_line(report):
        said.append(h("p", made))
    return h(
        "header",
        h("p", f"kvdoctor {report.command}", class_="eyebrow"),
        place.heading(code(report.model.path, 600) or "(no path)", id_=place.id("name")),
        banner(report.verdict, MEANS[report.verdict], said),
        class_="report-head",
    )
