"""Findings with their evidence and the command that mends them, and what was not checked."""

import re
from collections.abc import Iterator, Sequence

from kvdoctor.findings import Finding, NotChecked
from kvdoctor.report import wording
from kvdoctor.report.page.blocks import Place, chip, code, command, counted, facts, folded, listed, more_line, table
from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.report.safe import shortened

MOST = 100
MOST_IN_A_LINE = 400
MOST_SUBJECTS = 16
MOST_EVIDENCE = 12
LONGEST = 900
TYPE = re.compile(r"\w+\[[^\]]*\]")


def shown(found: Sequence[Finding], place: Place) -> Iterator[Content]:
    """The findings, each an article; of very many the rest is a line each, and what is left then is counted."""
    if not found:
        yield h("p", "None.")
    for number, finding in enumerate(found[:MOST]):
        yield article(finding, place, place.id(f"finding-{number}"))
    if rest := found[MOST : MOST + MOST_IN_A_LINE]:
        lines = [shortened(wording.headline(finding), 300) for finding in rest]
        yield folded(f"{counted(len(rest), 'finding')} more, in a line each", listed(lines))
    yield more_line(len(found) - MOST - MOST_IN_A_LINE, "finding")


def article(finding: Finding, place: Place, name: str) -> Element:
    """One finding: what, where, promised against observed, what follows, and the repair."""
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
        facts(_evidence(finding)),
        _repair(finding),
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
    lines = [(label, text) for label, text in wording.evidence(finding) if label not in ("repair", "")]
    before = ""
    for label, text in lines[:MOST_EVIDENCE]:
        yield ("" if label == before else label), _value(label, text)
        before = label
    if len(lines) > MOST_EVIDENCE:
        yield "", f"{len(lines) - MOST_EVIDENCE} lines more in --format json"
    if subjects := finding.subject[:MOST_SUBJECTS]:
        more = f" and {len(finding.subject) - MOST_SUBJECTS} more" if len(finding.subject) > MOST_SUBJECTS else ""
        yield "concerns", h("span", [[code(name, 200), " "] for name in subjects], more)


def _value(label: str, text: str) -> Content:
    is_type = label in ("promised", "observed") and TYPE.fullmatch(text[:LONGEST])
    return code(text, LONGEST) if is_type else shortened(text, LONGEST)


def _repair(finding: Finding) -> Element:
    advice = finding.repair
    if not advice.command:
        return h("div", h("p", h("strong", "Repair: "), advice.text), class_="repair")
    return h("div", h("p", h("strong", "Repair:")), command(advice.command), h("p", advice.text), class_="repair")


def unchecked(entries: Sequence[NotChecked], place: Place) -> Iterator[Content]:
    """What was not checked, with the reasons."""
    if not entries:
        yield h("p", "Nothing that belongs to this command was left out for want of means.")
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
        place.id("unchecked-table"), "Not checked", ("check", "stack", "reason", "leaves the verdict open"), rows
    )
    yield more_line(len(entries) - MOST_IN_A_LINE, "check")
