"""Findings with their evidence and the command that fixes them, and the checks that could not run."""

import re
from collections.abc import Iterator, Sequence

from kvdoctor.findings import Finding, NotChecked
from kvdoctor.report.document import Report
from kvdoctor.report.page.blocks import (
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
from kvdoctor.report.wording.alike import FindingGroup, format_places, group_findings, list_group_details
from kvdoctor.report.wording.cache_lengths import HERE, CacheTable
from kvdoctor.report.wording.deciding import find_pictured, tabulate_cache
from kvdoctor.report.wording.finding import format_headline
from kvdoctor.report.wording.units import format_count

MOST = 100
MOST_IN_A_LINE = 400
MOST_SUBJECTS = 16
MOST_EVIDENCE = 20
LONGEST = 900
TYPE = re.compile(r"\w+\[[^\]]*\]")


def show_findings(found: Sequence[Finding], place: PagePosition, report: Report | None = None) -> Iterator[Content]:
    """The findings, each an article, alike ones of several stacks in one; of very many the rest is a line each.

    `report` has the runs that show them: the first error of each stack gets the picture of its cache. It is None where
    these runs are not in the report, as before a repair.
    """
    groups = group_findings(found)
    if not groups:
        yield h("p", "None.")
    pictured = find_pictured(groups) if report is not None else []
    for number, group in enumerate(groups[:MOST]):
        picture = tabulate_cache(report, group.first) if report is not None and group in pictured else None
        yield _show_group(group, place, place.id(f"finding-{number}"), picture)
    if rest := groups[MOST : MOST + MOST_IN_A_LINE]:
        lines = [shortened(format_headline(group.first, group.places), 300) for group in rest]
        yield fold(f"{format_count(len(rest), 'more finding')} in one line each", bullets(lines))
    yield more_line(len(groups) - MOST - MOST_IN_A_LINE, "finding")


def show_title(group: FindingGroup) -> Content:
    """Severity, code and name of a finding, and its stacks."""
    finding = group.first
    stacks = f" in {format_places(group.places)}" if finding.stack or len(group.places) > 1 else None
    return (
        chip(finding.severity, finding.severity),
        " ",
        h("span", finding.code, class_="code"),
        " ",
        h("span", finding.name, class_="name"),
        h("span", stacks, class_="of") if stacks else None,
    )


def _fix(finding: Finding) -> Element:
    """The command that fixes it, and the other way out."""
    advice = finding.repair
    if not advice.command:
        return h("div", h("p", h("strong", "Fix: "), advice.text), class_="repair")
    return h("div", h("p", h("strong", "Fix:")), command(advice.command), h("p", advice.text), class_="repair")


def _show_group(group: FindingGroup, place: PagePosition, name: str, picture: CacheTable | None) -> Element:
    """A finding: cause, the cache step by step, location, declared and observed, evidence, effects, and the fix."""
    finding = group.first
    return h(
        "article",
        place.heading(show_title(group), id_=name, class_="finding-title"),
        h("p", shortened(finding.cause, LONGEST), class_="cause"),
        _draw_cache(picture, f"{name}-cache") if picture is not None else None,
        label_list(_evidence(group)),
        _fix(finding),
        h(
            "p",
            "More: ",
            h("code", f"kvdoctor explain {finding.code}", class_="copy"),
            " \u00b7 fingerprint ",
            _fingerprints(group),
            class_="hint",
        ),
        class_=f"finding {finding.severity}",
        aria_labelledby=name,
    )


def _draw_cache(picture: CacheTable, name: str) -> Content:
    """The steps of the run that shows a finding, with the length of each cache; the wrong cell is marked."""
    rows = [[_mark_wrong(cell) for cell in row] for row in picture.rows]
    quote = h("p", "\u201c", picture.quote, "\u201d", class_="hint") if picture.quote else None
    return table(name, picture.title, picture.header, rows, "lengths"), quote


def _mark_wrong(cell: str) -> Content:
    if not cell.endswith(HERE):
        return cell
    return h("td", cell.removesuffix(HERE).rstrip(), " ", h("span", HERE, class_="here"), class_="wrong")


def _fingerprints(group: FindingGroup) -> Content:
    """The fingerprint of each finding, with its stack where there are several."""
    if len(group.findings) == 1:
        return h("code", group.first.fingerprint or "none")
    shown = [
        (", " if number else "", h("code", one.fingerprint or "none"), f" ({one.stack or one.file})")
        for number, one in enumerate(group.findings[:MOST_SUBJECTS])
    ]
    left_out = len(group.findings) - MOST_SUBJECTS
    return shown, f" and {left_out} more" if left_out > 0 else None


def _evidence(group: FindingGroup) -> Iterator[tuple[Content, Content]]:
    found = [(label, text) for label, text in list_group_details(group) if label not in ("fix", "")]
    labels = list(dict.fromkeys(label for label, _ in found))
    lines = sorted(found, key=lambda line: labels.index(line[0]))
    before = ""
    for label, text in lines[:MOST_EVIDENCE]:
        yield ("" if label == before else label), _value(label, text)
        before = label
    if len(lines) > MOST_EVIDENCE:
        yield "", f"{len(lines) - MOST_EVIDENCE} more lines are in --format json"
    subjects = list(dict.fromkeys(name for finding in group.findings for name in finding.subject))
    if subjects:
        more = f" and {len(subjects) - MOST_SUBJECTS} more" if len(subjects) > MOST_SUBJECTS else ""
        yield "concerns", h("span", [[code(name, 200), " "] for name in subjects[:MOST_SUBJECTS]], more)


def _value(label: str, text: str) -> Content:
    is_type = label in ("declared", "observed") and TYPE.fullmatch(text[:LONGEST])
    return code(text, LONGEST) if is_type else shortened(text, LONGEST)


def show_not_checked(entries: Sequence[NotChecked], place: PagePosition) -> Iterator[Content]:
    """The checks that could not run, with the reasons."""
    if not entries:
        yield h("p", "Every check of this command ran.")
        return
    rows = [
        (
            code(entry.code),
            entry.stack or "all",
            shortened(entry.reason, 600),
            "yes" if entry.essential else "no",
        )
        for entry in entries[:MOST_IN_A_LINE]
    ]
    yield table(
        place.id("unchecked-table"), "Not checked", ("check", "stack", "reason", "needed for the verdict"), rows
    )
    yield more_line(len(entries) - MOST_IN_A_LINE, "check")
