"""How far the logits are from the reference run, step by step, and how far the cache is, layer by layer."""

import math
from collections.abc import Iterator, Sequence

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.report import wording
from kvdoctor.report.page.blocks import Place, chip, folded, scrolled, table
from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.tolerances import Tolerance
from kvdoctor.trace import Difference, Run

MOST_STEPS, MOST_RUNS, MOST_LAYERS = 24, 24, 512
IN_A_ROW = 32
SQUARE, LABELS, ROW = 17, 72, 21
LOWEST, HIGHEST = -7, 0
"""Powers of ten between which the colours go; below is as good as equal, above is as good as unrelated."""


def steps(runs: Sequence[Run], contract: CacheContract, tolerance: Tolerance, place: Place) -> Content:
    """A row for each run whose logits were held against others, a column for each step."""
    held = [run for run in runs if any(step.difference for step in run.steps)]
    if not held:
        return h("p", "No step was held against a reference run.")
    longest = max(len(run.steps) for run in held)
    kept = _kept(longest)
    header: list[Content] = ["experiment", "outcome", *(str(step) for step in kept)]
    rows = [_row(run, kept) for run in held[:MOST_RUNS]]
    said: list[Content] = [
        "Largest difference of the logits, as a fraction of their spread. For this arithmetic "
        f"({contract.exactness}) up to {tolerance.passes:g} passes, and more than {tolerance.fails:g} is a fault."
    ]
    if longest > len(kept):
        said.append(f" {longest - len(kept)} steps in the middle are not shown.")
    if len(held) > MOST_RUNS:
        said.append(f" {len(held) - MOST_RUNS} experiments more are not shown.")
    caption = f"Difference to {' or '.join(sorted({run.yardstick for run in held}))}, by step"
    return h("p", said), table(place.id("steps-heat"), caption, header, rows, "heat"), _scale()


def _kept(count: int) -> list[int]:
    if count <= MOST_STEPS:
        return list(range(count))
    half = MOST_STEPS // 2
    return [*range(half), *range(count - half, count)]


def _row(run: Run, kept: Sequence[int]) -> list[Content]:
    by_step = {step.step: step for step in run.steps}
    cells: list[Content] = [run.experiment, chip(wording.outcome(run), run.shows)]
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


def _amount(difference: Difference) -> str:
    return _short(difference.relative) if difference.finite else "not finite"


def _short(relative: float) -> str:
    return "0" if relative == 0 else f"{relative:.0e}".replace("e-0", "e-").replace("e+00", "")


def _heat(difference: Difference) -> str:
    return f"t{_degree(difference.relative)}" if difference.finite else "t7"


def _degree(relative: float) -> int:
    """0 for equal, 7 for the spread itself and more."""
    if relative <= 0 or not math.isfinite(relative):
        return 0 if relative <= 0 else HIGHEST - LOWEST
    return min(max(math.floor(math.log10(relative)) - LOWEST, 0), HIGHEST - LOWEST)


def _scale() -> Element:
    """What the colours stand for."""
    words = ["under 1e-6", *(f"1e{power}" for power in range(LOWEST + 1, HIGHEST)), "1 and more"]
    entries = (h("li", h("span", class_=f"swatch t{n}"), word) for n, word in enumerate(words))
    return h("ul", entries, class_="legend", aria_label="Colours of the differences")


def layers(runs: Sequence[Run], contract: CacheContract, place: Place) -> Content:
    """The cache after the last step against that of one call over the same tokens; where runs part, if it was found."""
    by_name = {slot.present: slot for slot in contract.slots if slot.present is not None and slot.layer is not None}
    made = [part for number, run in enumerate(runs) for part in _of_run(run, by_name, place.id(f"layers-{number}"))]
    parted = list(_places(runs))
    if not made and not parted:
        return None
    return (
        place.heading("By layer", class_="by-layer"),
        made,
        (h("p", "Where runs part from the run without a cache:"), h("ul", (h("li", line) for line in parted)))
        if parted
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
        f"{run.experiment}: the cache after step {last.step} against one call over the same tokens, "
        f"off by {last.slots[worst]:.1e} of its spread at most ({worst})"
    )
    rows = [(f"layer {n}", *(_short(row[n]) if n in row else "\u2013" for row in parts.values())) for n in numbers]
    yield h(
        "figure",
        h("figcaption", caption, id=label),
        [
            scrolled(label, _strip(parts, numbers[start : start + IN_A_ROW], caption))
            for start in range(0, len(numbers), IN_A_ROW)
        ],
        folded("The same as a table", table(f"{label}-table", caption, ("layer", *parts), rows)),
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
    told = f"{caption}. Layers {numbers[0]} to {numbers[-1]}; the table below has the numbers."
    return h("svg", drawn, width=width, height=height, viewBox=f"0 0 {width} {height}", role="img", aria_label=told)


def _places(runs: Sequence[Run]) -> Iterator[Content]:
    for run in runs:
        if run.place is not None:
            rows = list(wording.place_rows(run))
            yield h("strong", run.experiment), ": ", "; ".join(f"{label} {text}" for label, text in rows[:8])
