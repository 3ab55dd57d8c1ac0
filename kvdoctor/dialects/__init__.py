"""The naming tables of the exporters: data, one file each. A module with a `DIALECT` is found by itself.

Names are hints that save work; what a graph does with a tensor is asked of the graph.
"""

import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Literal

from kvdoctor.contract import Axis, Carry, Growth, Role, SlotKind

LETTERS: dict[str, Axis] = {
    "B": "batch",
    "X": "batch_heads",
    "N": "kv_heads",
    "S": "past",
    "M": "capacity",
    "E": "encoder",
    "H": "head_dim",
    "D": "hidden",
    "2": "parts",
    "L": "layers",
    "C": "channels",
    "Z": "state",
    "K": "blocks",
    "k": "block",
    "Q": "new",
    "T": "total",
    "I": "encoder_input",
    "V": "vocabulary",
    "1": "fixed",
}
"""The field's letters for axes: BNSH is float[batch, kv_heads, past, head_dim]."""

PARTS: dict[str, Literal["key", "value"]] = {
    "key": "key",
    "value": "value",
    "keys": "key",
    "values": "value",
    "k": "key",
    "v": "value",
    "val": "value",
}
"""What exporters call the two parts of a cache."""


def axes(letters: str) -> tuple[Axis, ...]:
    """Axes by the field's letters."""
    return tuple(LETTERS[letter] for letter in letters)


@dataclass(frozen=True, slots=True)
class SlotRule:
    """How a past input is named, and the name of its present.

    `past` may have the groups `layer`, `part` (a word of PARTS) and any other; the templates `present` and `filled_by`
    (where another graph's output fills the slot) take the groups by name. `order` are the axes in letters, by part
    where they differ; empty where the shape tells. `growth` and `carry` are what only the producer can say;
    `or_delta` that it sometimes returns the new rows alone, which is then declared by the present's length.
    """

    past: str
    present: str | None
    kind: SlotKind
    order: str = "BNSH"
    value_order: str = ""
    filled_by: str | None = None
    growth: Growth | None = None
    carry: Carry | None = None
    part: Literal["key-value", "latent", "state"] | None = None
    or_delta: bool = False

    @property
    def pattern(self) -> re.Pattern[str]:
        """The compiled name; `re` keeps what it has compiled."""
        return re.compile(self.past, re.ASCII)

    def match(self, name: str) -> "SlotName | None":
        """Read a past input's name."""
        found = self.pattern.fullmatch(name)
        if found is None:
            return None
        groups = {key: value or "" for key, value in found.groupdict().items()}
        layer = groups.get("layer", "")
        return SlotName(
            past=name,
            rule=self,
            layer=int(layer) if layer else None,
            part=self.part if self.part is not None else PARTS.get(groups.get("part", ""), "state"),
            present=self.present.format(**groups) if self.present is not None else None,
            filled_by=self.filled_by.format(**groups) if self.filled_by is not None else None,
        )


@dataclass(frozen=True, slots=True)
class SlotName:
    """What the name of a past input says of its slot."""

    past: str
    rule: SlotRule
    layer: int | None
    part: Literal["key", "value", "key-value", "latent", "state"]
    present: str | None
    filled_by: str | None


@dataclass(frozen=True, slots=True)
class RoleRule:
    """The part that an input or output of this name plays, and what its axes count, in letters.

    A rule holds for tensors of its rank, and of its kind of element where `dtype` names one.
    """

    name: str
    role: Role
    order: str = ""
    dtype: Literal["float", "integer", "any"] = "any"

    def fits(self, name: str, dtype: str, rank: int | None) -> bool:
        """Whether the rule speaks of this tensor."""
        if rank is not None and rank != len(self.order):
            return False
        kind = "float" if "float" in dtype or dtype == "double" else "integer"
        return self.dtype in ("any", kind) and re.compile(self.name, re.ASCII).fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class Dialect:
    """One exporter's names. Rules are tried in order; inputs that none names are looked up in `dialects.inputs`."""

    name: str
    slots: tuple[SlotRule, ...] = ()
    inputs: tuple[RoleRule, ...] = ()
    outputs: tuple[RoleRule, ...] = ()
    encoder_inputs: tuple[RoleRule, ...] = ()
    encoder_outputs: tuple[RoleRule, ...] = ()
    order: int = 50

    def named(self, names: Iterable[str]) -> Iterator[SlotName]:
        """The slots among input names."""
        for name in names:
            found = next(filter(None, (rule.match(name) for rule in self.slots)), None)
            if found is not None:
                yield found


@cache
def load() -> tuple[Dialect, ...]:
    """All dialects; earlier ones are preferred where names fit several."""
    found: list[Dialect] = []
    for module in pkgutil.iter_modules(__path__):
        dialect = getattr(importlib.import_module(f"{__name__}.{module.name}"), "DIALECT", None)
        found += [dialect] if dialect is not None else []
    return tuple(sorted(found, key=lambda dialect: (dialect.order, dialect.name)))


def spoken(names: Iterable[str]) -> Dialect | None:
    """The dialect in which most of the names are past inputs."""
    names = list(names)
    counts = [(sum(1 for _ in dialect.named(names)), dialect) for dialect in load()]
    most = max((count for count, _ in counts), default=0)
    return next((dialect for count, dialect in counts if count == most), None) if most else None


ENCODER_LIKE = re.compile(r"last_hidden_state|n_layer_cross_[kv]|present_(key|value)_cross_[0-9]+", re.ASCII)
"""Outputs that tell an encoder: its states, or the cross-attention cache it makes."""

CACHE_LIKE = re.compile(r"(input\.)?(past|present|cache)(_|\.|$).*", re.ASCII)
"""Inputs that look like a cache whoever named them."""
