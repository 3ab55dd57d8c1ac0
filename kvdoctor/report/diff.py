"""A diff as text, for a terminal or a log, and as Markdown, to paste into an issue or a pull request.

Both print the same sections of rows. Each row is marked like a line of a unified diff: `-` A only, `+` B only, `~`
different, `=` the same. Text has color and wrapping on a terminal, and one line per fact in a pipe.
"""

import io
from collections.abc import Iterable, Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvdoctor.records import record
from kvdoctor.report.diff_document import (
    Difference,
    DiffReport,
    Effect,
    FindingDiff,
    Logits,
    StackDiff,
    WeightDifference,
    WeightsDiff,
    format_verdict,
)
from kvdoctor.report.json_format import render_diff
from kvdoctor.report.markdown import table
from kvdoctor.report.safe import LONGEST_QUOTED, code, markdown, printable, shortened
from kvdoctor.report.text_page import PIPE_WIDTH
from kvdoctor.report.wording.finding import format_headline
from kvdoctor.report.wording.units import format_bytes, shorten_names

FORMATS = ("text", "json", "markdown")
MAX_NAMES = 12
"""The number of operators, or of findings of both sides, that one row lists."""
OTHER_SIDES = {"report": "a report", "golden": "golden numbers"}
MARKS = {"gone": "-", "new": "+", "changed": "~", "same": "="}
AGREEMENTS = {
    "bits": "equal bit for bit",
    "logits": "within the tolerance of their arithmetic",
    "tokens": "different numbers, the same top-1 tokens",
    "other": "different numbers",
}


EFFECT_STYLES = {"worse": "bold red", "better": "green", "neutral": ""}
MARK_STYLES = {"-": "red", "+": "green", "~": "yellow", "=": "dim"}
VERDICT_STYLES = {"equal": "bold green", "better": "bold green", "different": "bold", "worse": "bold red"}
LABEL_WIDTH = 13
LONGEST_LABEL = 24


@record
class Row:
    """One line: its mark, its label, its text, and its effect on B."""

    mark: str
    label: str
    text: str
    effect: Effect = "neutral"


@record
class Section:
    """A title and its rows."""

    title: str
    rows: tuple[Row, ...]


def render(diff: DiffReport, name: str) -> str:
    """The diff in one of the `FORMATS`."""
    return {"text": render_text, "json": render_diff, "markdown": render_markdown}[name](diff)


def print_diff(diff: DiffReport, console: Console, verbosity: int = 0) -> None:
    """Print a diff. `verbosity`: -1 the differences with an effect and the verdict; 0 as usual; 1 everything."""
    page = _Page(console)
    if verbosity >= 0:
        page.line("kvdoctor diff", "bold")
        page.rows(_list_sides(diff))
    for section in _list_sections(diff, everything=verbosity > 0):
        rows = [row for row in section.rows if verbosity >= 0 or row.effect != "neutral"]
        if rows:
            page.line("")
            page.line(section.title, "bold")
            page.rows(rows)
    page.line("")
    for text, essential in _list_not_compared(diff):
        if essential or verbosity >= 0:
            page.line(text, "yellow" if essential else "dim")
    for note in (*diff.notes, *_list_measurements(diff)) if verbosity >= 0 else ():
        page.line(note, "dim")
    if len(diff.reasons) > 1:
        page.line("worse, because", "bold red")
        for reason in diff.reasons:
            page.line(f"  {reason}")
    page.line(format_verdict(diff), VERDICT_STYLES.get(diff.verdict, "bold yellow"))


def render_text(diff: DiffReport) -> str:
    """The diff as plain text: without color, one fact a line."""
    page = io.StringIO()
    print_diff(diff, Console(file=page, width=PIPE_WIDTH, no_color=True, highlight=False, markup=False, emoji=False))
    return page.getvalue()


