"""The cache of one body: axis orders, packed tensors, and how new entries are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .design import SINKS, WINDOW, Slot
from .presents import LENGTHS, returned
from .sheet import FAR, FLOAT, HALF, Operand

if TYPE_CHECKING:
    from .body import Body


@dataclass(frozen=True)
class Kind:
    """What a layer keeps: its axes in the order of the mathematics, and their sizes beside b and s."""

    name: str
    axes: str
    sizes: dict[str, int]
    growth: str = "replace"
    order: str = ""
    element: int = FLOAT


class Cache:
    """Loads and keeps the parts of a body's cache, each as the design lays it out."""

    def __init__(self, body: Body) -> None:
        self.body = body
        self.kept: dict[tuple[str, int], str] = {}
        self.kinds: dict[tuple[str, int], Kind] = {}
        self.groups: dict[str, list[tuple[str, int]]] = {}
        self.loaded: dict[str, str] = {}

    def declare(self, kind: Kind, layer: int) -> None:
        """Say that a layer has this part; parts whose order has l or c share a tensor."""
        self.kinds[kind.name, layer] = kind
        order = kind.order or kind.axes
        packed = ("kv" if "c" in order else kind.name) + ("" if "l" in order else f"@{layer}")
        self.groups.setdefault(packed, []).append((kind.name, layer))

    def slots(self) -> list[Slot]:
        """The tensors of the cache, with the names of the design."""
        naming, found = self.body.naming, []
        for number, (group, members) in enumerate(self.groups.items()):
            kind = self.kinds[members[0]]
            layer = int(group.split("@")[1]) if "@" in group else -1
            past, present = naming.slot(group.split("@")[0], layer, number)
            shape, axis = self._shape(kind, members)
            found.append(Slot(past, present, kind.element, shape, axis, kind.growth))
        return found

    def _shape(self, kind: Kind, members: list[tuple[str, int]]) -> tuple[tuple[str | int, ...], int]:
        design = self.body.design
        sizes: dict[str, str | int] = {"b": 1 if design.batch_one else "batch", "1": 1, **kind.sizes}
        sizes |= {"l": len({layer for _, layer in members}), "c": len({name for name, _ in members})}
        if "s" in kind.axes:
            cut = kind.growth == "grow" and design.store_of(members[0][1]) in ("cut", "sinks")
            one_name = ("axis-name-collision", "step-fails", *LENGTHS)
            cut = cut and not self.body.slip("one axis name for lengths that differ", *one_name)
            sizes["s"] = design.fixed or ("encoder" if kind.growth == "held" else "held" if cut else "past")
        shape: list[str | int] = []
        axis = -1
        for place, letters in enumerate(axes_of(kind.order or kind.axes)):
            parts = [sizes[letter] for letter in letters]
            numbers = [part for part in parts if isinstance(part, int)]
            words = [part for part in parts if isinstance(part, str)]
            product = int(np.prod(numbers)) if numbers else 1
            shape.append(product if not words else words[0] if product == 1 else f"{words[0]}_x_{product}")
            axis = place if "s" in letters else axis
        return tuple(shape), axis

    def load(self, name: str, layer: int, plain: bool = False) -> str:
        """The past of one part, in the order of the mathematics; `plain` without a fault."""
        body, kind = self.body, self.kinds[name, layer]
        if not body.cached:
            return self._empty(kind)
        group, members = next((g, m) for g, m in self.groups.items() if (name, layer) in m)
        if group not in self.loaded:
            self.loaded[group] = self._load_group(group, members)
        value, prefix = self.loaded[group], ""
        order = kind.order or kind.axes
        if "l" in order:
            layers = sorted({each for _, each in members})
            value, prefix = body.op("Gather", value, layers.index(layer), axis=0), "l"
        if "c" in order:
            names = list(dict.fromkeys(each for each, _ in members))
            value, prefix = body.op("Gather", value, names.index(name), axis=0), prefix + "c"
        value = body.cast(value, FLOAT) if kind.element == HALF else value
        return value if plain else body.at(f"past.{name}", value, kind.axes, layer)

    def _empty(self, kind: Kind) -> str:
        design, body = self.body.design, self.body
        length = (design.fixed if kind.growth != "held" else 0) or 0
        sizes: list[Operand] = [body.rows if letter == "b" else kind.sizes.get(letter, length) for letter in kind.axes]
        return body.zeros(*sizes, kind=FLOAT if kind.element == HALF else kind.element)

    def _load_group(self, group: str, members: list[tuple[str, int]]) -> str:
        body, kind = self.body, self.kinds[members[0]]
        number = list(self.groups).index(group)
        value = self.slots()[number].past
        value = body.extras_load(value, kind)
        order = kind.order or kind.axes
        flat = order.replace("(", "").replace(")", "").replace("1", "")
        sizes: dict[str, Operand] = {"b": body.rows, **kind.sizes}
        sizes |= {"l": len({layer for _, layer in members}), "c": len({name for name, _ in members})}
        groups = axes_of(order)
        if "s" in flat:
            place = next(i for i, letters in enumerate(groups) if "s" in letters)
            share = int(np.prod([v for k in groups[place] if k != "s" and isinstance(v := sizes[k], int)] or [1]))
            length = body.size(value, place)
            sizes["s"] = length if share == 1 else body.op("Div", length, [share])
        if "1" in groups and "(" not in order:
            value = body.drop(value, *[i for i, letters in enumerate(groups) if letters == "1"])
        elif "(" in order or "1" in order:
            value = body.reshape(value, *[sizes[letter] for letter in flat])
        wanted = [letter for letter in ("lc" + kind.axes) if letter in flat]
        return body.move(value, *[flat.index(letter) for letter in wanted])

    def keep(self, name: str, layer: int, value: str) -> None:
        """Return a part after this call."""
        kind = self.kinds[name, layer]
        value = self.body.at(f"present.{name}", value, kind.axes, layer)
        self.kept[name, layer] = self.body.cast(value, HALF) if kind.element == HALF else value

    def finish(self) -> list[tuple[str, Slot]]:
        """The values of all outputs of the cache."""
        groups = [members for members in self.groups.values() if members[0] in self.kept]
        slots = [slot for slot, members in zip(self.slots(), self.groups.values(), strict=True) if members in groups]
        values = [self._store_group(members) for members in groups]
        return returned(self.body, list(zip(values, slots, strict=True)))

    def _store_group(self, members: list[tuple[str, int]]) -> str:
        body, kind = self.body, self.kinds[members[0]]
        order = kind.order or kind.axes
        layers, names = sorted({layer for _, layer in members}), list(dict.fromkeys(name for name, _ in members))
        stacked = [[self.kept[name, layer] for name in names] for layer in layers]
        rows = [self._stack(row) if "c" in order else row[0] for row in stacked]
        value = self._stack(rows) if "l" in order else rows[0]
        flat = order.replace("(", "").replace(")", "").replace("1", "")
        have = [letter for letter in ("lc" + kind.axes) if letter in flat]
        value = body.move(value, *[have.index(letter) for letter in flat])
        if "(" in order:
            value = body.reshape(value, *self._merged_sizes(value, order, flat))
        elif "1" in order:
            value = body.lift(value, *[i for i, letters in enumerate(axes_of(order)) if letters == "1"])
        return value

    def _merged_sizes(self, value: str, order: str, flat: str) -> list[Operand]:
        body = self.body
        sizes: list[Operand] = []
        for letters in axes_of(order):
            parts = [body.size(value, flat.index(letter)) for letter in letters if letter != "1"]
            size: Operand = parts[0] if parts else 1
            for other in parts[1:]:
                size = body.mul(size, other)
            sizes.append(size)
        return sizes

    def _stack(self, values: list[str]) -> str:
        return self.body.join(*[self.body.lift(value, 0) for value in values])


