"""Measurements as pictures: logits differences by step, cache differences by layer, and the time of a step."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.runs import LogitsDifference, Run
from kvdoctor.decode.tolerances import Tolerance
from kvdoctor.report.document import Report
from kvdoctor.report.page.blocks import PagePosition, chip, fold, scrollable, table
from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.report.wording.runs import describe_fault_location, format_cache_speedup, format_outcome
from kvdoctor.report.wording.units import format_milliseconds

MOST_STEPS, MOST_RUNS, MOST_LAYERS = 24, 24, 512
IN_A_ROW = 32
SQUARE, LABELS, ROW = 17, 72, 21
LOWEST, HIGHEST = -7, 0
"""Powers of ten between which the colors go: below is practically equal, above is unrelated."""
BAR_WIDTH, AMOUNT, BAR_HEIGHT, GAP = 170, 76, 16, 10
CHARACTER = 6.6
"""Pixels of a letter, at most, in the usual faces."""
CACHE_WORDS = {"cached": "with the cache", "uncached": "without the cache"}


def draw_differences(
    runs: Sequence[Run], contract: CacheContract, tolerance: Tolerance, place: PagePosition
) -> Content:
    """A row for each run whose logits were compared, a column for each step."""
    compared = [run for run in runs if any(step.difference for step in run.steps)]
    if not compared:
        return h("p", "No step was compared with a reference run.")
    longest = max(len(run.steps) for run in compared)
    kept = _select_steps(longest)
    header: list[Content] = ["experiment", "outcome", *(str(step) for step in kept)]
    rows = [_row(run, kept) for run in compared[:MOST_RUNS]]
    sentences: list[Content] = [
        "Largest difference of the logits in each step, in standard deviations of the logits. For this arithmetic "
        f"({contract.exactness}), up to {tolerance.passes:g} passes and more than {tolerance.fails:g} is a fault."
    ]
    if longest > len(kept):
        sentences.append(f" {longest - len(kept)} steps in the middle are not shown.")
    if len(compared) > MOST_RUNS:
        sentences.append(f" {len(compared) - MOST_RUNS} more experiments are not shown.")
    caption = f"Difference from {' or '.join(sorted({run.yardstick for run in compared}))}, by step"
    return h("p", sentences), table(place.id("steps-heat"), caption, header, rows, "heat"), _scale()


def _select_steps(count: int) -> list[int]:
    if count <= MOST_STEPS:
        return list(range(count))
    half = MOST_STEPS // 2
    return [*range(half), *range(count - half, count)]


def _row(run: Run, kept: Sequence[int]) -> list[Content]:
    by_step = {step.step: step for step in run.steps}
    cells: list[Content] = [run.experiment, chip(format_outcome(run), run.shows)]
    for number in kept:
        step = by_step.get(number)
        if step is None:
            cells.append(h("td", class_="none"))
        elif not step.returned:
            cells.append(h("td", "fails", class_="failed"))
        elif step.difference is None:
            cells.append(h("td", "\u2013", class_="none"))
        else:
            cells.append(h("td", _amount(step.difference), class_=_heat(step.difference)))
    return cells


def _amount(difference: LogitsDifference) -> str:
    return _short(difference.relative) if difference.finite else "not finite"


def _short(relative: float) -> str:
    return "0" if relative == 0 else f"{relative:.0e}".replace("e-0", "e-").replace("e+00", "")


def _heat(difference: LogitsDifference) -> str:
    return f"t{_degree(difference.relative)}" if difference.finite else "t7"


def _degree(relative: float) -> int:
    """0 for equal, 7 for a standard deviation and more."""
    if relative <= 0 or not math.isfinite(relative):
        return 0 if relative <= 0 else HIGHEST - LOWEST
    return min(max(math.floor(math.log10(relative)) - LOWEST, 0), HIGHEST - LOWEST)


def _scale() -> Element:
    """The legend of the colors."""
    words = ["under 1e-6", *(f"1e{power}" for power in range(LOWEST + 1, HIGHEST)), "1 or more"]
    entries = (h("li", h("span", class_=f"swatch t{n}"), word) for n, word in enumerate(words))
    return h("ul", entries, class_="legend", aria_label="Colors of the differences")


def draw_layers(runs: Sequence[Run], contract: CacheContract, place: PagePosition) -> Content:
    """The cache after the last step compared with that of one call over the same tokens; the first divergence."""
    by_name = {slot.present: slot for slot in contract.slots if slot.present is not None and slot.layer is not None}
    made = [part for number, run in enumerate(runs) for part in _of_run(run, by_name, place.id(f"layers-{number}"))]
    diverging = list(_divergences(runs))
    if not made and not diverging:
        return None
    return (
        place.heading("By layer", class_="by-layer"),
        made,
        (h("p", "First divergence from the run without a cache:"), h("ul", (h("li", line) for line in diverging)))
        if diverging
        else None,
    )


def _of_run(run: Run, by_name: dict[str, Slot], label: str) -> Iterator[Content]:
    last = next((step for step in reversed(run.steps) if step.slots), None)
    if last is None:
        return
    parts: dict[str, dict[int, float]] = {}
    for name, off in last.slots.items():
        if (slot := by_name.get(name)) is not None and slot.layer is not None and slot.layer < MOST_LAYERS:
            parts.setdefault(slot.part, {})[slot.layer] = off
    if not parts:
        return
    numbers = sorted({layer for row in parts.values() for layer in row})
    worst = max(last.slots, key=lambda name: last.slots[name])
    caption = (
        f"{run.experiment}: the cache after step {last.step} compared with that of one call over the same tokens, "
        f"off by at most {last.slots[worst]:.1e} standard deviations of the slot ({worst})"
    )
    rows = [(f"layer {n}", *(_short(row[n]) if n in row else "\u2013" for row in parts.values())) for n in numbers]
    yield h(
        "figure",
        h("figcaption", caption, id=label),
        [
            scrollable(label, _strip(parts, numbers[start : start + IN_A_ROW], caption))
            for start in range(0, len(numbers), IN_A_ROW)
        ],
        fold("The same as a table", table(f"{label}-table", caption, ("layer", *parts), rows)),
    )


def _strip(parts: dict[str, dict[int, float]], numbers: Sequence[int], caption: str) -> Element:
    """A square for each layer, a row for each part."""
    width, height = LABELS + SQUARE * len(numbers) + 4, ROW * len(parts) + 20
    drawn: list[Element] = []
    for line, (part, row) in enumerate(parts.items()):
        drawn.append(h("text", part, x=LABELS - 8, y=ROW * line + 15, class_="row-label"))
        drawn += (
            h("rect", x=LABELS + SQUARE * i, y=ROW * line + 2, width=15, height=17, rx=2, class_=f"t{_degree(row[n])}")
            for i, n in enumerate(numbers)
            if n in row
        )
    for i, n in enumerate(numbers):
        if n % 4 == 0 or len(numbers) <= 8:
            drawn.append(h("text", n, x=LABELS + SQUARE * i + 8, y=ROW * len(parts) + 15, class_="tick"))
    label = f"{caption}. Layers {numbers[0]} to {numbers[-1]}; the table below has the numbers."
    return h("svg", drawn, width=width, height=height, viewBox=f"0 0 {width} {height}", role="img", aria_label=label)


def _divergences(runs: Sequence[Run]) -> Iterator[Content]:
    for run in runs:
        if run.location is not None:
            rows = list(describe_fault_location(run))
            yield h("strong", run.experiment), ": ", "; ".join(f"{label} {text}" for label, text in rows[:8])


def draw_times(report: Report, stack: str, place: PagePosition) -> Content:
    """Bars of milliseconds; None where no step was timed."""
    rows = list(_times(report, stack))
    if not rows:
        return None
    measured = _of_stack(report, stack)
    line = format_cache_speedup(measured) or "The time of a step, in milliseconds."
    longest = max(seconds for _, seconds, _ in rows)
    caption = "Time of one step, in milliseconds"
    label = place.id("time")
    figures = [(words, f"{seconds * 1000:.3f}") for words, seconds, _ in rows]
    return (
        h(
            "figure",
            h("figcaption", line[0].upper() + line[1:] + ".", id=label),
            scrollable(label, _bars(rows, longest)),
            h(
                "details",
                h("summary", "The same as a table"),
                table(f"{label}-table", caption, ("tokens and mode", "time, ms"), figures),
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
        words = f"{_length(label)} tokens {CACHE_WORDS.get(kind, kind)}"
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
        width = max(round(BAR_WIDTH * seconds / longest, 1), 2.0)
        drawn.append(h("text", words, x=left - 8, y=y + 12, class_="row-label"))
        drawn.append(h("rect", x=left, y=y, width=width, height=BAR_HEIGHT, rx=2, class_=f"time-{kind}"))
        drawn.append(h("text", format_milliseconds(seconds), x=left + width + 6, y=y + 12, class_="amount"))
        y += BAR_HEIGHT + (GAP if kind.startswith("uncached") else 4)
    width = left + BAR_WIDTH + AMOUNT
    label = "; ".join(f"{words}: {format_milliseconds(seconds)}" for words, seconds, _ in rows)
    return h(
        "svg", drawn, width=width, height=y, viewBox=f"0 0 {width} {y}", role="img", aria_label=label, class_="lane"
    )
