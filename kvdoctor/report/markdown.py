"""The report as Markdown, to paste into an issue."""

from collections.abc import Iterator

from kvdoctor.report import wording
from kvdoctor.report.document import Report, StackFacts
from kvdoctor.report.safe import code, markdown, shortened
from kvdoctor.trace import Run


def render(report: Report) -> str:
    """The whole report as one Markdown text."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    yield f"# kvdoctor {report.command}: {report.verdict}"
    yield ""
    yield f"Model {code(report.model.path)}; " + ", ".join(f"{k} {markdown(v)}" for k, v in report.environment.items())
    yield from findings(report)
    for stack in report.stacks:
        runs = [run for run in report.runs if run.stack == stack.name]
        yield from _stack(stack, runs)


def findings(report: Report) -> Iterator[str]:
    """The findings and what was not checked."""
    yield ""
    yield "## Findings"
    yield ""
    if not report.findings:
        yield "None."
    for finding in report.findings:
        yield f"- **{markdown(shortened(wording.headline(finding), 600))}**"
        for label, text in wording.evidence(finding):
            yield f"  - {label + ': ' if label else ''}{code(shortened(text, 900))}"
    for entry in report.not_checked:
        yield f"- not checked: {entry.code} {markdown(shortened(entry.reason, 600))}"


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


def table(header: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A table; its cells are Markdown already."""
    yield "| " + " | ".join(header) + " |"
    yield "|" + " --- |" * len(header)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
