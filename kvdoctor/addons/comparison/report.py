"""A diff as text and as Markdown: the sections of both sides, of each stack, and of the findings.

Each row is marked like a line of a unified diff: `-` A only, `+` B only, `~` different, `=` the same.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Literal

from rich.console import Console

from kvdoctor.addons.comparison.document import (
    DIFF_SCHEMA,
    ComparedModel,
    Difference,
    DiffReport,
    Effect,
    Logits,
    StackDiff,
    format_verdict,
)
from kvdoctor.report.blocks import Block, Lines, Pairs, Section, Span, Text, lines
from kvdoctor.report.console import Page, open_text
from kvdoctor.report.escaping import shortened
from kvdoctor.report.json_format import dump
from kvdoctor.report.markdown import write
from kvdoctor.report.wording import join_some, shorten_names
from kvdoctor.report.wording.finding import format_headline

DOCUMENT, FORMATS = DiffReport, ("text", "json", "markdown")
MAX_NAMES, LONGEST_LABEL, LABEL_WIDTH = 12, 24, 15
"""The number of operators, or of findings of both sides, that one row lists; characters of a label, and columns."""
OTHER_SIDES = {"report": "a report", "golden": "golden numbers"}
MARKS = {"gone": "-", "new": "+", "changed": "~", "same": "="}
AGREEMENTS = {
    "bits": "equal bit for bit",
    "logits": "within the tolerance of their arithmetic",
    "tokens": "different numbers, the same top-1 tokens",
    "other": "different numbers",
}
VERDICT_STYLES = {"equal": "bold green", "better": "bold green", "different": "bold", "worse": "bold red"}

State = Literal["gone", "new", "changed", "same"]
Row = tuple[Text, Text]
"""Mark and label, in the color of the mark; and a text, in that of its effect on B."""


def render(diff: DiffReport, name: str) -> str:
    """The diff in one of the `FORMATS`."""
    return {"text": render_text, "json": lambda one: dump(one.to_dict()), "markdown": render_markdown}[name](diff)


def schemas() -> dict[str, dict[str, Any]]:
    """The JSON Schema of `diff --format json`, by its short name."""
    from kvdoctor.report.schema import document_schema

    schema = document_schema(DiffReport, DIFF_SCHEMA)
    schema["properties"]["command"] = {"const": "diff"}
    schema["required"].append("command")
    return {"diff": schema}


def print_diff(diff: DiffReport, console: Console, verbosity: int = 0) -> None:
    """Print a diff. `verbosity`: -1 the differences with an effect and the verdict; 0 as usual; 1 everything."""
    page = Page(console, LABEL_WIDTH)
    if verbosity >= 0:
        page.line("kvdoctor diff", "bold")
        page.write([Pairs(tuple(_list_sides(diff)))])
    sections = _list_sections(diff, everything=verbosity > 0)
    page.write(sections if verbosity >= 0 else filter(None, map(_keep_effects, sections)))
    page.line("")
    page.write(_list_remarks(diff, whole=verbosity >= 0))
    if len(diff.reasons) > 1:
        page.line("worse, because", "bold red")
        page.write([Lines(diff.reasons, listed=True)])
    page.line(format_verdict(diff), VERDICT_STYLES.get(diff.verdict, "bold yellow"))


def render_text(diff: DiffReport) -> str:
    """The diff as plain text: without color, one fact a line."""
    page, console = open_text()
    print_diff(diff, console)
    return page.getvalue()


def render_markdown(diff: DiffReport) -> str:
    """The diff as Markdown."""
    verdict = (Lines((format_verdict(diff),), "strong"), *lines(diff.reasons[1:] and diff.reasons, listed=True))
    blocks: list[Block] = [Pairs(tuple(_list_sides(diff))), *verdict, *_list_sections(diff)]
    remarks = tuple(_list_remarks(diff, whole=True))
    return f"# kvdoctor diff: {diff.verdict}\n{write([*blocks, *([Section('remarks', remarks)] if remarks else [])])}"


def _keep_effects(section: Section) -> Section | None:
    kept: list[Block] = []
    for block in section.content:
        if isinstance(block, Section):
            kept += filter(None, [_keep_effects(block)])
        elif isinstance(block, Pairs):
            rows = tuple(row for row in block.rows if isinstance(row[1], Span) and row[1].kind in ("worse", "better"))
            kept += [Pairs(rows)] if rows else []
    return replace(section, content=tuple(kept)) if kept else None


def _make_row(state: State, label: str, text: str, effect: Effect = "neutral") -> Row:
    return Span(f"{MARKS[state]} {shortened(label, LONGEST_LABEL)}", state), Span(text, effect)


def _list_sides(diff: DiffReport) -> Iterator[Row]:
    sides: tuple[tuple[State, str, ComparedModel], ...] = (("gone", "A", diff.a), ("new", "B", diff.b))
    for state, name, side in sides:
        of = "" if side.source in ("model", "contract") else f", {OTHER_SIDES[side.source]} of {side.model}"
        text = f"{side.path}, a contract" if side.source == "contract" else f"{side.path}{of}: {side.verdict}"
        yield _make_row(state, name, text)


def _list_sections(diff: DiffReport, everything: bool = False) -> Iterator[Section]:
    for stack in diff.stacks:
        title = Span(" -> ".join(dict.fromkeys(filter(None, (stack.a, stack.b)))))
        if stack.b is None:
            yield Section(title, (Pairs((_make_row("gone", "stack", "only A has it", "worse"),)),))
        elif stack.a is None:
            yield Section(title, (Pairs((_make_row("new", "stack", "only B has it"),)),))
        else:
            yield Section(title, tuple(_list_parts(stack, diff, everything)))
    if diff.a.source != "contract" and (rows := tuple(_finding_rows(diff))):
        yield Section("findings", (Pairs(rows),))


def _list_parts(stack: StackDiff, diff: DiffReport, everything: bool) -> Iterator[Section]:
    """The parts of a stack that both sides have; a contract says nothing of graph and behavior."""
    same = _make_row("same", "contract", "a loop written for A works with B")
    parts: dict[str, Iterable[Row]] = {"contract": list(map(_row, stack.contract)) or [same]}
    if diff.a.source != "contract":
        parts["graph"] = _graph_rows(stack, everything)
        parts["behavior"] = _run_rows(stack, diff, everything)
    for title, found in parts.items():
        if rows := tuple(found):
            yield Section(title, (Pairs(rows),))


def _list_remarks(diff: DiffReport, whole: bool) -> Iterator[Lines]:
    """What could not be compared; with `whole` also what the verdict does not need, and notes."""
    found = list(_list_not_compared(diff))
    yield from lines((text for text, essential in found if essential), "open")
    if whole:
        rest = [text for text, essential in found if not essential]
        yield from lines((*rest, *diff.notes), "dim")


def _list_not_compared(diff: DiffReport) -> Iterator[tuple[str, bool]]:
    """The parts that could not be compared, each with whether the verdict depends on it."""
    groups: dict[tuple[str, str, bool], list[str]] = {}
    for entry in diff.not_compared:
        stacks = groups.setdefault((entry.what, entry.reason, entry.essential), [])
        stacks += [entry.stack] if entry.stack else []
    for (what, reason, essential), stacks in groups.items():
        named = f" ({', '.join(stacks)})" if stacks else ""
        yield f"not compared: {what}{named}: {reason}", essential


def _row(change: Difference) -> Row:
    subject = shorten_names(change.subject) if change.subject else ""
    why = f"; {change.because}" if change.because and change.effect == "worse" else ""
    if change.before is None or change.after is None:
        state: State = "new" if change.before is None else "gone"
        return _make_row(state, change.what, f"{subject} {change.before or change.after}{why}", change.effect)
    named = f"{subject}: " if subject else ""
    text = f"{named}{change.field} {change.before} -> {change.after}{why}"
    return _make_row("changed", change.what, text, change.effect)


def _graph_rows(stack: StackDiff, everything: bool) -> Iterator[Row]:
    if not stack.graph:
        yield _make_row("same", "graph", "same versions and operator counts; wiring is not compared")
    fields: dict[str, list[str]] = {}
    operators: dict[str, list[str]] = {}
    # New and removed operators come first: they matter more than changed counts.
    for change in sorted(stack.graph, key=lambda one: one.before is not None and one.after is not None):
        subject = shorten_names(change.subject)
        if change.what == "operator":
            operators.setdefault(change.field, []).append(f"{subject} {change.before or 0} -> {change.after or 0}")
        elif change.field:
            before, after = ("none" if value is None else value for value in (change.before, change.after))
            text = f"{change.field} {before} -> {after}"
            fields.setdefault(subject, []).append(text)
        else:
            yield _row(change)
    for what, found in (("file", fields), ("operators", operators)):
        for subject, counts in found.items():
            most = len(counts) if everything else MAX_NAMES
            shown = join_some(counts, most, rest=" and {} more (all with -v)")
            yield _make_row("changed", what, f"{subject}: {shown}")


def _run_rows(stack: StackDiff, diff: DiffReport, everything: bool) -> Iterator[Row]:
    from kvdoctor.decode.experiments import load

    reported = {experiment.name for experiment in load() if experiment.judged and experiment.shown}
    same = [run for run in stack.experiments if run.a == run.b]
    for run in stack.experiments:
        under = f" under {run.target}" if run.target != "here" else ""
        if run.a != run.b and (everything or run.experiment in reported):
            text = f"{run.a or 'not run'} -> {run.b or 'not run'}{under}"
            yield _make_row("changed", run.experiment, text, run.effect)
        elif everything:
            yield _make_row("same", run.experiment, f"{run.a}{under}")
    if same and not everything:
        yield _make_row("same", "experiments", f"{len(same)} with the same outcome")
    if stack.logits is not None:
        yield _logits_row(stack.logits, diff)


def _logits_row(found: Logits, diff: DiffReport) -> Row:
    off = "not finite" if found.relative is None else f"off by {found.relative:.2g} standard deviations of the logits"
    same = f"{100 * found.same_tokens:.0f} % of the top-1 tokens are the same"
    text = f"{AGREEMENTS[found.agree]}, {found.steps} steps of {found.experiment}"
    if found.agree == "bits":
        return _make_row("same", "logits", text)
    fails = any(reason.startswith("logits of ") for reason in diff.reasons)
    hint = "; different weights are not a fault by themselves (--agree requires more)"
    hint = "" if diff.arguments.get("agree") or found.agree == "logits" else hint
    return _make_row("changed", "logits", f"{text}: {off}, {same}{hint}", "worse" if fails else "neutral")


def _finding_rows(diff: DiffReport) -> Iterator[Row]:
    for one in diff.findings:
        if one.state != "same":
            yield _make_row(one.state, one.state, format_headline(one.finding), one.effect)
    same = [one.finding for one in diff.findings if one.state == "same"]
    if same:
        yield _make_row("same", "both sides", _list_names(f"{f.severity}[{f.code}] {f.name}" for f in same))
    if not diff.findings and diff.a.source != "golden":  # which have none of their own
        yield _make_row("same", "both sides", "none on either side")


def _list_names(names: Iterable[str]) -> str:
    return join_some(list(dict.fromkeys(names)), MAX_NAMES)
