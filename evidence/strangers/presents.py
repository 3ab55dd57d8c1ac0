"""Mistakes in what is returned of the cache: another tensor's, too short, too long, mixed with the past."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from .design import Slot
from .sheet import FAR, FLOAT, HALF

if TYPE_CHECKING:
    from .body import Body

LENGTHS = ("wrong-at-lengths", "context-limit-fails", "chunk-fails")
LOST = ("present-drops-past", "present-does-not-grow")
CUT = (*LOST, "present-rewrites-past")
"""Of a past that is cut, the finding may say that a step does not return it as it was."""
OTHERS = ("layers-swapped", "key-value-swapped", "names-mislead")
MIXED = ("new-entries-wrong", "present-rewrites-past")

ORDERS: dict[str, Callable[[int], list[int]]] = {
    "presents exchanged in pairs": lambda n: [i ^ 1 if i ^ 1 < n else i for i in range(n)],
    "presents returned one place late": lambda n: [n - 1, *range(n - 1)],
    "presents in reverse": lambda n: [*range(n)][::-1],
    "first half of the presents returned twice": lambda n: [i % max(n // 2, 1) for i in range(n)],
}
"""Presents under the names of others."""
Change = Callable[["Body", str, Slot], str]
GROWING: dict[str, tuple[Change, tuple[str, ...]]] = {
    "present has only the new entries": (lambda b, x, s: b.part(x, b.size(s.past, s.axis), FAR, s.axis), LOST),
    "present without its last entry": (lambda b, x, s: b.part(x, 0, -1, s.axis), LOST),
    "present without its first entry": (lambda b, x, s: b.part(x, 1, FAR, s.axis), CUT),
    "present cut to 12 entries": (lambda b, x, s: b.part(x, -12, FAR, s.axis), (*CUT, *LENGTHS)),
    "present keeps its first 12 entries": (lambda b, x, s: b.part(x, 0, 12, s.axis), (*LOST, *LENGTHS)),
    "present doubles its last entry": (
        lambda b, x, s: b.join(x, b.part(x, -1, FAR, s.axis), axis=s.axis),
        ("present-does-not-grow",),
    ),
    "present has its new entries first": (
        lambda b, x, s: b.join(b.part(x, b.size(s.past, s.axis), FAR, s.axis), s.past, axis=s.axis),
        ("present-rewrites-past", "cache-misread"),
    ),
}
"""Presents of the wrong length or order."""
FIXED: dict[str, tuple[Change, tuple[str, ...]]] = {
    "present is the past": (lambda b, _, s: b.op("Identity", s.past), ("present-does-not-grow", "past-ignored")),
    "present is the sum of both": (lambda b, x, s: b.add(x, s.past), MIXED),
    "present is the mean of both": (lambda b, x, s: b.mul(b.add(x, s.past), 0.5), MIXED),
    "present is the larger of both": (lambda b, x, s: b.op("Max", x, s.past), MIXED),
    "present is what is new in it": (lambda b, x, s: b.sub(x, s.past), (*LOST, *MIXED)),
}
"""Buffers and states that mix the past and the new."""
HELD: dict[str, tuple[Change, tuple[str, ...]]] = {
    "cross-attention cache emptied by a step": (lambda b, x, s: b.part(x, 0, 0, s.axis), ("cross-cache-emptied",)),
    "cross-attention cache returned as zeros": (lambda b, x, _: b.mul(x, 0.0), MIXED),
}
"""Parts that a step returns as they came."""


def returned(body: Body, parts: list[tuple[str, Slot]]) -> list[tuple[str, Slot]]:
    """The outputs of the cache, with the mistake of the author."""
    mine = [(place, part) for place, part in enumerate(parts) if part[1].growth != "held"]
    alike = len({(slot.shape, slot.kind) for _, (_, slot) in mine}) == 1
    if len(mine) > 1 and alike and body.design.names != "torch":  # its names say nothing
        for name, order in ORDERS.items():
            if body.slip(name, *OTHERS):
                values = [parts[mine[number][0]][0] for number in order(len(mine))]
                for (place, (_, slot)), value in zip(mine, values, strict=True):
                    parts[place] = value, slot
    return [_changed(body, value, slot) for value, slot in parts]


def _changed(body: Body, value: str, slot: Slot) -> tuple[str, Slot]:
    if not body.cached or slot.kind != FLOAT:
        return value, slot
    wrong = {"grow": GROWING, "replace": FIXED, "held": HELD}.get(slot.growth, {})
    for name, (change, names) in wrong.items():
        if body.slip(name, *names):
            return change(body, value, slot), slot
    if slot.growth != "held" and body.slip("present returned in half precision", "cache-dtype-mismatch"):
        return body.cast(value, HALF), replace(slot, kind=HALF)
    return value, slot