class _Page:
    def __init__(self, console: Console) -> None:
        self.console = console

    def line(self, text: str, style: str = "") -> None:
        """Print one line; only a terminal wraps it."""
        short = printable(shortened(text, LONGEST_QUOTED))
        self.console.print(Text(short, style), soft_wrap=not self.console.is_terminal)

    def rows(self, rows: Iterable[Row]) -> None:
        """Print rows of mark, label and text; wrapped text is indented."""
        cells = [
            (row, printable(shortened(row.label, LONGEST_LABEL)), printable(shortened(row.text, LONGEST_QUOTED)))
            for row in rows
        ]
        width = max([LABEL_WIDTH, *(len(label) + 1 for _, label, _ in cells)])
        if not self.console.is_terminal:
            for row, label, text in cells:
                line = f"  {row.mark} {label:<{width}}{text}".rstrip()
                self.console.print(Text(line), soft_wrap=True)
            return
        grid = Table.grid(padding=(0, 0))
        grid.add_column(width=4, no_wrap=True)
        grid.add_column(width=width, no_wrap=True)
        grid.add_column(overflow="fold")
        for row, label, text in cells:
            style = EFFECT_STYLES[row.effect]
            grid.add_row(
                Text(f"  {row.mark} ", MARK_STYLES.get(row.mark, "")), Text(label, style or "dim"), Text(text, style)
            )
        self.console.print(grid)


def render_markdown(diff: DiffReport) -> str:
    """The diff as Markdown."""
    return "\n".join(_markdown_lines(diff)) + "\n"


def _markdown_lines(diff: DiffReport) -> Iterator[str]:
    yield f"# kvdoctor diff: {diff.verdict}"
    yield ""
    yield from table(["", "", ""], [_markdown_cells(row) for row in _list_sides(diff)])
    yield ""
    yield f"**{markdown(format_verdict(diff))}**"
    if len(diff.reasons) > 1:
        yield ""
        yield from (f"- {markdown(reason)}" for reason in diff.reasons)
    for section in _list_sections(diff):
        if section.rows:
            yield ""
            yield f"## {markdown(section.title)}"
            yield ""
            yield from table(["", "", ""], [_markdown_cells(row) for row in section.rows])
    lines = [text for text, _ in _list_not_compared(diff)] + list(diff.notes)
    lines += _list_measurements(diff)
    if lines:
        yield ""
        yield from (f"- {markdown(line)}" for line in lines)


def _markdown_cells(row: Row) -> list[str]:
    text = code(row.text)
    marks = {"worse": f"**worse** {text}", "better": f"**better** {text}"}
    return [code(row.mark), markdown(row.label), marks.get(row.effect, text)]


def _list_sides(diff: DiffReport) -> Iterator[Row]:
    """The two sides."""
    for mark, name, side in (("-", "A", diff.a), ("+", "B", diff.b)):
        required = side.source == "contract"
        of = "" if side.source in ("model", "contract") else f", {OTHER_SIDES[side.source]} of {side.model}"
        yield Row(mark, name, f"{side.path}, a contract" if required else f"{side.path}{of}: {side.verdict}")


def _list_sections(diff: DiffReport, everything: bool = False) -> Iterator[Section]:
    """The differences of each stack, and of the findings; with `everything` also what is the same."""
    for stack in diff.stacks:
        title = " -> ".join(dict.fromkeys(filter(None, (stack.a, stack.b))))
        if stack.a is None or stack.b is None:
            row = Row("+", "stack", "only B has it")
            row = Row("-", "stack", "only A has it", "worse") if stack.b is None else row
            yield Section(title, (row,))
            continue
        yield Section(f"{title}: contract", tuple(_contract_rows(stack)))
        if diff.a.source == "contract":
            continue  # it says nothing of these
        yield Section(f"{title}: graph", tuple(_graph_rows(stack, everything)))
        if stack.weights is not None:
            yield Section(f"{title}: weights", tuple(_weight_rows(stack.weights, everything)))
        yield Section(f"{title}: behavior", tuple(_run_rows(stack, diff, everything)))
    if diff.a.source != "contract":
        yield Section("findings", tuple(_finding_rows(diff)))