def axes_of(order: str) -> list[str]:
    """The letters of each axis."""
    found: list[str] = []
    inside = False
    for letter in order:
        if letter == "(":
            inside = True
            found.append("")
        elif letter == ")":
            inside = False
        elif inside:
            found[-1] += letter
        else:
            found.append(letter)
    return found


@dataclass(frozen=True)
class Extended:
    """The cache with the new entries: what attention reads (float[b, h, t, d]), and what is kept."""

    read: str
    kept: str


def extend(body: Body, name: str, layer: int, past: str, new: str) -> Extended:
    """Put new entries [b, h, s, d] on a past, as the design stores them."""
    store = body.design.store_of(layer)
    new_kept = body.at(f"stored.{name}", new, "bhsd", layer)
    if store == "static":
        written = write(body, past, new_kept)
        read = written if new == new_kept else write(body, past, new)
        return Extended(read, written)
    read = body.join(past, new, axis=2)
    whole = read if new == new_kept else body.join(past, new_kept, axis=2)
    if store == "grow":
        return Extended(read, whole)
    if store == "delta":
        return Extended(read, new_kept)
    if store == "ring":
        return Extended(read, _ring(body, past, new_kept))
    if store == "sinks":
        start = body.op("Max", body.sub(body.size(whole, 2), WINDOW), [SINKS])
        return Extended(read, body.join(body.part(whole, 0, SINKS, 2), body.part(whole, start, FAR, 2), axis=2))
    return Extended(read, body.part(whole, -WINDOW, FAR, 2))  # shifted in a fixed size, or cut when it is too long


