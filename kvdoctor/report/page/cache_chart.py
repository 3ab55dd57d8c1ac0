"""The cache over time as a picture: for each group of slots its length per step, and how the step left it."""

from collections.abc import Iterator, Sequence

from kvdoctor.contract import CacheContract
from kvdoctor.decode.experiments import by_name
from kvdoctor.decode.runs import LOOPS, REPLAY, Run
from kvdoctor.records import record
from kvdoctor.report.page.blocks import PagePosition, chip, scrollable
from kvdoctor.report.page.grouping import Group, group_slots
from kvdoctor.report.page.markup import Content, Element, h
from kvdoctor.report.wording.cache_lengths import WORDS, CacheLength, trace_slot
from kvdoctor.report.wording.runs import format_outcome

CHARTED = (*LOOPS, "frozen-past", REPLAY)
MOST_STEPS, MOST_LANES = 24, 6
GUTTER, CELL, BAR, TALL = 12, 42, 22, 62
AXIS = 36
TOP, TOP_WITH_FAULT = 20, 40
"""Room above the tallest bar: for its number, or for what went wrong."""
NARROW, LEAST_WIDTH = 10, 124
"""Steps that fit on a telephone, and the width that what is written under them takes."""


def draw_loops(runs: Sequence[Run], contract: CacheContract, place: PagePosition) -> list[Element]:
    """A picture for each loop that was run."""
    shown = [run for run in runs if run.experiment in CHARTED and run.steps]
    scale = _scale(shown, contract)
    return [_figure(run, contract, (place, place.id(f"loop-{n}")), scale) for n, run in enumerate(shown)]


@record
class Scale:
    """What the pictures of one stack share: the largest length of each kind of slot, and the room above the bars."""

    highest: dict[str, int]
    top: int


def _scale(runs: Sequence[Run], contract: CacheContract) -> Scale:
    found: dict[str, int] = {}
    faulty = False
    for slot in contract.slots:
        cells = [cell for run in runs for cell in trace_slot(run, slot)]
        lengths = [length for cell in cells for length in (cell.fed, cell.returned) if length]
        found[slot.kind] = max([found.get(slot.kind, 1), *lengths])
        faulty = faulty or any(cell.state in ("fails", "emptied") for cell in cells)
    return Scale(found, TOP_WITH_FAULT if faulty else TOP)


def legend() -> Element:
    """How to read the pictures."""
    entries = (
        ("fed", "fed into the step"),
        ("new", "added by the step"),
        ("kept", "kept: the value of step 0 is fed again"),
        ("emptied", "emptied: the step returns the slot without elements"),
        ("fails", "the step fails"),
    )
    items = (h("li", _swatch(kind), h("span", words)) for kind, words in entries)
    return h(
        "ul", items, h("li", h("span", "\u2192", class_="arrow-mark", aria_hidden="true"), "fed back"), class_="legend"
    )


def _swatch(kind: str) -> Element:
    box = h("rect", x=1, y=1, width=16, height=12, class_=f"bar-{kind}")
    shape = h("path", d="M4 3l9 9m0-9l-9 9", class_="cross") if kind == "fails" else box
    return h("svg", shape, width=18, height=14, viewBox="0 0 18 14", aria_hidden="true", focusable="false")


def _figure(run: Run, contract: CacheContract, at: tuple[PagePosition, str], scale: Scale) -> Element:
    place, name = at
    groups = group_slots(
        contract.slots, lambda slot: tuple((c.fed, c.returned, c.state) for c in trace_slot(run, slot))
    )
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
    drawn, skipped = _select_steps(cells)
    width = max(GUTTER + CELL * (len(drawn) + (1 if skipped else 0)) + 8, LEAST_WIDTH)
    floor, highest = TALL + scale.top, scale.highest[group.first.kind]
    height = floor + AXIS + 12
    drawing = h(
        "svg",
        h("line", x1=GUTTER, x2=width - 4, y1=floor + 0.5, y2=floor + 0.5, class_="base"),
        list(_draw(drawn, skipped, highest, floor)),
        width=width,
        height=height,
        viewBox=f"0 0 {width} {height}",
        class_="lane" if len(drawn) <= NARROW else None,
        role="img",
        aria_label=_describe(group, cells, counts),
    )
    scroll = scrollable(label, drawing)
    omitted = h("p", f"{skipped} steps in the middle are not drawn.", class_="hint") if skipped else None
    return title, scroll, omitted