def _list_measurements(diff: DiffReport) -> Iterator[str]:
    """Times and memory of both sides, for information."""
    for stack in diff.stacks:
        old, new = diff.measured.get("a", {}).get(stack.a or ""), diff.measured.get("b", {}).get(stack.b or "")
        if not (isinstance(old, dict) and isinstance(new, dict)):
            continue
        parts = []
        before, after = _seconds(old), _seconds(new)
        if lengths := before.keys() & after.keys():
            longest = max(lengths)
            milliseconds = " -> ".join(f"{side[longest] * 1000:.2f} ms" for side in (before, after))
            parts.append(f"a step at {longest} tokens {milliseconds}")
        peaks = [side.get("peak_bytes") for side in (old, new)]
        if all(isinstance(peak, int) and peak > 0 for peak in peaks):
            parts.append(f"peak memory {' -> '.join(format_bytes(peak) for peak in peaks if peak)}")
        if parts:
            yield f"measured, for information ({stack.b}): {'; '.join(parts)}"


def _list_not_compared(diff: DiffReport) -> Iterator[tuple[str, bool]]:
    """The parts that could not be compared, each with whether the verdict depends on it."""
    alike: dict[tuple[str, str, bool], list[str]] = {}
    for entry in diff.not_compared:
        stacks = alike.setdefault((entry.what, entry.reason, entry.essential), [])
        stacks += [entry.stack] if entry.stack else []
    for (what, reason, essential), stacks in alike.items():
        named = f" ({', '.join(stacks)})" if stacks else ""
        yield f"not compared: {what}{named}: {reason}", essential


def _contract_rows(stack: StackDiff) -> Iterator[Row]:
    if not stack.contract:
        yield Row("=", "contract", "a loop written for A works with B")
    for change in stack.contract:
        yield _row(change)


def _row(change: Difference) -> Row:
    subject = shorten_names(change.subject) if change.subject else ""
    why = f"; {change.because}" if change.because and change.effect == "worse" else ""
    if change.before is None or change.after is None:
        mark = "+" if change.before is None else "-"
        return Row(mark, change.what, f"{subject} {change.before or change.after}{why}", change.effect)
    named = f"{subject}: " if subject else ""
    return Row("~", change.what, f"{named}{change.field} {change.before} -> {change.after}{why}", change.effect)


def _graph_rows(stack: StackDiff, everything: bool) -> Iterator[Row]:
    if not stack.graph:
        yield Row("=", "graph", "same versions and operator counts; wiring is not compared")
    fields: dict[str, list[str]] = {}
    operators: dict[str, list[str]] = {}
    # New and removed operators come first: they matter more than changed counts.
    for change in sorted(stack.graph, key=lambda one: one.before is not None and one.after is not None):
        subject = shorten_names(change.subject)
        if change.what == "operator":
            operators.setdefault(change.field, []).append(f"{subject} {change.before or 0} -> {change.after or 0}")
        elif change.field:
            text = f"{change.field} {_or_none(change.before)} -> {_or_none(change.after)}"
            fields.setdefault(subject, []).append(text)
        else:
            yield _row(change)
    for what, found in (("file", fields), ("operators", operators)):
        for subject, counts in found.items():
            most = len(counts) if everything else MAX_NAMES
            more = f" and {len(counts) - most} more (all with -v)" if len(counts) > most else ""
            yield Row("~", what, f"{subject}: {', '.join(counts[:most])}{more}")


def _weight_rows(found: WeightsDiff, everything: bool) -> Iterator[Row]:
    """The weights that differ, the most different first."""
    moved = f", {found.renamed} of them under another name" if found.renamed else ""
    yield Row("=", "weights", f"{found.same + found.renamed} with the same content{moved}")
    if found.changed:
        yield Row("~", "changed", f"{len(found.changed)}: {' and '.join(_list_layers(found.changed))}")
    most = len(found.changed) if everything else MAX_NAMES
    ranked = sorted(found.changed, key=lambda one: (one.relative is not None, -(one.relative or 0.0)))
    for one in ranked[:most]:
        name = one.name if one.name == one.other else f"{one.name} -> {one.other}"
        yield Row("~", "weight", f"{name} {one.type}: {_describe_change(one)}")
    if len(ranked) > most:
        yield Row("~", "weight", f"and {len(ranked) - most} more (all with -v)")
    for mark, names in (("-", found.only_a), ("+", found.only_b)):
        if names:
            yield Row(mark, "weights", _list_names(names) if not everything else ", ".join(names))


