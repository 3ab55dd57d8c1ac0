"""Measurements as pictures: the cache over time, logits differences by step, cache differences by layer, step times."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.decode.experiments import by_name
from kvdoctor.decode.runs import Run
from kvdoctor.decode.tolerances import Tolerance
from kvdoctor.records import record
from kvdoctor.report.document import Report
from kvdoctor.report.page import elements
from kvdoctor.report.page.contract_diagram import Group, group_slots
from kvdoctor.report.page.elements import Content, Element, PagePosition, chip, drawing, fold, h, scrollable, table
from kvdoctor.report.sections.cache_lengths import STATE_TEXTS, CacheLength, trace_slot
from kvdoctor.report.sections.stack import CHARTED, find_step_seconds
from kvdoctor.report.wording import format_milliseconds
from kvdoctor.report.wording.runs import format_outcome

MOST_STEPS, MOST_RUNS, MOST_LAYERS = 24, 24, 512
IN_A_ROW = 32
SQUARE, LABELS, ROW = 17, 72, 21
LOWEST, HIGHEST = -7, 0
"""Powers of ten between which the colors go: below is practically equal, above is unrelated."""
BAR_WIDTH, AMOUNT, BAR_HEIGHT, GAP = 170, 76, 16, 10
CHARACTER = 6.6
"""Pixels of a letter, at most, in the usual faces."""
T = TypeVar("T")
CACHE_USES = {"cached": "with the cache", "uncached": "without the cache"}


def draw_differences(
    place: PagePosition, runs: Sequence[Run], contract: CacheContract, tolerance: Tolerance
) -> Content:
    """A row for each run whose logits were compared, a column for each step."""
    compared = [run for run in runs if any(step.difference for step in run.steps)]
    if not compared:
        return h("p", "No step was compared with a reference run.")
    longest = max(len(run.steps) for run in compared)
    shown, left_out = _select(range(longest))
    header: list[Content] = ["experiment", "outcome", *(str(step) for step in shown)]
    rows = [_row(run, shown) for run in compared[:MOST_RUNS]]
    sentences: list[Content] = [
        "Largest difference of the logits in each step, in standard deviations of the logits. For this arithmetic "
        f"({contract.exactness}), up to {tolerance.passes:g} passes and more than {tolerance.fails:g} is a fault."
    ]
    if left_out:
        sentences.append(f" {left_out} steps in the middle are not shown.")
    if len(compared) > MOST_RUNS:
        sentences.append(f" {len(compared) - MOST_RUNS} more experiments are not shown.")
    caption = f"Difference from {' or '.join(sorted({run.yardstick for run in compared}))}, by step"
    return h("p", sentences), table(place.id("steps-heat"), caption, header, rows, "heat"), _scale()


def _row(run: Run, shown: Sequence[int]) -> list[Content]:
    by_step = {step.step: step for step in run.steps}
    cells: list[Content] = [run.experiment, chip(format_outcome(run), run.shows)]
    for number in shown:
        step, text, kind = by_step.get(number), "", "none"
        if step is not None and (not step.returned or step.difference is None):
            text, kind = ("\u2013", "none") if step.returned else ("fails", "failed")
        elif step is not None and step.difference is not None:
            finite, relative = step.difference.finite, step.difference.relative
            text, kind = (_short(relative), f"t{_degree(relative)}") if finite else ("not finite", "t7")
        cells.append(h("td", text or None, class_=kind))
    return cells


def _short(relative: float) -> str:
    return "0" if relative == 0 else f"{relative:.0e}".replace("e-0", "e-").replace("e+00", "")


def _degree(relative: float) -> int:
    """0 for equal, 7 for a standard deviation and more."""
    if relative <= 0 or not math.isfinite(relative):
        return 0 if relative <= 0 else HIGHEST - LOWEST
    return min(max(math.floor(math.log10(relative)) - LOWEST, 0), HIGHEST - LOWEST)


def _scale() -> Element:
    """The legend of the colors."""
    limits = ["under 1e-6", *(f"1e{power}" for power in range(LOWEST + 1, HIGHEST)), "1 or more"]
    entries = (h("li", h("span", class_=f"swatch t{n}"), limit) for n, limit in enumerate(limits))
    return h("ul", entries, class_="legend", aria_label="Colors of the differences")


def draw_layers(place: PagePosition, runs: Sequence[Run], contract: CacheContract) -> Content:
    """The cache after the last step compared with that of one call over the same tokens."""
    by_name = {slot.present: slot for slot in contract.slots if slot.present is not None and slot.layer is not None}
    made = [part for number, run in enumerate(runs) for part in _of_run(run, by_name, place.id(f"layers-{number}"))]
    return elements.appendix(place.heading("By layer", class_="by-layer"), made) if made else None


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
    ranges = (numbers[start : start + IN_A_ROW] for start in range(0, len(numbers), IN_A_ROW))
    strips = [scrollable(label, _strip(parts, some, caption)) for some in ranges]
    same = fold("The same as a table", table(f"{label}-table", caption, ("layer", *parts), rows))
    yield h("figure", h("figcaption", caption, id=label), strips, same)


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
    return drawing(width, height, label, drawn)


def draw_times(place: PagePosition, report: Report, stack: str) -> Content:
    """Bars of milliseconds; None where no step was timed."""
    rows = list(_times(report, stack))
    if not rows:
        return None
    label, title = place.id("time"), "Time of one step, in milliseconds"
    figures = [(name, f"{seconds * 1000:.3f}") for name, seconds, _ in rows]
    numbers = table(f"{label}-table", title, ("tokens and mode", "time, ms"), figures)
    bars = scrollable(label, _bars(rows, max(seconds for _, seconds, _ in rows)))
    return h("figure", h("figcaption", f"{title}.", id=label), bars, fold("The same as a table", numbers))


def _times(report: Report, stack: str) -> Iterator[tuple[str, float, str]]:
    """Label, seconds and kind of each bar; of a repaired stack those before the repair as well."""
    cost: Any = report.measured.get("cost")
    pairs = cost.get("step_seconds", {}).get(stack, {}) if isinstance(cost, dict) else {}
    times = find_step_seconds(report, stack)
    for label in sorted({*times, *pairs}, key=lambda label: (_length(label), label)):
        kind = label.partition(":")[0]
        title = f"{_length(label)} tokens {CACHE_USES.get(kind, kind)}"
        before, after = pairs.get(label, (None, times.get(label)))
        if before:
            yield f"{title}, before", before, f"{kind} before"
        if after:
            yield f"{title}{', after' if before else ''}", after, kind


def _length(label: str) -> int:
    digits = label.partition(":")[2]
    return int(digits) if digits.isdecimal() else 0


def _bars(rows: list[tuple[str, float, str]], longest: float) -> Element:
    drawn: list[Element] = []
    left, y = int(CHARACTER * max(len(label) for label, _, _ in rows)) + 12, 2
    for label, seconds, kind in rows:
        width = max(round(BAR_WIDTH * seconds / longest, 1), 2.0)
        drawn.append(h("text", label, x=left - 8, y=y + 12, class_="row-label"))
        drawn.append(h("rect", x=left, y=y, width=width, height=BAR_HEIGHT, rx=2, class_=f"time-{kind}"))
        drawn.append(h("text", format_milliseconds(seconds), x=left + width + 6, y=y + 12, class_="amount"))
        y += BAR_HEIGHT + (GAP if kind.startswith("uncached") else 4)
    width = left + BAR_WIDTH + AMOUNT
    label = "; ".join(f"{label}: {format_milliseconds(seconds)}" for label, seconds, _ in rows)
    return drawing(width, y, label, drawn, class_="lane")


MOST_LANES = 6
GUTTER, CELL, BAR, TALL = 12, 42, 22, 62
AXIS = 36
TOP, TOP_WITH_FAULT = 20, 40
"""Room above the tallest bar: for its number, or for what went wrong."""
NARROW, LEAST_WIDTH = 10, 124
"""Steps that fit on a telephone, and the width that what is written under them takes."""


def draw_loops(place: PagePosition, runs: Sequence[Run], contract: CacheContract) -> Content:
    """A picture for each loop that was run, with how to read them; None where no loop was."""
    shown = [run for run in runs if run.experiment in CHARTED and run.steps]
    scale = _share_scale(shown, contract)
    made = [_figure(run, contract, (place, place.id(f"loop-{n}")), scale) for n, run in enumerate(shown)]
    return (_legend(), h("div", made, class_="loops")) if made else None


@record
class Scale:
    """What the pictures of one stack share: the largest length of each kind of slot, and the room above the bars."""

    highest: dict[str, int]
    top: int


def _share_scale(runs: Sequence[Run], contract: CacheContract) -> Scale:
    found: dict[str, int] = {}
    faulty = False
    for slot in contract.slots:
        cells = [cell for run in runs for cell in trace_slot(run, slot)]
        lengths = [length for cell in cells for length in (cell.fed, cell.returned) if length]
        found[slot.kind] = max([found.get(slot.kind, 1), *lengths])
        faulty = faulty or any(cell.state in ("fails", "emptied") for cell in cells)
    return Scale(found, TOP_WITH_FAULT if faulty else TOP)


def _legend() -> Element:
    """How to read the pictures."""
    entries = {"fed": "fed into the step", "new": "added by the step", "held": "held: the value of step 0 is fed again"}
    entries |= {"emptied": "emptied: the step returns the slot without elements", "fails": "the step fails"}
    items = []
    for kind, text in entries.items():
        box = h("rect", x=1, y=1, width=16, height=12, class_=f"bar-{kind}")
        shape = h("path", d="M4 3l9 9m0-9l-9 9", class_="cross") if kind == "fails" else box
        swatch = h("svg", shape, width=18, height=14, viewBox="0 0 18 14", aria_hidden="true", focusable="false")
        items.append(h("li", swatch, h("span", text)))
    arrow = h("span", "\u2192", class_="arrow-mark", aria_hidden="true")
    return h("ul", items, h("li", arrow, "fed back"), class_="legend")


def _figure(run: Run, contract: CacheContract, at: tuple[PagePosition, str], scale: Scale) -> Element:
    place, name = at
    groups = group_slots(contract.slots, lambda one: tuple((c.fed, c.returned, c.state) for c in trace_slot(run, one)))
    lanes = [(group, trace_slot(run, group.first)) for group in groups]
    experiment = by_name().get(run.experiment)
    question = "the steps of the caller's own loop" if experiment is None else experiment.question
    outcome = format_outcome(run)
    title = place.heading(run.experiment, " ", chip(outcome, run.shows), id_=name, class_="loop-title")
    more = len(lanes) - MOST_LANES
    return h(
        "figure",
        title,
        h("p", question, class_="hint"),
        [_lane(group, cells, f"{name}-{number}", scale) for number, (group, cells) in enumerate(lanes[:MOST_LANES])],
        h("p", f"{more} more groups of slots are in the table of slots.", class_="hint") if more > 0 else None,
        class_="loop",
        aria_labelledby=name,
    )


def _lane(group: Group, cells: Sequence[CacheLength], label: str, scale: Scale) -> Content:
    counts = "encoder states" if "encoder" in group.first.axes else "tokens"
    unit = f"length in {counts}" if group.first.length_axis is not None else "state of fixed size"
    title = h("p", h("strong", group.title), f" \u00b7 {group.count} \u00b7 {unit}", class_="lane-title", id=label)
    drawn, skipped = _select(cells)
    width = max(GUTTER + CELL * (len(drawn) + (1 if skipped else 0)) + 8, LEAST_WIDTH)
    floor, highest = TALL + scale.top, scale.highest[group.first.kind]
    base = h("line", x1=GUTTER, x2=width - 4, y1=floor + 0.5, y2=floor + 0.5, class_="base")
    steps = "; ".join(map(_describe, _select(cells)[0]))
    text = f"{group.title}, {group.count}, length in {counts}. {steps}."
    face, bars = "lane" if len(drawn) <= NARROW else None, list(_draw(drawn, skipped, highest, floor))
    omitted = h("p", f"{skipped} steps in the middle are not drawn.", class_="hint") if skipped else None
    return title, scrollable(label, drawing(width, floor + AXIS + 12, text, base, bars, class_=face)), omitted


def _select(steps: Sequence[T]) -> tuple[list[T], int]:
    """The first steps and the last ones, and how many are left out between them."""
    if len(steps) <= MOST_STEPS:
        return list(steps), 0
    half = MOST_STEPS // 2
    return [*steps[:half], *steps[-half:]], len(steps) - 2 * half


def _draw(cells: Sequence[CacheLength], skipped: int, highest: int, floor: int) -> Iterator[Content]:
    for index, cell in enumerate(cells):
        gap = 1 if skipped and index >= MOST_STEPS // 2 else 0
        x = GUTTER + CELL * (index + gap)
        if gap and index == MOST_STEPS // 2:
            yield h("text", "\u2026", x=x - CELL / 2, y=floor - 6, class_="value")
        elif index:
            yield _arrow(x, floor - 8, cells[index - 1], cell)
        yield from _bar(x + (CELL - BAR) / 2, floor, cell, highest)
        middle = x + CELL / 2
        yield h("text", cell.step, x=middle, y=floor + 16, class_="tick")
        yield h("text", f"+{cell.new_tokens}", x=middle, y=floor + 30, class_="tick quiet")
    yield h("text", "step, new tokens", x=GUTTER, y=floor + AXIS + 8, class_="axis")


def _bar(x: float, floor: int, cell: CacheLength, highest: int) -> Iterator[Element]:
    """The bar of a step: what was fed, what was added on top of it, or what is wrong."""

    def bar(kind: str, top: float, tall: float) -> Element:
        return h("rect", x=x, y=floor - top, width=BAR, height=tall, class_=f"bar-{kind}")

    def value(text: str | int, above: float, bad: bool = False) -> Element:
        return h("text", text, x=x + BAR / 2, y=floor - above, class_="value bad" if bad else "value")

    fed, returned = _height(cell.fed, highest), _height(cell.returned, highest)
    if cell.state == "fails":
        yield bar("fed", max(fed, 2), max(fed, 2))
        yield h("path", d=f"M{x + 4:.0f} {floor - fed - 19:.0f}l14 14m0-14l-14 14", class_="cross")
        yield value("fails", fed + 25, bad=True)
    elif cell.state == "held":
        yield from (bar("held", fed, fed), value(cell.fed if cell.fed is not None else "\u2013", fed + 5))
    elif cell.state == "emptied":
        tall = max(fed, 24)
        yield from (bar("emptied", tall, tall), value("0", tall / 2 - 4, bad=True), value("empty", tall + 5, bad=True))
    elif cell.returned is None:
        yield bar("fed", max(fed, 14), max(fed, 14))
    else:
        below = min(fed, returned)
        yield from (bar("fed", below, below), bar("new", returned, returned - below))
        yield value(cell.returned, returned + 5, bad=cell.state == "shrunk")


def _height(length: int | None, highest: int) -> float:
    return round(TALL * (length or 0) / highest, 1)


def _arrow(x: float, y: int, before: CacheLength, cell: CacheLength) -> Element:
    """From one bar to the next: the returned cache is fed, or that of step 0."""
    start, end = x - (CELL - BAR) / 2 + 2, x + (CELL - BAR) / 2 - 2
    if cell.state == "held":
        return h("path", d=f"M{start:.0f} {y}H{end:.0f}", class_="keep-line")
    kind = "feed-line bad-line" if before.state == "emptied" else "feed-line"
    return h("path", d=f"M{start:.0f} {y}H{end:.0f}m-4 -4l4 4l-4 4", class_=kind)


def _describe(cell: CacheLength) -> str:
    fed = "nothing" if cell.fed is None else str(cell.fed)
    if cell.state in ("fails", "held", "not-returned"):
        return f"step {cell.step}: {fed} fed, {STATE_TEXTS[cell.state]}"
    back = "a state" if cell.returned is None else str(cell.returned)
    return f"step {cell.step}: {fed} fed, {back} returned, {STATE_TEXTS[cell.state]}"
