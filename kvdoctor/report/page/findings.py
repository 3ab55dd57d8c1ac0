"""Findings with their evidence and the command that fixes them, and the checks that could not run."""

import re
from collections.abc import Iterator, Sequence

from kvdoctor.findings import Finding, NotChecked
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
from kvdoctor.report.wording.finding import format_headline, list_details
from kvdoctor.report.wording.units import format_count

MOST = 100
MOST_IN_A_LINE = 400
MOST_SUBJECTS = 16
MOST_EVIDENCE = 12
LONGEST = 900
TYPE = re.compile(r"\w+\[[^\]]*\]")


def show_findings(found: Sequence[Finding], place: PagePosition) -> Iterator[Content]:
    """The findings, each an article; of very many the rest is a line each, and what is left then is counted."""
    if not found:
        yield h("p", "None.")
    for number, finding in enumerate(found[:MOST]):
        yield show_finding(finding, place, place.id(f"finding-{number}"))
    if rest := found[MOST : MOST + MOST_IN_A_LINE]:
        lines = [shortened(format_headline(finding), 300) for finding in rest]
        yield fold(f"{format_count(len(rest), 'more finding')} in one line each", bullets(lines))
    yield more_line(len(found) - MOST - MOST_IN_A_LINE, "finding")


def show_finding(finding: Finding, place: PagePosition, name: str) -> Element:
    """One finding: cause, location, declared and observed, evidence, effects, and the fix."""
    title = place.heading(
        chip(finding.severity, finding.severity),
        " ",
        h("span", finding.code, class_="code"),
        " ",
        h("span", finding.name, class_="name"),
        h("span", f" in {finding.stack}", class_="of") if finding.stack else None,
        id_=name,
        class_="finding-title",
    )
    return h(
        "article",
        title,
        h("p", shortened(finding.cause, LONGEST), class_="cause"),
        label_list(_evidence(finding)),
        _fix(finding),
        h(
            "p",
            "More: ",
            h("code", f"kvdoctor explain {finding.code}", class_="copy"),
            " \u00b7 fingerprint ",
            h("code", finding.fingerprint or "none"),
            class_="hint",
        ),
        class_=f"finding {finding.severity}",
        aria_labelledby=name,
    )


def _evidence(finding: Finding) -> Iterator[tuple[Content, Content]]:
    lines = [(label, text) for label, text in list_details(finding) if label not in ("fix", "")]
    before = ""
    for label, text in lines[:MOST_EVIDENCE]:
        yield ("" if label == before else label), _value(label, text)
        before = label
    if len(lines) > MOST_EVIDENCE:
        yield "", f"{len(lines) - MOST_EVIDENCE} more lines are in --format json"
    if subjects := finding.subject[:MOST_SUBJECTS]:
        more = f" and {len(finding.subject) - MOST_SUBJECTS} more" if len(finding.subject) > MOST_SUBJECTS else ""
        yield "concerns", h("span", [[code(name, 200), " "] for name in subjects], more)


def _value(label: str, text: str) -> Content:
    is_type = label in ("declared", "observed") and TYPE.fullmatch(text[:LONGEST])
    return code(text, LONGEST) if is_type else shortened(text, LONGEST)


def _fix(finding: Finding) -> Element:
    advice = finding.repair
    if not advice.command:
        return h("div", h("p", h("strong", "Fix: "), advice.text), class_="repair")
    return h("div", h("p", h("strong", "Fix:")), command(advice.command), h("p", advice.text), class_="repair")


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
