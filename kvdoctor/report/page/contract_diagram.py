"""The cache contract as a diagram: past -> graph -> present, and back to the next step; equal layers are one box."""

import re
import textwrap
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from kvdoctor.contract import CacheContract, PhaseName, Port, Role, Slot
from kvdoctor.records import record
from kvdoctor.report.page.elements import Content, Element, PagePosition, h, scrollable
from kvdoctor.report.wording.contract import describe_step, fixed_axes, format_layers, format_slot_type

DIGITS = re.compile(r"(\d+)", re.ASCII)
LONGEST_NAME = 2000
WIDTH = 780
LEFT, BOX = 8, 250
GRAPH, GRAPH_BOX = 296, 188
RIGHT = WIDTH - LEFT - BOX
LINE, PAD, LANE = 16, 10, 42
MONO, SANS = 34, 32
"""Characters that fit into a box, in the two faces."""
IN_GRAPH = 25
MOST_FED, MOST_GROUPS = 6, 8
GIVEN: tuple[Role, ...] = ("logits", "next_token")
CARRIED = {
    "feed-back": "feed back: the next step's past",
    "hold": "keep the value of step 0, feed it at every step",
    "append": "append to the past, feed all of it",
    "write": "write into the past at the past length",
    "shift": "append at the end, drop the oldest rows",
    "drop-oldest": "feed back without the first row",
    "extend": "feed back, followed by one row of zeros",
}


@record
class Group:
    """Slots that differ in their layer, or in being key or value, alone."""

    slots: tuple[Slot, ...]

    @property
    def first(self) -> Slot:
        """The slot that stands for all."""
        return self.slots[0]

    @property
    def title(self) -> str:
        """`self-attention, layers 0 to 23`."""
        return f"{self.first.kind}, {format_layers(self.slots)}"

    @property
    def count(self) -> str:
        """`48 slots`."""
        return f"{len(self.slots)} slot{'s' if len(self.slots) > 1 else ''}"


def group_slots(slots: Iterable[Slot], more: Callable[[Slot], Hashable] = lambda _: None) -> list[Group]:
    """The groups in the order of their first slots; slots of a group also agree in `more`."""
    found: dict[Hashable, list[Slot]] = {}
    for slot in slots:
        facts = (slot.kind, describe_step(slot), slot.window, slot.dtype, slot.carry, slot.emptied, slot.filled_in)
        key = (facts, fixed_axes(slot), slot.present is None, more(slot))
        found.setdefault(key, []).append(slot)
    return [Group(tuple(slots)) for slots in found.values()]


def merge_names(names: Iterable[str]) -> list[str]:
    """Names that differ in their numbers alone as one: `present.0…23.key`."""
    found: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = DIGITS.split(name[:LONGEST_NAME])
        found.setdefault(tuple(parts[::2]), []).append(parts[1::2])
    merged = []
    for texts, rows in found.items():
        ranges = [_range(list(numbers)) for numbers in zip(*rows, strict=True)]
        merged.append("".join(piece for pair in zip(texts, [*ranges, ""], strict=True) for piece in pair))
    return merged


def _range(numbers: list[str]) -> str:
    """The lowest and the highest, however many digits they have."""
    ordered = sorted(dict.fromkeys(numbers), key=lambda number: (len(number.lstrip("0")), number.lstrip("0")))
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]}\u2026{ordered[-1]}"


def fit(text: str, characters: int) -> str:
    """A text that is no longer than its box: the middle of a longer one is left out."""
    if len(text) <= characters:
        return text
    head = (characters - 1) // 2
    return f"{text[:head]}\u2026{text[len(text) - (characters - 1 - head) :]}"


@record
class Box:
    """A box of lines of text; the class of each line says its face."""

    lines: tuple[tuple[str, str], ...]
    kind: str

    @property
    def height(self) -> int:
        """The height in pixels."""
        return 2 * PAD + LINE * len(self.lines)