def _describe_change(one: WeightDifference) -> str:
    if one.reason or one.largest is None:
        return one.reason
    parts = [f"off by at most {one.largest:.2g}"]
    parts += [f"{one.relative:.2g} of its root mean square"] if one.relative is not None else []
    parts += [f"correlation {one.correlation:.6g}"] if one.correlation is not None else []
    return ", ".join(parts)


def _list_layers(changed: Iterable[WeightDifference]) -> Iterator[str]:
    """The layers of changed weights, in words: `layers 0, 1 and 3 outside of layers`."""
    changed = list(changed)
    layers = sorted({one.layer for one in changed if one.layer is not None})
    outside = sum(one.layer is None for one in changed)
    if layers:
        yield f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
    if outside:
        yield f"{outside} outside of layers"


def _or_none(value: str | None) -> str:
    return "none" if value is None else value


def _run_rows(stack: StackDiff, diff: DiffReport, everything: bool) -> Iterator[Row]:
    reported = _reported_experiments()
    same = [run for run in stack.experiments if run.a == run.b]
    for run in stack.experiments:
        under = f" under {run.target}" if run.target != "here" else ""
        if run.a != run.b and (everything or run.experiment in reported):
            yield Row("~", run.experiment, f"{run.a or 'not run'} -> {run.b or 'not run'}{under}", run.effect)
        elif everything:
            yield Row("=", run.experiment, f"{run.a}{under}")
    if same and not everything:
        yield Row("=", "experiments", f"{len(same)} with the same outcome")
    if stack.logits is not None:
        yield _logits_row(stack.logits, diff)


def _reported_experiments() -> set[str]:
    """The experiments that findings depend on; the others try common workarounds."""
    from kvdoctor.decode.experiments import load

    return {experiment.name for experiment in load() if experiment.judged and experiment.shown}


def _logits_row(found: Logits, diff: DiffReport) -> Row:
    off = "not finite" if found.relative is None else f"off by {found.relative:.2g} standard deviations of the logits"
    same = f"{100 * found.same_tokens:.0f} % of the top-1 tokens are the same"
    text = f"{AGREEMENTS[found.agree]}, {found.steps} steps of {found.experiment}"
    if found.agree == "bits":
        return Row("=", "logits", text)
    required = diff.arguments.get("agree")
    fails = any(reason.startswith("logits of ") for reason in diff.reasons)
    hint = (
        ""
        if required or found.agree == "logits"
        else "; different weights are not a fault by themselves (--agree requires more)"
    )
    return Row("~", "logits", f"{text}: {off}, {same}{hint}", "worse" if fails else "neutral")


def _finding_rows(diff: DiffReport) -> Iterator[Row]:
    for one in diff.findings:
        if one.state != "same":
            yield _finding_row(one)
    same = [one.finding for one in diff.findings if one.state == "same"]
    if same:
        yield Row("=", "both sides", _list_names(f"{f.severity}[{f.code}] {f.name}" for f in same))
    if not diff.findings and diff.a.source != "golden":  # which have none of their own
        yield Row("=", "both sides", "none on either side")


def _finding_row(one: FindingDiff) -> Row:
    labels = {"gone": "gone", "new": "new", "changed": "changed"}
    return Row(MARKS[one.state], labels[one.state], format_headline(one.finding), one.effect)


def _list_names(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return ", ".join(found[:MAX_NAMES]) + more


def _seconds(measured: dict[str, Any]) -> dict[int, float]:
    """Seconds of a step with the cache by sequence length. An earlier report may have anything under `measured`."""
    found: dict[int, float] = {}
    times = measured.get("step_seconds")
    for label, seconds in times.items() if isinstance(times, dict) else ():
        kind, _, length = label.partition(":")
        if kind == "cached" and length.isdecimal() and isinstance(seconds, float):
            found[int(length)] = seconds
    return found
