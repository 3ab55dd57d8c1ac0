"""Slots that are shown as one: 24 layers are one row with a count, not 24."""

import re
from collections.abc import Callable, Hashable, Iterable

from kvdoctor.contract import Slot
from kvdoctor.records import record
from kvdoctor.report.wording.contract import fixed_axes, format_layers

DIGITS = re.compile(r"(\d+)", re.ASCII)
LONGEST_NAME = 2000


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
        alike = (slot.kind, slot.growth, slot.window, slot.dtype, slot.carry, slot.emptied, slot.filled_in)
        key = (alike, fixed_axes(slot), slot.present is None, more(slot))
        found.setdefault(key, []).append(slot)
    return [Group(tuple(slots)) for slots in found.values()]


def merge_names(names: Iterable[str]) -> list[str]:
    """Names that differ in their numbers alone as one: `present.0…23.key`."""
    found: dict[tuple[str, ...], list[list[str]]] = {}
    for name in names:
        parts = DIGITS.split(name[:LONGEST_NAME])
        found.setdefault(tuple(parts[::2]), []).append(parts[1::2])
    return [_pattern(words, numbers) for words, numbers in found.items()]


def _pattern(words: tuple[str, ...], numbers: list[list[str]]) -> str:
    ranges = [_range([row[place] for row in numbers]) for place in range(len(words) - 1)]
    return "".join(part for pair in zip(words, [*ranges, ""], strict=True) for part in pair)


def _range(numbers: list[str]) -> str:
    """The lowest and the highest; what is too long for a number of a layer stays as it is."""
    if len(set(numbers)) == 1:
        return numbers[0]
    low, high = min(numbers, key=_order), max(numbers, key=_order)
    return f"{low}\u2026{high}"


def _order(number: str) -> tuple[int, str]:
    short = number.lstrip("0")
    return len(short), short


def fit(text: str, characters: int) -> str:
    """A text that is no longer than its box: the middle of a longer one is left out."""
    if len(text) <= characters:
        return text
    head = (characters - 1) // 2
    return f"{text[:head]}\u2026{text[len(text) - (characters - 1 - head) :]}"