def _select_steps(cells: Sequence[CacheLength]) -> tuple[list[CacheLength], int]:
    """The first steps and the last ones, and how many are left out between them."""
    if len(cells) <= MOST_STEPS:
        return list(cells), 0
    half = MOST_STEPS // 2
    return [*cells[:half], *cells[-half:]], len(cells) - 2 * half


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
    middle = x + BAR / 2
    fed = _height(cell.fed, highest)
    if cell.state == "fails":
        yield h("rect", x=x, y=floor - max(fed, 2), width=BAR, height=max(fed, 2), class_="bar-fed")
        top = floor - max(fed, 0)
        yield h("path", d=f"M{x + 4:.0f} {top - 19:.0f}l14 14m0-14l-14 14", class_="cross")
        yield h("text", "fails", x=middle, y=top - 25, class_="value bad")
        return
    returned = _height(cell.returned, highest)
    if cell.state == "kept":
        yield h("rect", x=x, y=floor - fed, width=BAR, height=fed, class_="bar-kept")
        yield h("text", cell.fed if cell.fed is not None else "\u2013", x=middle, y=floor - fed - 5, class_="value")
        return
    if cell.state == "emptied":
        tall = max(fed, 24)
        yield h("rect", x=x, y=floor - tall, width=BAR, height=tall, class_="bar-emptied")
        yield h("text", "0", x=middle, y=floor - tall / 2 + 4, class_="value bad")
        yield h("text", "empty", x=middle, y=floor - tall - 5, class_="value bad")
        return
    if cell.returned is None:
        tall = max(fed, 14)
        yield h("rect", x=x, y=floor - tall, width=BAR, height=tall, class_="bar-fed")
        return
    below = min(fed, returned)
    yield h("rect", x=x, y=floor - below, width=BAR, height=below, class_="bar-fed")
    yield h("rect", x=x, y=floor - returned, width=BAR, height=returned - below, class_="bar-new")
    bad = " bad" if cell.state == "shrunk" else ""
    yield h("text", cell.returned, x=middle, y=floor - returned - 5, class_=f"value{bad}")


def _height(length: int | None, highest: int) -> float:
    return round(TALL * (length or 0) / highest, 1)


def _arrow(x: float, y: int, before: CacheLength, cell: CacheLength) -> Element:
    """From one bar to the next: the returned cache is fed, or the kept one."""
    start, end = x - (CELL - BAR) / 2 + 2, x + (CELL - BAR) / 2 - 2
    if cell.state == "kept":
        return h("path", d=f"M{start:.0f} {y}H{end:.0f}", class_="keep-line")
    kind = "feed-line bad-line" if before.state == "emptied" else "feed-line"
    return h("path", d=f"M{start:.0f} {y}H{end:.0f}m-4 -4l4 4l-4 4", class_=kind)


def _describe(group: Group, cells: Sequence[CacheLength], counts: str) -> str:
    """The picture in words."""
    steps = [_step(cell) for cell in _select_steps(cells)[0]]
    return f"{group.title}, {group.count}, length in {counts}. {'; '.join(steps)}."


def _step(cell: CacheLength) -> str:
    fed = "nothing" if cell.fed is None else str(cell.fed)
    if cell.state in ("fails", "kept", "not-returned"):
        return f"step {cell.step}: {fed} fed, {WORDS[cell.state]}"
    back = "a state" if cell.returned is None else str(cell.returned)
    return f"step {cell.step}: {fed} fed, {back} returned, {WORDS[cell.state]}"