def key_slots(body: Body, past: str, layer: int) -> str:
    """int64[rows or 1, t]: the position of each key that attention reads; negative where a slot is empty."""
    store = body.design.store_of(layer)
    if store == "static":
        return body.weights.constant(np.arange(body.design.fixed)[None])
    if store == "ring":
        newest = body.sub(body.past, 1)
        age = body.op("Mod", body.sub(newest, np.arange(WINDOW)[None]), WINDOW)
        old = body.sub(newest, age)
        return body.join(old, body.query_slots, axis=1)
    held = body.size(past, 2)
    total = body.count(body.add(held, body.new))
    if store in ("grow", "delta"):
        return body.lift(total, 0)
    slots = body.add(body.sub(body.past, held), body.lift(total, 0))
    return slots if store != "sinks" else body.where(body.op("Less", total, SINKS), total, slots)


def write(body: Body, past: str, new: str) -> str:
    """New entries at the slots of the new tokens, by the operators of the design."""
    design = body.design
    slots = body.at("write", body.query_slots, "bs")
    if design.write in ("where", "onehot"):
        hit = body.op("Equal", body.lift(slots, 2), np.arange(design.fixed)[None, None])  # [b, s, c]
        share = body.lift(body.move(body.cast(hit, FLOAT), 0, 2, 1), 1)  # [b, 1, c, s]
        written = body.dot(share, new)
        any_hit = body.sum(share, 3)
        if design.write == "onehot":
            return body.add(body.mul(past, body.sub(1.0, any_hit)), written)
        return body.where(body.op("Greater", any_hit, 0.5), written, past)
    if design.write == "elements":
        index = body.op("Expand", body.lift(slots, 1, 3), body.op("Shape", new))
        return body.op("ScatterElements", past, index, new, axis=2)
    first = body.reshape(slots, -1) if not design.per_row else body.drop(body.part(slots, 0, 1, 0), 0)
    if design.write == "nd":
        moved = body.op("ScatterND", body.move(past, 2, 0, 1, 3), body.lift(first, 1), body.move(new, 2, 0, 1, 3))
        return body.move(moved, 1, 2, 0, 3)
    start = body.part(first, [0], [1], 0)  # slices, joined
    before, after = body.part(past, [0], start, 2), body.part(past, body.add(start, body.new), FAR, 2)
    return body.join(before, new, after, axis=2)


def _ring(body: Body, past: str, new: str) -> str:
    """Slot j has the newest token whose position is j modulo the window."""
    newest = body.sub(body.add(body.past, body.new), 1)  # [r, 1]
    age = body.op("Mod", body.sub(newest, np.arange(WINDOW)[None]), WINDOW)
    at = body.sub(body.sub(newest, age), body.past)  # place among the new tokens: [r, w]
    row = body.at("write", body.reshape(body.part(at, [0], [1], 0), -1), "w")
    fresh = body.op("GreaterOrEqual", row, 0)
    index = body.op("Max", row, 0)
    return body.where(body.lift(fresh, 1), body.op("Gather", new, index, axis=2), past)
