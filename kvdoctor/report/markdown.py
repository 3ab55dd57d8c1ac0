"""The report as Markdown, to paste into an issue."""

from collections.abc import Iterator

from kvdoctor.findings import Finding
from kvdoctor.memory import MemoryPlan
from kvdoctor.report import matrix, parity_text, plan_text, wording
from kvdoctor.report.document import RepairRecord, Report, StackFacts
from kvdoctor.report.safe import code, markdown, shortened
from kvdoctor.trace import Run


def render(report: Report) -> str:
    """The whole report as one Markdown text."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# kvdoctor {report.command}: {report.verdict}"
    yield ""
    yield f"Model {code(report.model.path)}; " + ", ".join(f"{k} {markdown(v)}" for k, v in report.environment.items())
    if report.repair is not None:
        yield from _repair(report.repair)
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


def _repair(record: RepairRecord) -> Iterator[str]:
    """The fix report: what was found, what was changed, what proves it, what is left to the caller."""
    yield ""
    yield f"From {code(record.source)} to {code(record.out or '(nothing written)')}. The source was not changed."
    yield ""
    yield "## What was found"
    yield ""
    yield from _findings(record.before.findings)
    yield ""
    yield "## What was changed"
    yield ""
    rows = [[code(c.file), code(c.where), code(c.before), code(c.after)] for c in record.changes]
    yield from table(["file", "where", "before", "after"], rows) if rows else ["Nothing."]
    yield ""
    yield "## What proves it"
    yield ""
    rows = [
        [markdown(p.stack), markdown(p.claim), "holds" if p.holds else "**fails**", code(p.detail)]
        for p in record.proof
    ]
    yield from table(["stack", "claim", "", ""], rows) if rows else ["Nothing was changed, so nothing was proved."]
    yield ""
    yield "## What is left to the caller"
    yield ""
    if record.out is not None:
        yield "The copy asks nothing of its caller: every present may be fed back, or the cross-attention cache held."
    if record.advice:
        yield "A loop that cannot take the copy must change instead:"
        yield ""
        yield from (f"- {markdown(line)}" for line in record.advice)


def findings(report: Report) -> Iterator[str]:
    """The findings and what was not checked."""
    yield ""
    yield "## Findings"
    yield ""
    yield from _findings(report.findings)
    for entry in report.not_checked:
        yield f"- not checked: {entry.code} {markdown(shortened(entry.reason, 600))}"


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
        rows = [[run.experiment, wording.outcome(run), code(wording.detail(run))] for run in done]
        yield from table(["experiment", "outcome", ""], rows)
    for run in done:
        if run.experiment in ("plain-loop", "held-loop") and run.steps and stack.contract:
            header, rows = wording.steps_table(run, stack.contract)
            yield ""
            yield f"Steps of {run.experiment}:"
            yield ""
            yield from table(header, rows)
            yield from _differences(run)


def _targets(report: Report, stack: str) -> Iterator[str]:
    """What a stack shows under each target."""
    for header, rows in matrix.matrices(report, stack):
        yield ""
        yield "Under each target:"
        yield ""
        yield from table(header, rows)
        for line in matrix.legend(report):
            yield ""
            yield markdown(line)


def _differences(run: Run) -> Iterator[str]:
    """How close a loop is to the reference run."""
    if (found := parity_text.differences_table(run)) is None:
        return
    yield ""
    yield f"{run.experiment} against the reference run:"
    yield ""
    yield from table(*found)
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
            yield from table(*found)
    if assumptions := [[label, code(text)] for label, text in plan_text.assumptions(plan)]:
        yield ""
        yield from table(["", ""], assumptions)


def table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A table; its cells are Markdown already."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
