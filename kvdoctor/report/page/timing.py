"""The time of a step with the cache and without it, from what was measured on this machine."""

from collections.abc import Iterator
from typing import Any

from kvdoctor.report import wording
from kvdoctor.report.document import Report
from kvdoctor.report.page.blocks import Place, scrolled, table
from kvdoctor.report.page.markup import Content, Element, h

LONGEST, AMOUNT, HIGH, GAP = 170, 76, 16, 10
CHARACTER = 6.6
"""Pixels of a letter, at most, in the usual faces."""
WORDS = {"cached": "with the cache", "uncached": "without it"}


def chart(report: Report, stack: str, place: Place) -> Content:
    """Bars of milliseconds; None where no step was timed."""
    rows = list(_times(report, stack))
    if not rows:
        return None
    measured = _of_stack(report, stack)
    line = wording.cost_line(measured) or "The time of a step, in milliseconds."
    longest = max(seconds for _, seconds, _ in rows)
    caption = "Time of one step, in milliseconds"
    label = place.id("time")
    figures = [(words, f"{seconds * 1000:.3f}") for words, seconds, _ in rows]
    return (
        h(
            "figure",
            h("figcaption", line[0].upper() + line[1:] + ".", id=label),
            scrolled(label, _bars(rows, longest)),
            h(
                "details",
                h("summary", "The same as a table"),
                table(f"{label}-table", caption, ("step", "ms"), figures),
            ),
        ),
    )


def _of_stack(report: Report, stack: str) -> dict[str, float]:
    for measured in (report.measured, report.measured.get("after")):
        if isinstance(measured, dict) and isinstance(found := measured.get(stack), dict):
            times = found.get("step_seconds")
            return times if isinstance(times, dict) else {}
    return {}


def _times(report: Report, stack: str) -> Iterator[tuple[str, float, str]]:
    """Words, seconds and kind of each bar; of a repaired stack those before the repair as well."""
    cost: Any = report.measured.get("cost")
    pairs = cost.get("step_seconds", {}).get(stack, {}) if isinstance(cost, dict) else {}
    times = _of_stack(report, stack)
    for label in sorted({*times, *pairs}, key=lambda label: (_length(label), label)):
        kind = label.partition(":")[0]
        words = f"{_length(label)} tokens {WORDS.get(kind, kind)}"
        before, after = pairs.get(label, (None, times.get(label)))
        if before:
            yield f"{words}, before", before, f"{kind} before"
        if after:
            yield f"{words}{', after' if before else ''}", after, kind


def _length(label: str) -> int:
    digits = label.partition(":")[2]
    return int(digits) if digits.isdecimal() else 0


def _bars(rows: list[tuple[str, float, str]], longest: float) -> Element:
    drawn: list[Element] = []
    left, y = int(CHARACTER * max(len(words) for words, _, _ in rows)) + 12, 2
    for words, seconds, kind in rows:
        width = max(round(LONGEST * seconds / longest, 1), 2.0)
        drawn.append(h("text", words, x=left - 8, y=y + 12, class_="row-label"))
        drawn.append(h("rect", x=left, y=y, width=width, height=HIGH, rx=2, class_=f"time-{kind}"))
        drawn.append(h("text", f"{seconds * 1000:.2f} ms", x=left + width + 6, y=y + 12, class_="amount"))
        y += HIGH + (GAP if kind.startswith("uncached") else 4)
    width = left + LONGEST + AMOUNT
    told = "; ".join(f"{words}: {seconds * 1000:.2f} ms" for words, seconds, _ in rows)
    return h(
        "svg", drawn, width=width, height=y, viewBox=f"0 0 {width} {y}", role="img", aria_label=told, class_="lane"
    )
