"""The report as Markdown, to paste into an issue."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from kvdoctor.findings import Finding
from kvdoctor.memory import MemoryPlan
from kvdoctor.report import cure_text, export_text, matrix, parity_text, plan_text, wording
from kvdoctor.report.document import ExportRecord, RepairRecord, Report, StackFacts
from kvdoctor.report.safe import code, markdown, printable, shortened
from kvdoctor.trace import Run

MOST_CHARACTERS = 65_536
"""What an issue of GitHub takes."""
SPARE = 600


def render(report: Report) -> str:
    """The report as one Markdown text that an issue takes: sections that do not fit are left out, and named."""
    return within(MOST_CHARACTERS, report)


def render_gate(document: Callable[[], dict[str, Any]], reports: list[Report], last: tuple[str, ...]) -> str:
    """Many models on one page: those that are healthy in a table, the others in full as long as an issue takes them."""
    from kvdoctor.report import gate_page

    if len(reports) == 1 and not last:
        return render(reports[0])
    return gate_page.page(document()["verdict"], reports, last, MOST_CHARACTERS)


def whole(report: Report) -> str:
    """The report as one Markdown text, of any length."""
    return "\n".join(_lines(report)) + "\n"


def within(most: int, report: Report) -> str:
    """The report in at most so many characters."""
    text = whole(report)
    if len(text) <= most:
        return text
    first, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    kept, left = _cut(first, most - SPARE), most - SPARE - len(first)
    dropped = []
    for section in sections:
        title = section.partition("\n")[0].removeprefix("## ")
        if len(section) <= left:
            kept, left = kept + section, left - len(section)
        elif title == "Findings" and left > SPARE:
            kept, left = kept + _cut(section, left), 0
            dropped.append("the last findings")
        else:
            dropped.append(title[:100])
    named = "; ".join(dropped[:4]) + (f" and {len(dropped) - 4} more" if len(dropped) > 4 else "")
    note = f"\nLeft out, since an issue takes {MOST_CHARACTERS} characters: {named}. `--format json` has all of it.\n"
    return kept.rstrip("\n") + "\n" + note


def _cut(text: str, most: int) -> str:
    """The first lines of a text that are whole and fit."""
    return text if len(text) <= most else text[: text.rfind("\n", 0, max(most, 1)) + 1]


def _lines(report: Report) -> Iterator[str]:
    yield f"# kvdoctor {report.command}: {report.verdict}"
    yield ""
    yield f"Model {code(report.model.path)}; " + ", ".join(
        f"{markdown(name)} {markdown(version)}" for name, version in report.environment.items()
    )
    if report.repair is not None:
        yield from _repair(report, report.repair)
    if made := wording.reproducer_line(report):
        yield ""
        yield markdown(made)
    yield from findings(report)
    for stack in report.stacks:
        runs = matrix.runs_here(report, stack.name)
        yield from _stack(stack, runs)
        yield from _targets(report, stack.name)
        if stack.cache is not None and stack.cache.parts and plan_text.is_asked(report.arguments):
            yield from _plan(stack.cache)


def _repair(report: Report, record: RepairRecord) -> Iterator[str]:
    """The fix report: what was found, what was changed, what proves it, what is left to the caller."""
    yield ""
    yield f"From {code(record.source)} to {code(record.out or '(nothing written)')}. The source was not changed."
    for title, lines in _sections(report, record):
        yield ""
        yield f"## {title}"
        yield ""
        yield from lines


def _sections(report: Report, record: RepairRecord) -> Iterator[tuple[str, list[str]]]:
    yield "What was found", list(_findings(record.before.findings))
    if record.export is not None:
        yield "How it was exported", list(_export(record.export, record.source))
    yield "What was done and why", list(_done(record))
    yield "What was changed", _changed(record)
    rows = [
        [markdown(p.stack), markdown(p.claim), "holds" if p.holds else "**fails**", code(p.detail)]
        for p in record.proof
    ]
    nothing = ["Nothing was changed, so nothing was proved."]
    yield "What proves it", list(table(["stack", "claim", "", ""], rows)) if rows else nothing
    if costs := cure_text.cost_lines(report):
        yield "What it costs", [f"- {markdown(line)}" for line in costs]
    if record.unmended:
        yield "What was not repaired", [f"- {markdown(cure_text.unmended_line(entry))}" for entry in record.unmended]
    yield "What is left to the caller", list(_left(record))
    if record.undo:
        rows = [[code(f.path), code(f.before), code(f.after)] for f in record.files]
        digests = ["", *table(["written anew", "SHA-256 before", "SHA-256 after"], rows)] if rows else []
        yield "How to undo it", [*(f"- {markdown(line)}" for line in record.undo), *digests]


def _done(record: RepairRecord) -> Iterator[str]:
    """Each repair with its reason."""
    for repair in record.repairs:
        why = ", ".join(repair.mends)
        yield f"- {code(repair.name)} ({markdown(repair.stack)}), for {markdown(why)}: {markdown(repair.summary)}"
    if not record.repairs:
        yield "Nothing."


def _changed(record: RepairRecord) -> list[str]:
    rows = [[code(c.file), code(c.where), code(c.before), code(c.after)] for c in record.changes]
    lines = list(table(["file", "where", "before", "after"], rows)) if rows else ["Nothing."]
    for found in record.diff:
        if found.lines:
            lines += ["", f"The graph of {code(found.file)}, line by line:", ""]
            lines += [f"    {printable(shortened(line))}" for line in found.lines]
            lines += [f"    ... and {found.left_out} lines more"] if found.left_out else []
    return lines


def _left(record: RepairRecord) -> Iterator[str]:
    first, *rest = cure_text.caller_lines(record) or [""]
    if first:
        yield markdown(first) if record.proved else f"**{markdown(first)}**"
        yield ""
        yield from (f"- {markdown(line)}" for line in rest)
        yield from [""] if rest else []
    if record.advice:
        yield "A loop that cannot take the copy must change instead:"
        yield ""
        yield from (f"- {markdown(line)}" for line in record.advice)


def _export(export: ExportRecord, replaced: str) -> Iterator[str]:
    """How the export was made afresh, and what was found on it before any repair."""
    said = export_text.title(export)
    yield f"{markdown(said[0].upper() + said[1:])}."
    yield ""
    rows = [[markdown(label), code(text)] for label, text in export_text.rows(export, replaced)]
    yield from table(["", ""], rows)
    yield ""
    yield "What was found on the fresh export, before any repair:"
    yield ""
    yield from _findings(export.findings)


def findings(report: Report) -> Iterator[str]:
    """The findings and what was not checked."""
    yield ""
    yield "## Findings"
    yield ""
    yield from _findings(report.findings)
    for entry in report.not_checked:
        yield f"- not checked: {markdown(entry.code)} {markdown(shortened(entry.reason, 600))}"


def _findings(found: tuple[Finding, ...]) -> Iterator[str]:
    if not found:
        yield "None."
    for finding in found:
        yield f"- **{markdown(shortened(wording.headline(finding), 600))}**"
        for label, text in wording.evidence(finding):
            yield f"  - {label + ': ' if label else ''}{code(shortened(text, 900))}"


def _stack(stack: StackFacts, runs: list[Run]) -> Iterator[str]:
    yield ""
    yield f"## {markdown(stack.name)} ({markdown(stack.layout)})"
    yield ""
    yield from table(["", ""], [[label, code(text)] for label, text in wording.contract_rows(stack)])
    done = [run for run in runs if run.outcome != "skipped"]
    if done:
        yield ""
        rows = [[markdown(run.experiment), wording.outcome(run), code(wording.detail(run))] for run in done]
        yield from table(["experiment", "outcome", ""], rows)
    for run in done:
        if run.experiment in ("plain-loop", "held-loop") and run.steps and stack.contract:
            header, rows = wording.steps_table(run, stack.contract)
            yield ""
            yield f"Steps of {run.experiment}:"
            yield ""
            yield from table(header, in_code(rows))
            yield from _differences(run)


def _targets(report: Report, stack: str) -> Iterator[str]:
    """What a stack shows under each target."""
    for header, rows in matrix.matrices(report, stack):
        yield ""
        yield "Under each target:"
        yield ""
        yield from table([code(title) for title in header], in_code(rows))
        for line in matrix.legend(report):
            yield ""
            yield markdown(line)


def _differences(run: Run) -> Iterator[str]:
    """How close a loop is to the reference run."""
    if (found := parity_text.differences_table(run)) is None:
        return
    yield ""
    yield f"{run.experiment} against {run.yardstick}:"
    yield ""
    yield from table(found[0], in_code(found[1]))
    for label, text in parity_text.facts(run):
        yield ""
        yield f"{label}: {markdown(text)}"


def _plan(plan: MemoryPlan) -> Iterator[str]:
    """The memory plan of a stack."""
    title = plan_text.title(plan)
    yield ""
    yield f"### {title[0].upper()}{title[1:]}"
    yield ""
    yield from table(["", ""], [[label, code(text)] for label, text in plan_text.rows(plan)])
    for found in (plan_text.alternatives(plan), plan_text.paged(plan)):
        if found is not None:
            yield ""
            yield from table(found[0], in_code(found[1]))
    if assumptions := [[label, code(text)] for label, text in plan_text.assumptions(plan)]:
        yield ""
        yield from table(["", ""], assumptions)


def in_code(rows: list[list[str]]) -> list[list[str]]:
    """Plain cells as Markdown: shapes and numbers stay readable in the source, and names are harmless."""
    return [[code(cell) for cell in row] for row in rows]


def table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A table; its cells are Markdown already."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
