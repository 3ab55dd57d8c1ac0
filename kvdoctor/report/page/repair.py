"""What `re-export` did: findings before, repairs, changes, proof, costs, and what the caller must do."""

from collections.abc import Iterator, Sequence

from kvdoctor.findings import Finding
from kvdoctor.report.document import Report
from kvdoctor.report.page import findings
from kvdoctor.report.page.blocks import (
    KINDS,
    PagePosition,
    appendix,
    bullets,
    chip,
    code,
    fold,
    label_list,
    more_line,
    section,
    table,
)
from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.report.repair_record import FileDiff, RepairRecord
from kvdoctor.report.wording.alike import group_findings
from kvdoctor.report.wording.cache_costs import tabulate_cache_costs
from kvdoctor.report.wording.repair import (
    describe_export,
    format_export_title,
    list_caller_duties,
    list_costs,
    list_not_repaired,
)
from kvdoctor.report.wording.units import format_count

MOST_CHANGES, MOST_PROOFS, MOST_LINES, MOST_LISTED = 200, 200, 2000, 20


def repair_sections(report: Report, record: RepairRecord, place: PagePosition) -> Iterator[tuple[str, str, Element]]:
    """The sections of the fix report: id, title and content of each."""
    for name, title, content in _parts(report, record, place):
        yield place.id(name), title, section(place, name, title, *content)


def _parts(report: Report, record: RepairRecord, place: PagePosition) -> Iterator[tuple[str, str, list[Content]]]:
    yield "before-after", "Before and after", list(_sides(record, place))
    yield (
        "found",
        "Findings before the repair",
        list(findings.show_findings(record.before.findings, place.below("found"))),
    )
    if record.export is not None:
        yield "exported", "New export", list(_export(record, place))
    yield "done", "Repairs", list(_repairs(record))
    yield "changed", "Changes", list(_changes(record, place))
    yield "proof", "Proof", list(_proof(record, place))
    if costs := list_costs(report):
        yield "cost", "Costs", [bullets(costs)]
    if record.cache_costs:
        yield "cache-cost", "Cost of the cache type", list(_cache_costs(record, place))
    if lines := list_caller_duties(record):
        yield "left", "What the caller must do", [bullets(lines)]
    if record.not_repaired:
        yield (
            "not-repaired",
            "Not repaired",
            [bullets(list_not_repaired(record)[:MOST_PROOFS])],
        )
    if record.advice:
        yield "advice", "Changes to the loop, if you cannot use the copy", [bullets(record.advice)]
    if record.undo:
        rows = [(code(f.path), code(f.before), code(f.after)) for f in record.files[:MOST_CHANGES]]
        header = ("changed file", "SHA-256 before", "SHA-256 after")
        digests = table(place.id("digests"), "Changed files", header, rows) if rows else None
        yield "undo", "Undo", [bullets(record.undo), digests]


def _cache_costs(record: RepairRecord, place: PagePosition) -> Iterator[Content]:
    """What a narrower type of the cache costs."""
    for number, made in enumerate(tabulate_cache_costs(record, whole=True)):
        title = f"{made.title[0].upper()}{made.title[1:]}"
        yield table(place.id(f"cache-cost-{number}"), title, tuple(made.header), made.rows)
        yield bullets(made.lines)


def _sides(record: RepairRecord, place: PagePosition) -> Iterator[Content]:
    """The source and the copy beside each other."""
    out = record.out or "(nothing written)"
    yield h("p", "From ", code(record.source), " to ", code(out), ". The source was not changed.")
    sides = [("before", record.source, record.before)]
    if record.after is not None:
        sides.append(("after", out, record.after))
    below = place.below()
    yield h(
        "div",
        (
            h(
                "div",
                below.heading(title, " ", chip(side.verdict, KINDS[side.verdict])),
                h("p", code(path)),
                _list_findings(side.findings),
                class_="side",
            )
            for title, path, side in sides
        ),
        class_="sides",
    )


def _list_findings(found: Sequence[Finding]) -> Content:
    """The names of findings, alike ones of several stacks once."""
    groups = group_findings(found)
    if not groups:
        return h("p", "No findings.")
    return bullets(map(findings.show_title, groups[:MOST_LISTED])), more_line(len(groups) - MOST_LISTED, "finding")


def _export(record: RepairRecord, place: PagePosition) -> Iterator[Content]:
    assert record.export is not None  # noqa: S101
    yield h("p", format_export_title(record.export))
    yield label_list(describe_export(record.export, record.source))
    yield h("p", "Findings on the new export, before any repair:")
    yield from findings.show_findings(record.export.findings, place.below("new-export"))


def _repairs(record: RepairRecord) -> Iterator[Content]:
    if not record.repairs:
        yield h("p", "None.")
        return
    checks = (f", for {', '.join(repair.checks)}" if repair.checks else "" for repair in record.repairs)
    shown = zip(record.repairs[:MOST_CHANGES], checks, strict=False)
    yield bullets([code(repair.name), f" ({repair.stack}){why}: {repair.summary}"] for repair, why in shown)


def _changes(record: RepairRecord, place: PagePosition) -> Iterator[Content]:
    if not record.changes:
        yield h("p", "None.")
        return
    rows = [(code(c.file), code(c.where), code(c.before), code(c.after)) for c in record.changes[:MOST_CHANGES]]
    yield table(place.id("changes"), "Changes, node by node", ("file", "where", "before", "after"), rows, "wrapping")
    yield more_line(len(record.changes) - MOST_CHANGES, "change")
    for found in record.diff:
        yield from _diff(found)


def _diff(found: FileDiff) -> Iterator[Content]:
    left_out = found.left_out + max(len(found.lines) - MOST_LINES, 0)
    kinds = {"-": "minus", "+": "plus"}
    lines = (h("span", line, class_=kinds.get(line[:1], "same")) for line in found.lines[:MOST_LINES])
    more = h("p", f"... and {format_count(left_out, 'more line')}.", class_="hint") if left_out else None
    pre = h("pre", lines, class_="diff", tabindex=0)
    yield appendix(fold(("The graph of ", code(found.file), ", line by line"), pre, more))


def _proof(record: RepairRecord, place: PagePosition) -> Iterator[Content]:
    if not record.proof:
        yield h("p", "Nothing was changed, so there is nothing to prove.")
        return
    rows = [
        (p.claim, chip("holds", "passed") if p.holds else chip("fails", "failed"), p.stack, p.detail)
        for p in record.proof[:MOST_PROOFS]
    ]
    yield table(place.id("proofs"), "Claims about the copy", ("claim", "outcome", "stack", "detail"), rows)
    yield more_line(len(record.proof) - MOST_PROOFS, "claim")
    if record.bases:
        yield bullets(record.bases)
