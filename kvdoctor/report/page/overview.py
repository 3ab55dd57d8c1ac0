"""What stands around the stacks of a report: the verdict first; environment, files and notes last."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from kvdoctor.findings import Finding
from kvdoctor.report.document import EXIT_FINDINGS, EXIT_HEALTHY, EXIT_INCOMPLETE, Report, exit_code
from kvdoctor.report.page import findings
from kvdoctor.report.page.blocks import (
    KINDS,
    PagePosition,
    bullets,
    chip,
    code,
    command,
    fold,
    label_list,
    more_line,
    table,
)
from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.report.safe import shortened
from kvdoctor.report.wording.alike import FindingGroup, group_findings
from kvdoctor.report.wording.contract import list_file_facts, list_ports
from kvdoctor.report.wording.deciding import find_deciding, list_fixes, name_cause
from kvdoctor.report.wording.drafts import describe_drafts
from kvdoctor.report.wording.health import explain_undecided
from kvdoctor.report.wording.repair import format_copy
from kvdoctor.report.wording.speed import list_speed_remarks, tabulate_speed
from kvdoctor.report.wording.summary import format_reproducer, name_verdict
from kvdoctor.report.wording.targets import list_target_limits
from kvdoctor.report.wording.units import format_count
from kvdoctor.report.wording.variants import tabulate_variants

MEANS = {
    "healthy": "Decode steps were run with and without the cache, and their logits agree.",
    "unhealthy": "At least one finding counts as a failure. This is the worst:",
    "incomplete": "A check could not run that is essential for the verdict. The model may or may not be healthy.",
    "nothing-found": "Nothing was found in the files. The model was not run; step-test runs decode steps.",
}
AS_HERE = "The program of the probe fed what the contract asks, and got there what the same calls give here."
HARMLESS = "A finding that does not count as a failure:"
EXITS = {
    EXIT_HEALTHY: "every check ran as requested, and no finding counts as a failure",
    EXIT_FINDINGS: "at least one finding counts as a failure",
    EXIT_INCOMPLETE: "the diagnosis could not be completed, which is not the same as healthy",
}
MARKS = {"healthy": "\u2713", "unhealthy": "\u2715", "incomplete": "?", "nothing-found": "\u2013"}
MOST_FILES, MOST_PORTS, MOST_NOTES = 100, 200, 100
LONGEST_CAUSE = 400
ADVISED_COMMAND = re.compile(r"(kvdoctor .+?)   \((.+)\)")
"""A command with a remark on it."""


def count_chips(report: Report) -> list[Element]:
    """The number of findings of each severity, alike ones of several stacks once, and of checks that could not run."""
    found = Counter(group.first.severity for group in group_findings(_find_told(report)))
    made = [chip(format_count(number, word), word) for word in ("error", "warning", "note") if (number := found[word])]
    if report.not_checked:
        made.append(chip(f"{len(report.not_checked)} not checked", "open"))
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
    lines: list[Content] = [_show_reasons(report)]
    if _find_told(report) or report.not_checked:
        lines.append(h("div", count_chips(report), class_="chips"))
    lines.append(h("p", "Exit code ", h("strong", code_number), f": {EXITS[code_number]}{threshold}.", class_="exit"))
    if report.repair is not None:
        lines.append(h("p", format_copy(report.repair)))
    if made := format_reproducer(report):
        lines.append(h("p", made))
    return h(
        "header",
        h("p", f"kvdoctor {report.command}", class_="eyebrow"),
        place.heading(code(report.model.path, 600) or "(no path)", id_=place.id("name")),
        banner(report.verdict, _explain_verdict(report), lines),
        class_="report-head",
    )


def find_worst(report: Report) -> FindingGroup | None:
    """The worst of the findings that the verdict is about; none that is known, and no note that does not count."""
    groups = find_deciding(report, group_findings(_find_told(report)))
    return next((group for group in groups if group.first.known is None), None)


def show_worst(report: Report) -> Content:
    """The worst finding in short: what happens, the cause, and the fix."""
    if (group := find_worst(report)) is None:
        return None
    label, text = name_cause(group.first)
    return (
        h("p", findings.show_title(group)),
        h("p", shortened(group.first.cause, LONGEST_CAUSE)),
        label_list([(label, shortened(text, LONGEST_CAUSE)), *_list_fixes(group.first)]),
    )


def _list_fixes(finding: Finding) -> Iterator[tuple[Content, Content]]:
    for label, text in list_fixes(finding):
        yield label, command(text) if text == finding.repair.command else shortened(text, LONGEST_CAUSE)


def _find_told(report: Report) -> tuple[Finding, ...]:
    """The findings that the verdict is about: after a dry run those of the original, which stays as it is."""
    record = report.repair
    return record.before.findings if record is not None and record.is_planned else report.findings


def _explain_verdict(report: Report) -> str:
    if report.repair is not None and report.repair.is_planned:
        return f"{name_verdict(report)}."
    means = AS_HERE if (report.command, report.verdict) == ("judge", "nothing-found") else MEANS[report.verdict]
    if report.verdict in ("healthy", "nothing-found") and find_worst(report) is not None:
        return f"{means} {HARMLESS}"
    return means


def _show_reasons(report: Report) -> Iterator[Content]:
    """What the verdict rests on: the worst finding, or why there is no verdict and what would give one."""
    *why, (label, advice) = explain_undecided(report, "under \u201cNot checked\u201d")
    if report.verdict != "incomplete" or not why:
        yield show_worst(report)
        return
    given = ADVISED_COMMAND.fullmatch(advice)
    shown = (command(given[1]), h("p", given[2])) if given is not None else advice
    yield label_list([*why, (label, shown)])


def show_environment(report: Report) -> Iterator[Content]:
    """Versions, and the options of the run."""
    yield label_list(report.environment.items())
    options = [
        (name.replace("_", "-"), _option(value)) for name, value in sorted(report.arguments.items()) if value != []
    ]
    yield label_list([*options, ("seed", str(report.seed))])
    if limits := list(list_target_limits(report)):
        yield bullets(limits)


def _option(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def show_files(report: Report, place: PagePosition) -> Iterator[Content]:
    """The files of the model; of those that were inspected inputs and outputs too."""
    header = ("file", "role", "size", "IR", "opsets", "producer")
    rows = [(code(row[0]), *row[1:]) for row in map(list_file_facts, report.model.files[:MOST_FILES])]
    yield table(place.id("files-table"), "Files", header, rows)
    yield more_line(len(report.model.files) - MOST_FILES, "file")
    if digests := [(code(f.path), code(f.sha256)) for f in report.model.files[:MOST_FILES] if f.sha256]:
        yield table(place.id("hashes"), "SHA-256 of the files", ("file", "SHA-256"), digests)
    for number, file in enumerate(report.model.files[:MOST_FILES]):
        if file.inputs or file.outputs:
            ports = list(list_ports(file, everything=False))
            rows = [(code(name), direction, code(typed)) for direction, name, typed in ports[:MOST_PORTS]]
            name, caption = place.id(f"ports-{number}"), f"Inputs and outputs of {file.path}"
            made = table(name, caption, ("name", "direction", "type"), rows)
            yield fold(("Inputs and outputs of ", code(file.path)), made, more_line(len(ports) - MOST_PORTS, "port"))


def show_variants(report: Report, place: PagePosition) -> Iterator[Content]:
    """How far the variants of a model are from the most exact one."""
    for number, (title, header, rows) in enumerate(tabulate_variants(report)):
        cells = [(code(row[0]), *row[1:]) for row in rows]
        yield table(place.id(f"variants-{number}"), f"{title[0].upper()}{title[1:]}", tuple(header), cells)


def show_speed(report: Report, place: PagePosition) -> Iterator[Content]:
    """How fast each stack decodes."""
    for number, (title, header, rows) in enumerate(tabulate_speed(report)):
        yield table(place.id(f"speed-{number}"), f"{title[0].upper()}{title[1:]}", tuple(header), map(tuple, rows))
    yield bullets(list_speed_remarks(report))


def show_drafts(report: Report) -> Iterator[Content]:
    """How many tokens of a draft are accepted."""
    yield bullets(tuple(describe_drafts(report)))


def show_notes(report: Report) -> Iterator[Content]:
    """The notes of the report."""
    yield bullets(report.notes[:MOST_NOTES])
    yield more_line(len(report.notes) - MOST_NOTES, "note")