def draw_contract(place: PagePosition, contract: CacheContract) -> Content:
    """The picture; None of a contract without slots, or that lacks a phase."""
    if not contract.slots or not {"prefill", "decode"} <= contract.phases.keys():
        return None
    name = place.id("diagram")
    groups = group_slots(contract.slots)
    drawn: list[Content] = []
    decode = contract.graph("decode")
    taken = [port for port in decode.inputs if port.role not in ("past", "auxiliary")]
    fed = _ports_box(taken, "fed at every step", "fed at every step")
    given = _ports_box([one for one in decode.outputs if one.role in GIVEN], "returned by every step", "no logits")
    graph = _graph_lines(contract)
    height = max(fed.height, given.height, 2 * PAD + LINE * len(graph))
    y = 22
    drawn += _row(y, height, fed, given)
    for number, (line, face) in enumerate(graph):
        at = y + PAD + 12 + LINE * number
        drawn.append(h("text", line, x=GRAPH + GRAPH_BOX / 2, y=at, class_=f"{face} middle"))
    y += height + 16
    for group in groups[:MOST_GROUPS]:
        past, present = _past_box(group), _present_box(group)
        height = max(past.height, present.height)
        drawn += _row(y, height, past, present)
        drawn += _back(y + height, group)
        y += height + LANE
    if len(groups) > MOST_GROUPS:
        more = f"and {len(groups) - MOST_GROUPS} more groups of slots, listed below"
        drawn.append(h("text", more, x=WIDTH / 2, y=y + 14, class_="pill-text"))
        y += 24
    box = h("rect", x=GRAPH, y=16, width=GRAPH_BOX, height=y - 16, rx=10, class_="graph-box")
    titles = (
        ("inputs of a step", LEFT + BOX / 2),
        ("graph", GRAPH + GRAPH_BOX / 2),
        ("outputs of a step", RIGHT + BOX / 2),
    )
    heads = [h("text", word, x=x, y=10, class_="column") for word, x in titles]
    label = _describe(contract, groups)
    box_of_all = f"0 -4 {WIDTH} {y + 12}"
    drawing = h("svg", heads, box, drawn, viewBox=box_of_all, class_="wide", role="img", aria_label=label, id=name)
    return scrollable(name, drawing)


def _ports_box(ports: Sequence[Port], title: str, none: str) -> Box:
    lines = [(title if ports else none, "box-title"), *((fit(port.name, MONO), "mono") for port in ports[:MOST_FED])]
    if len(ports) > MOST_FED:
        lines.append((f"and {len(ports) - MOST_FED} more", "sans"))
    return Box(tuple(lines), "box")


def _graph_lines(contract: CacheContract) -> list[tuple[str, str]]:
    """Which file or branch serves which step."""
    before: dict[PhaseName, str] = {"encode": "once, before:", "embed": "every step, before:"}
    files = [(title, phase) for phase, title in before.items() if phase in contract.phases]
    files += [("rows for placeholders:", one.phase) for one in contract.features]
    prefill, decode = contract.phases["prefill"], contract.phases["decode"]
    if prefill.graph != decode.graph:
        files += [("step 0:", "prefill"), ("later steps:", "decode")]
    lines: list[tuple[str, str]] = []
    for title, phase in files:
        lines += [(title, "sans"), *_wrapped(contract.graph(phase).file, "mono")]
    if prefill.graph != decode.graph:
        return lines
    lines += _wrapped(contract.graph("decode").file, "mono strong")
    if prefill.switch is not None:
        switch = contract.graph("decode").port("branch_switch")
        name = switch.name if switch else "the switch"
        lines += _wrapped(f"step 0: {name} = {str(prefill.switch).lower()}", "sans")
        lines += _wrapped(f"later steps: {str(decode.switch).lower()}", "sans")
    return lines


def _wrapped(text: str, face: str) -> list[tuple[str, str]]:
    pieces = textwrap.wrap(fit(text, 3 * IN_GRAPH), IN_GRAPH, break_on_hyphens=True)
    return [(piece, face) for piece in pieces] or [("?", face)]


