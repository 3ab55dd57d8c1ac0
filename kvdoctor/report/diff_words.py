"""What a diff says, as sections of rows; where it stands on a page is the renderers' business.

A row is marked as a unified diff marks its lines: `-` only A has it, `+` only B, `~` it is other, `=` it is the same.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from kvdoctor.case import first_and_count
from kvdoctor.report import wording
from kvdoctor.report.diff_document import Delta, DiffReport, Effect, FindingDiff, Logits, StackDiff

MOST_NAMED = 12
"""Operators, or findings of both sides, that one row names."""
MARKS = {"gone": "-", "new": "+", "changed": "~", "same": "="}
VERDICTS = {
    "equal": "equal",
    "different": "B is other, and not worse: what is other is listed above",
    "better": "B is better",
    "worse": "B is worse",
    "incomplete": "could not be compared: what is open is listed above",
}
LEVELS = {
    "bits": "equal bit for bit",
    "logits": "within the tolerance of their arithmetic",
    "tokens": "other numbers, the same likeliest tokens",
    "other": "other numbers",
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line: its mark, what it speaks of, what it says, and what that makes of B."""

    mark: str
    what: str
    text: str
    effect: Effect = "neutral"


@dataclass(frozen=True, slots=True)
class Section:
    """A title and its rows."""

    title: str
    rows: tuple[Row, ...]


def sides(diff: DiffReport) -> Iterator[Row]:
    """The two sides."""
    for mark, name, side in (("-", "A", diff.a), ("+", "B", diff.b)):
        of = f", a report of {side.model}" if side.source == "report" else ""
        yield Row(mark, name, f"{side.path}{of}: {side.verdict}")


def sections(diff: DiffReport, everything: bool = False) -> Iterator[Section]:
    """All that was compared, each with what is other; `everything` also with what is the same."""
    for stack in diff.stacks:
        title = " -> ".join(dict.fromkeys(filter(None, (stack.a, stack.b))))
        if stack.a is None or stack.b is None:
            row = Row("+", "stack", "only B has it")
            row = Row("-", "stack", "only A has it", "worse") if stack.b is None else row
            yield Section(title, (row,))
            continue
        yield Section(f"{title}: contract", tuple(_contract(stack)))
        yield Section(f"{title}: graph", tuple(_graph(stack, everything)))
        yield Section(f"{title}: behaviour", tuple(_behaviour(stack, diff, everything)))
    yield Section("findings", tuple(_findings(diff)))


def verdict_line(diff: DiffReport) -> str:
    """The last line."""
    reasons = list(diff.reasons) if diff.verdict == "worse" else []
    if diff.verdict == "better":
        reasons = list(gains(diff))
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    only = "in contract and graph; nothing was run" if diff.arguments.get("static") else "as far as it was compared"
    numbers = any(stack.logits is not None for stack in diff.stacks)
    said = f" {only}" if diff.verdict == "equal" and not numbers else ""
    return VERDICTS[diff.verdict] + said + (f": {reasons[0]}{more}" if reasons else "")


def gains(diff: DiffReport) -> Iterator[str]:
    """What is better in B."""
    for one in diff.findings:
        if one.effect == "better":
            yield f"{one.finding.code} {one.finding.name} is gone"
    for stack in diff.stacks:
        for run in stack.experiments:
            if run.effect == "better":
                yield f"{run.experiment} {run.a} -> {run.b}"
        for delta in stack.contract:
            if delta.effect == "better":
                yield f"{delta.what} {first_and_count(delta.subject)}: {delta.field} {delta.before} -> {delta.after}"


def measured_lines(diff: DiffReport) -> Iterator[str]:
    """Times and memory of both, for information."""
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
            parts.append(f"peak memory {' -> '.join(wording.in_bytes(peak) for peak in peaks if peak)}")
        if parts:
            yield f"measured, for information ({stack.b}): {'; '.join(parts)}"


def not_compared_lines(diff: DiffReport) -> Iterator[tuple[str, bool]]:
    """What could not be compared, and whether the verdict hangs on it."""
    for entry in diff.not_compared:
        stack = f" ({entry.stack})" if entry.stack else ""
        yield f"not compared: {entry.what}{stack}: {entry.reason}", entry.essential


def _contract(stack: StackDiff) -> Iterator[Row]:
    if not stack.contract:
        yield Row("=", "contract", "a loop written for A drives B")
    for delta in stack.contract:
        yield _row(delta)


