"""The report as Markdown, to paste into an issue; several models on one page, for the summary of a CI job."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from kvdoctor.analysis.memory import MemoryPlan
from kvdoctor.decode.runs import LOOPS, Run
from kvdoctor.findings import Finding
from kvdoctor.report.document import Report
from kvdoctor.report.facts import StackFacts
from kvdoctor.report.repair_record import ExportRecord, RepairRecord
from kvdoctor.report.safe import code, markdown, printable, shortened
from kvdoctor.report.wording.cache_costs import tabulate_cache_costs
from kvdoctor.report.wording.contract import describe_contract
from kvdoctor.report.wording.devices import DEVICES_TITLE, describe_devices
from kvdoctor.report.wording.drafts import describe_drafts
from kvdoctor.report.wording.finding import format_headline, known_reason, list_details
from kvdoctor.report.wording.memory import (
    describe_plan,
    format_plan_title,
    is_plan_requested,
    list_assumptions,
    tabulate_alternatives,
    tabulate_paging,
)
from kvdoctor.report.wording.repair import (
    describe_export,
    format_export_title,
    format_not_repaired,
    list_caller_duties,
    list_costs,
)
from kvdoctor.report.wording.runs import (
    UNIT,
    describe_parity,
    describe_result,
    format_outcome,
    tabulate_differences,
    tabulate_steps,
)
from kvdoctor.report.wording.speed import tabulate_speed
from kvdoctor.report.wording.summary import format_counts, format_reproducer, name_open
from kvdoctor.report.wording.targets import list_target_releases, select_local_runs, tabulate_targets
from kvdoctor.report.wording.units import format_count
from kvdoctor.report.wording.variants import tabulate_variants

MOST_CHARACTERS = 65_536
"""The length limit of a GitHub issue."""
SPARE, SPARE_ON_PAGE = 600, 200
MOST_ROWS, MOST_KNOWN = 2000, 40
TABLE_SHARE = 2
"""The table of models takes at most one part in so many of a page."""
LEAST_PART = 2000


def render(report: Report) -> str:
    """The report as one Markdown text that fits into an issue: sections that do not fit are left out, and named."""
    return render_within(MOST_CHARACTERS, report)


def render_gate(document: Callable[[], dict[str, Any]], reports: list[Report], last: tuple[str, ...]) -> str:
    """Several models on one page: the healthy ones in a table, the others in full as long as they fit into an issue."""
    if len(reports) == 1 and not last:
        return render(reports[0])
    return render_page(document()["verdict"], reports, last, MOST_CHARACTERS)


def render_whole(report: Report) -> str:
    """The report as one Markdown text, of any length."""
    return "\n".join(_lines(report)) + "\n"


def render_within(limit: int, report: Report) -> str:
    """The report in at most `limit` characters."""
    text = render_whole(report)
    if len(text) <= limit:
        return text
    first, *sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    kept, left = _cut(first, limit - SPARE), limit - SPARE - len(first)
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
    note = f"\nLeft out, because the limit is {limit} characters: {named}. `--format json` has everything.\n"
    return kept.rstrip("\n") + "\n" + note


def _cut(text: str, limit: int) -> str:
    """The first lines of a text that fit, each whole."""
    return text if len(text) <= limit else text[: text.rfind("\n", 0, max(limit, 1)) + 1]


def render_page(verdict: str, reports: list[Report], last: tuple[str, ...], limit: int) -> str:
    """Several models on a page of at most `limit` bytes; reports that do not fit are left out whole, and counted.

    `last` are the lines about all models. The text is empty where not even these fit.
    """
    intro = "".join(f"{markdown(line)}\n\n" for line in last)
    text = f"## kvdoctor: {verdict}\n\n{intro}"
    text += _models_table(reports, limit // TABLE_SHARE - _bytes(text))
    known = [line for report in reports if report.verdict == "healthy" for line in _known(report)]
    text += "\n" + "\n".join(known[:MOST_KNOWN]) + "\n" if known else ""
    text += f"\n... and {len(known) - MOST_KNOWN} more known findings\n" if len(known) > MOST_KNOWN else ""
    used, left = _bytes(text), 0
    for report in (report for report in reports if report.verdict != "healthy"):
        part = "\n" + render_within(min(MOST_CHARACTERS, max(limit // 2, LEAST_PART)), report)
        if used + _bytes(part) > limit - SPARE_ON_PAGE:
            left += 1
            continue
        text, used = text + part, used + _bytes(part)
    if left:
        text += f"\n{format_count(left, 'report')} did not fit; `--format text` and `--format json` have all.\n"
    return text if _bytes(text) <= limit else ""


def _models_table(reports: list[Report], limit: int) -> str:
    """A row for each model, those that are not healthy first; rows beyond `limit` bytes are counted."""
    rows = [[code(report.model.path), report.verdict, markdown(format_counts(report))] for report in reports]
    rows.sort(key=lambda row: row[1] == "healthy")
    lines = list(table(["model", "verdict", "findings"], rows[:MOST_ROWS]))
    text, left_out = "", len(rows) - len(rows[:MOST_ROWS])
    used = 0
    for number, line in enumerate(lines):
        used += _bytes(line) + 1
        if used > limit:
            left_out += len(lines) - number
            break
        text += line + "\n"
    return text + (f"\n... and {left_out} more models\n" if left_out else "")


def _known(report: Report) -> Iterator[str]:
    """The known findings of a model that is not reported in full."""
    for finding in report.findings:
        if (reason := known_reason(finding)) is not None:
            words = f"{format_headline(finding)}; known: {reason}"
            yield f"- {code(report.model.path)} {markdown(printable(shortened(words, 400)))}"


def _bytes(text: str) -> int:
    return len(text.encode("utf-8"))


def _lines(report: Report) -> Iterator[str]:
    yield f"# kvdoctor {report.command}: {report.verdict}"
    yield ""
    yield f"Model {code(report.model.path)}; " + ", ".join(
        f"{markdown(name)} {markdown(version)}" for name, version in report.environment.items()
    )
    if report.repair is not None:
        yield from _repair(report, report.repair)
    if made := format_reproducer(report):
        yield ""
        yield markdown(made)
    yield ""
    yield "## Findings"
    yield ""
    yield from _findings(report.findings)
    for entry in report.not_checked:
        reason = markdown(shortened(entry.reason, 600))
        yield f"- {name_open(report, entry.essential)}: {markdown(entry.code)}: {reason}"
    for stack in report.stacks:
        runs = select_local_runs(report, stack.name)
        yield from _stack(stack, runs)
        yield from _targets(report, stack.name)
        if stack.cache is not None and stack.cache.parts and is_plan_requested(report.arguments):
            yield from _plan(stack.cache)
    yield from (f"- {markdown(line)}" for line in describe_drafts(report))
    for title, header, rows in [*tabulate_variants(report), *tabulate_speed(report)]:
        yield ""
        yield f"## {markdown(title)}"
        yield ""
        yield from table(header, in_code(rows))


def _repair(report: Report, record: RepairRecord) -> Iterator[str]:
    """The fix report: findings before, changes, proof, costs, and what is left to the caller."""
    yield ""
    yield f"From {code(record.source)} to {code(record.out or '(nothing written)')}. The source was not changed."
    for title, lines in _repair_sections(report, record):
        yield ""
        yield f"## {title}"
        yield ""
        yield from lines


def _repair_sections(report: Report, record: RepairRecord) -> Iterator[tuple[str, list[str]]]:
    yield "Findings before the repair", list(_findings(record.before.findings))
    if record.export is not None:
        yield "New export", list(_export(record.export, record.source))
    yield "Repairs", list(_repairs(record))
    yield "Changes", _changes(record)
    rows = [
        [markdown(p.stack), markdown(p.claim), "holds" if p.holds else "**fails**", code(p.detail)]
        for p in record.proof
    ]
    nothing = ["Nothing was changed, so there is nothing to prove."]
    bases = ["", *(f"- {markdown(line)}" for line in record.bases)] if record.bases else []
    yield "Proof", [*table(["stack", "claim", "result", "detail"], rows), *bases] if rows else nothing
    if costs := list_costs(report):
        yield "Costs", [f"- {markdown(line)}" for line in costs]
    for made in tabulate_cache_costs(record, whole=True):
        lines = [f"- {markdown(line)}" for line in made.lines]
        yield (
            markdown(f"{made.title[0].upper()}{made.title[1:]}"),
            [*table(made.header, in_code(made.rows)), "", *lines],
        )
    if record.not_repaired:
        yield "Not repaired", [f"- {markdown(format_not_repaired(entry))}" for entry in record.not_repaired]
    yield "What the caller must do", list(_caller_duties(record))
    if record.undo:
        rows = [[code(f.path), code(f.before), code(f.after)] for f in record.files]
        digests = ["", *table(["changed file", "SHA-256 before", "SHA-256 after"], rows)] if rows else []
        yield "Undo", [*(f"- {markdown(line)}" for line in record.undo), *digests]


def _repairs(record: RepairRecord) -> Iterator[str]:
    """Each repair with the checks that it is for."""
    for repair in record.repairs:
        why = f", for {', '.join(repair.checks)}" if repair.checks else ""
        yield f"- {code(repair.name)} ({markdown(repair.stack)}){markdown(why)}: {markdown(repair.summary)}"
    if not record.repairs:
        yield "None."


def _changes(record: RepairRecord) -> list[str]:
    rows = [[code(c.file), code(c.where), code(c.before), code(c.after)] for c in record.changes]
    lines = list(table(["file", "where", "before", "after"], rows)) if rows else ["None."]
    for found in record.diff:
        if found.lines:
            lines += ["", f"The graph of {code(found.file)}, line by line:", ""]
            lines += [f"    {printable(shortened(line))}" for line in found.lines]
            lines += [f"    ... and {found.left_out} more lines"] if found.left_out else []
    return lines


def _caller_duties(record: RepairRecord) -> Iterator[str]:
    first, *rest = list_caller_duties(record) or [""]
    if first:
        yield markdown(first) if record.proved else f"**{markdown(first)}**"
        yield ""
        yield from (f"- {markdown(line)}" for line in rest)
        yield from [""] if rest else []
    if record.advice:
        yield "If you cannot use the copy, change your loop instead:"
        yield ""
        yield from (f"- {markdown(line)}" for line in record.advice)


def _export(export: ExportRecord, replaced: str) -> Iterator[str]:
    """How the model was exported again, and the findings on the new export before any repair."""
    title = format_export_title(export)
    yield f"{markdown(title[0].upper() + title[1:])}."
    yield ""
    yield from table(["choice", "value and reason"], _pairs(describe_export(export, replaced)))
    yield ""
    yield "Findings on the new export, before any repair:"
    yield ""
    yield from _findings(export.findings)


def _findings(found: tuple[Finding, ...]) -> Iterator[str]:
    if not found:
        yield "None."
    for finding in found:
        yield f"- **{markdown(shortened(format_headline(finding), 600))}**"
        for label, text in list_details(finding):
            yield f"  - {label + ': ' if label else ''}{code(shortened(text, 900))}"


def _stack(stack: StackFacts, runs: list[Run]) -> Iterator[str]:
    yield ""
    yield f"## {markdown(stack.name)} ({markdown(stack.layout)})"
    yield ""
    yield from table(["cache contract", ""], _pairs(describe_contract(stack)))
    if stack.devices:
        yield ""
        yield from table([DEVICES_TITLE, ""], _pairs(describe_devices(stack)))
    done = [run for run in runs if run.outcome != "skipped"]
    if done:
        yield ""
        yield f"Experiments; {UNIT}:"
        yield ""
        rows = [[markdown(run.experiment), format_outcome(run), code(describe_result(run))] for run in done]
        yield from table(["experiment", "outcome", "result"], rows)
    for run in done:
        if run.experiment in LOOPS and run.steps and stack.contract:
            header, rows = tabulate_steps(run, stack.contract)
            yield ""
            yield f"Steps of {run.experiment}:"
            yield ""
            yield from table(header, in_code(rows))
            yield from _differences(run)


def _targets(report: Report, stack: str) -> Iterator[str]:
    """The outcomes of a stack on each target runtime."""
    for header, rows in tabulate_targets(report, stack):
        yield ""
        yield "On each target runtime (FAILS 2 means: fails at step 2):"
        yield ""
        yield from table([code(title) for title in header], in_code(rows))
        for line in list_target_releases(report):
            yield ""
            yield markdown(line)


def _differences(run: Run) -> Iterator[str]:
    """How close a loop is to the reference run."""
    if (found := tabulate_differences(run)) is None:
        return
    yield ""
    yield f"{run.experiment} compared with {run.yardstick}:"
    yield ""
    yield from table(found[0], in_code(found[1]))
    for label, text in describe_parity(run):
        yield ""
        yield f"{label}: {markdown(text)}"


def _plan(plan: MemoryPlan) -> Iterator[str]:
    """The memory plan of a stack."""
    title = format_plan_title(plan)
    yield ""
    yield f"### {title[0].upper()}{title[1:]}"
    yield ""
    yield from table(["part", "memory"], _pairs(describe_plan(plan)))
    for found in (tabulate_alternatives(plan), tabulate_paging(plan)):
        if found is not None:
            yield ""
            yield from table(found[0], in_code(found[1]))
    if assumptions := _pairs(list_assumptions(plan)):
        yield ""
        yield from table(["stored as", "assumption"], assumptions)


def _pairs(rows: Iterator[tuple[str, str]]) -> list[list[str]]:
    return [[label, code(text)] for label, text in rows]


def in_code(rows: list[list[str]]) -> list[list[str]]:
    """Plain cells as Markdown: shapes and numbers stay readable in the source, and names are harmless."""
    return [[code(cell) for cell in row] for row in rows]


def table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A table; its cells are Markdown already."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