def _past_box(group: Group) -> Box:
    names = merge_names(slot.past for slot in group.slots)
    typed = textwrap.wrap(fit(format_slot_type(group.first), 3 * SANS), SANS + 3)
    head = ((fit(group.title, SANS - 1), "box-title"), (f"{group.count}, {group.first.growth}", "sans"))
    return Box((*head, *((line, "small") for line in typed), *_names(names)), "box past")


def _present_box(group: Group) -> Box:
    slot = group.first
    names = merge_names(slot.present for slot in group.slots if slot.present is not None)
    if slot.emptied:
        emptied = _wide("later steps return it without elements")
        return Box((("present, emptied", "box-title bad"), *emptied, *_names(names)), "box faulty")
    if not names:
        filled = merge_names(slot.filled_by for slot in group.slots if slot.filled_by is not None)
        makers = {"encode": "computed by the encoder", "prefill": "computed by step 0"}
        first = makers.get(slot.filled_in, "computed once") if filled else "given by the caller"
        return Box((("no present in later steps", "box-title"), (first, "sans"), *_names(filled)), "box missing")
    return Box((("present", "box-title"), *_wide(describe_step(slot)), *_names(names)), "box present")


def _wide(text: str) -> list[tuple[str, str]]:
    return [(line, "sans") for line in textwrap.wrap(text, SANS)]


def _names(names: Sequence[str]) -> list[tuple[str, str]]:
    lines = [(fit(name, MONO), "mono") for name in names[:2]]
    if len(names) > 2:
        lines.append((f"and {len(names) - 2} more names", "sans"))
    return lines


def _row(y: int, height: int, left: Box, right: Box) -> Iterator[Element]:
    """Two boxes, and the arrows through the graph between them."""
    for box, x in ((left, LEFT), (right, RIGHT)):
        yield h("rect", x=x, y=y, width=BOX, height=height, rx=6, class_=box.kind)
        for number, (line, face) in enumerate(box.lines):
            yield h("text", line, x=x + PAD, y=y + PAD + 12 + LINE * number, class_=face)
    middle = y + height / 2
    for start, end in ((LEFT + BOX, GRAPH), (GRAPH + GRAPH_BOX, RIGHT)):
        yield h("path", d=f"M{start + 3} {middle:.0f}H{end - 4}m-5 -5l5 5l-5 5", class_="flow")


def _back(y: int, group: Group) -> Iterator[Element]:
    """The way from what a step returns to the past of the next one."""
    slot = group.first
    low, start, end = y + 20, RIGHT + BOX / 2, LEFT + BOX / 2
    kind = "carry keep" if slot.carry == "hold" else "carry"
    text = CARRIED[slot.carry]
    if slot.carry == "hold" and slot.filled_in == "encode":
        text = "keep the encoder's output, feed it at every step"
    elif slot.carry == "hold" and slot.is_given:
        text = "keep the value that the caller gave"
    yield h("path", d=f"M{start:.0f} {y}V{low}H{end:.0f}V{y + 6}m-5 5l5 -5l5 5", class_=kind)
    width = 6.6 * len(text) + 24
    middle = GRAPH + GRAPH_BOX / 2
    yield h("rect", x=middle - width / 2, y=low - 11, width=width, height=22, rx=11, class_=f"pill {kind}")
    yield h("text", text, x=middle, y=low + 4, class_="pill-text")


def _describe(contract: CacheContract, groups: Sequence[Group]) -> str:
    """The diagram in text, for who cannot see it."""
    lines = []
    for group in groups[:MOST_GROUPS]:
        emptied = ", emptied by later steps" if group.first.emptied else ""
        lines.append(f"{group.title}, {group.count}: {CARRIED[group.first.carry]}{emptied}")
    return f"The cache contract of {contract.graph('decode').file}. {'; '.join(lines)}. The table below has each slot."