def _row(delta: Delta) -> Row:
    subject = first_and_count(delta.subject) if delta.subject else ""
    why = f"; {delta.because}" if delta.because and delta.effect == "worse" else ""
    if delta.before is None or delta.after is None:
        mark = "+" if delta.before is None else "-"
        return Row(mark, delta.what, f"{subject} {delta.before or delta.after}{why}", delta.effect)
    named = f"{subject}: " if subject else ""
    return Row("~", delta.what, f"{named}{delta.field} {delta.before} -> {delta.after}{why}", delta.effect)


def _graph(stack: StackDiff, everything: bool) -> Iterator[Row]:
    if not stack.graph:
        yield Row("=", "graph", "versions, operators and initializers")
    fields: dict[str, list[str]] = {}
    operators: dict[str, list[str]] = {}
    # An operator that is new or gone says more than one that is there more often.
    for delta in sorted(stack.graph, key=lambda one: one.before is not None and one.after is not None):
        subject = first_and_count(delta.subject)
        if delta.what == "operator":
            operators.setdefault(delta.field, []).append(f"{subject} {delta.before or 0} -> {delta.after or 0}")
        elif delta.field:
            text = f"{delta.field} {_shown(delta.before)} -> {_shown(delta.after)}"
            fields.setdefault(subject, []).append(text)
        else:
            yield _row(delta)
    for what, found in (("file", fields), ("operators", operators)):
        for place, counts in found.items():
            most = len(counts) if everything else MOST_NAMED
            more = f" and {len(counts) - most} more (all with -v)" if len(counts) > most else ""
            yield Row("~", what, f"{place}: {', '.join(counts[:most])}{more}")


def _shown(value: str | None) -> str:
    return "none" if value is None else value


def _behaviour(stack: StackDiff, diff: DiffReport, everything: bool) -> Iterator[Row]:
    telling = _telling()
    same = [run for run in stack.experiments if run.a == run.b]
    for run in stack.experiments:
        under = f" under {run.target}" if run.target != "here" else ""
        if run.a != run.b and (everything or run.experiment in telling):
            yield Row("~", run.experiment, f"{run.a or 'not run'} -> {run.b or 'not run'}{under}", run.effect)
        elif everything:
            yield Row("=", run.experiment, f"{run.a}{under}")
    if same and not everything:
        yield Row("=", "experiments", f"{len(same)} with the same outcome")
    if stack.logits is not None:
        yield _logits(stack.logits, diff)


def _telling() -> set[str]:
    """The experiments that findings rest on; the others show what teams try."""
    from kvdoctor.experiments import load

    return {experiment.name for experiment in load() if experiment.judged and experiment.shown}


def _logits(found: Logits, diff: DiffReport) -> Row:
    off = "not finite" if found.relative is None else f"off by {found.relative:.2g} of their spread"
    same = f"{100 * found.same_tokens:.0f} % of the likeliest tokens are the same"
    text = f"{LEVELS[found.agree]}, {found.steps} steps of {found.experiment}"
    if found.agree == "bits":
        return Row("=", "logits", text)
    asked: Any = diff.arguments.get("agree")
    fails = any(reason.startswith("logits of ") for reason in diff.reasons)
    hint = (
        "" if asked or found.agree == "logits" else "; other weights are no fault by themselves (--agree asks for more)"
    )
    return Row("~", "logits", f"{text}: {off}, {same}{hint}", "worse" if fails else "neutral")


def _findings(diff: DiffReport) -> Iterator[Row]:
    for one in diff.findings:
        if one.state != "same":
            yield _finding(one)
    same = [one.finding for one in diff.findings if one.state == "same"]
    if same:
        yield Row("=", "both sides", _named(f"{f.severity}[{f.code}] {f.name}" for f in same))
    if not diff.findings:
        yield Row("=", "both sides", "none on either side")


def _finding(one: FindingDiff) -> Row:
    words = {"gone": "gone", "new": "new", "changed": "other"}
    return Row(MARKS[one.state], words[one.state], wording.headline(one.finding), one.effect)


def _named(names: Iterable[str]) -> str:
    found = list(dict.fromkeys(names))
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return ", ".join(found[:MOST_NAMED]) + more


def _seconds(measured: dict[str, Any]) -> dict[int, float]:
    """Seconds of a step with the cache, by the length of the sequence; a report may hold anything under `measured`."""
    found: dict[int, float] = {}
    taken = measured.get("step_seconds")
    for label, seconds in taken.items() if isinstance(taken, dict) else ():
        kind, _, length = label.partition(":")
        if kind == "cached" and length.isdecimal() and isinstance(seconds, float):
            found[int(length)] = seconds
    return found
