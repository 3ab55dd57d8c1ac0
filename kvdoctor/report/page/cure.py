"""What `re-export` did: found before, done and why, changed, proved, at what cost, and what is left."""

from collections.abc import Iterator

from kvdoctor.report import cure_text, export_text
from kvdoctor.report.document import FileDiff, RepairRecord, Report
from kvdoctor.report.page import findings
from kvdoctor.report.page.blocks import Place, chip, code, counted, facts, folded, listed, more_line, section, table
from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.report.page.shell import KINDS

MOST_CHANGES, MOST_PROOFS, MOST_LINES = 200, 200, 2000


def shown(report: Report, record: RepairRecord, place: Place) -> Iterator[tuple[str, str, Element]]:
    """The sections of the fix report: id, title and content of each."""
    for name, title, content in _parts(report, record, place):
        yield place.id(name), title, section(place, name, title, *content)


def _parts(report: Report, record: RepairRecord, place: Place) -> Iterator[tuple[str, str, list[Content]]]:
    yield "before-after", "Before and after", list(_compared(record, place))
    yield "found", "What was found", list(findings.shown(record.before.findings, place.below("found")))
    if record.export is not None:
        yield "exported", "How it was exported", list(_export(record, place))
    yield "done", "What was done and why", list(_done(record))
    yield "changed", "What was changed", list(_changed(record, place))
    yield "proof", "What proves it", list(_proof(record, place))
    if costs := cure_text.cost_lines(report):
        yield "cost", "What it costs", [listed(costs)]
    if lines := cure_text.caller_lines(record):
        yield "left", "What is left to the caller", [listed(lines)]
    if record.unmended:
        yield "unmended", "What was not repaired", [listed(map(cure_text.unmended_line, record.unmended[:MOST_PROOFS]))]
    if record.advice:
        yield "advice", "A loop that cannot take the copy must change instead", [listed(record.advice)]
    if record.undo:
        rows = [(code(f.path), code(f.before), code(f.after)) for f in record.files[:MOST_CHANGES]]
        header = ("written anew", "SHA-256 before", "SHA-256 after")
        digests = table(place.id("digests"), "Files written anew", header, rows) if rows else None
        yield "undo", "How to undo it", [listed(record.undo), digests]


def _compared(record: RepairRecord, place: Place) -> Iterator[Content]:
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
                listed([chip(f.severity, f.severity), f" {f.code} {f.name}"] for f in side.findings[:20])
                if side.findings
                else h("p", "No findings."),
                more_line(len(side.findings) - 20, "finding"),
                class_="side",
            )
            for title, path, side in sides
        ),
        class_="sides",
    )


def _export(record: RepairRecord, place: Place) -> Iterator[Content]:
    assert record.export is not None  # noqa: S101
    yield h("p", export_text.title(record.export))
    yield facts(export_text.rows(record.export, record.source))
    yield h("p", "What was found on the fresh export, before any repair:")
    yield from findings.shown(record.export.findings, place.below("fresh"))


def _done(record: RepairRecord) -> Iterator[Content]:
    if not record.repairs:
        yield h("p", "Nothing.")
        return
    yield listed(
        [code(r.name), f" ({r.stack}), for {', '.join(r.mends)}: {r.summary}"] for r in record.repairs[:MOST_CHANGES]
    )


def _changed(record: RepairRecord, place: Place) -> Iterator[Content]:
    if not record.changes:
        yield h("p", "Nothing.")
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
    more = h("p", f"... and {counted(left_out, 'line')} more.", class_="hint") if left_out else None
    pre = h("pre", lines, class_="diff", tabindex=0)
    yield folded(("The graph of ", code(found.file), ", line by line"), pre, more)


def _proof(record: RepairRecord, place: Place) -> Iterator[Content]:
    if not record.proof:
        yield h("p", "Nothing was changed, so nothing was proved.")
        return
    rows = [
        (p.claim, chip("holds", "passed") if p.holds else chip("fails", "failed"), p.stack, p.detail)
        for p in record.proof[:MOST_PROOFS]
    ]
    yield table(place.id("proofs"), "Claims about the copy", ("claim", "outcome", "stack", "detail"), rows)
    yield more_line(len(record.proof) - MOST_PROOFS, "claim")
