"""The form of a naming table, and the search for the one that a graph follows."""

import importlib
import pkgutil
import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import Literal

from kvdoctor.analysis import dialects
from kvdoctor.contract import Axis, Carry, Dim, Growth, Part, Role, SlotKind
from kvdoctor.records import record

LETTERS: dict[str, Axis] = {
    "B": "batch",
    "X": "batch_heads",
    "b": "batch_new",
    "c": "codebooks",
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

N, KV = r"(?P<layer>[0-9]{1,5})", r"(?P<part>key|value)"
"""The number of a layer, and the two parts of a cache, in the names of a table."""

OPEN = re.compile(r"\([^()]*\)|\[[^]]*\]|\{[^}]*\}")
LITERAL = re.compile(r"(?:\\\.|(?<!\\)\w(?![?*]|\0\0))+", re.ASCII)
"""Parts of a pattern that stand for several texts, and letters and escaped dots that do not, none of them optional."""

PARTS: dict[str, Literal["key", "value"]] = {
    "key": "key",
    "value": "value",
    "keys": "key",
    "values": "value",
    "k": "key",
    "v": "value",
    "val": "value",
}
"""The names that exporters use for the two parts of a cache."""


def parse_axes(letters: str) -> tuple[Axis, ...]:
    """Axes by their letters: `BNSH` is batch, kv_heads, past, head_dim."""
    return tuple(LETTERS[letter] for letter in letters)


@record
class SlotRule:
    """How a past input is named, and the name of its present.

    `past` is a regular expression with the groups `layer`, `part` (a name in PARTS) and any other; the templates
    `present` and `filled_by` (the output of another graph that fills the slot) refer to the groups by name. `order` are
    the axes in letters, `value_order` those of values where they differ; empty where the shape decides. `growth` and
    `carry` are known from the producer's code where no graph shows them. `or_delta` says that some exports return the
    new rows alone, which the declared length of the present then shows.
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

    def match(self, name: str) -> "SlotName | None":
        """Read the name of a past input; None where it is named otherwise."""
        found = _fullmatch(self.past, name)
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


@lru_cache(1 << 14)
def _fullmatch(pattern: str, name: str) -> re.Match[str] | None:
    # Most names are those of another dialect: nothing is compiled to find that out.
    held = any(one in name for one in _list_literals(pattern))
    return re.compile(pattern, re.ASCII).fullmatch(name) if held else None


@cache
def _list_literals(pattern: str) -> tuple[str, ...]:
    """For each alternative of a pattern the longest text that all its matches hold."""
    before, outside = "", pattern
    while before != outside:
        before, outside = outside, OPEN.sub(lambda part: "\0\0" if part[0][0] == "{" else "\0", outside)
    return tuple(max(LITERAL.findall(one), key=len, default="").replace("\\", "") for one in outside.split("|"))


@record
class SlotName:
    """What the name of a past input says about its slot."""

    past: str
    rule: SlotRule
    layer: int | None
    part: Part
    present: str | None
    filled_by: str | None


@record
class RoleRule:
    """The role of an input or output with this name, and its axes in letters."""

    name: str
    role: Role
    order: str = ""
    dtype: Literal["float", "integer", "any"] = "any"

    def fits(self, name: str, dtype: str, rank: int | None) -> bool:
        """Whether the rule applies to this tensor. A rank of None fits every rule."""
        if (rank is not None and rank != len(self.order)) or _fullmatch(self.name, name) is None:
            return False
        return self.dtype in ("any", "float" if "float" in dtype or dtype == "double" else "integer")


@record
class Dialect:
    """One exporter's names. The first rule that fits holds; `dialects.inputs` has the names common to all exporters."""

    name: str
    slots: tuple[SlotRule, ...] = ()
    inputs: tuple[RoleRule, ...] = ()
    outputs: tuple[RoleRule, ...] = ()
    encoder_inputs: tuple[RoleRule, ...] = ()
    order: int = 50

    def find_slots(self, names: Iterable[str]) -> Iterator[SlotName]:
        """Find the slots among input names."""
        for name in names:
            found = next(filter(None, (rule.match(name) for rule in self.slots)), None)
            if found is not None:
                yield found


@cache
def load_dialects() -> tuple[Dialect, ...]:
    """All dialects, those that are preferred where names fit several first."""
    found: list[Dialect] = []
    for module in pkgutil.iter_modules(dialects.__path__):
        named = vars(importlib.import_module(f"{dialects.__name__}.{module.name}"))
        found += [one for one in named.values() if isinstance(one, Dialect)]
    return tuple(sorted(found, key=lambda dialect: (dialect.order, dialect.name)))


def find_dialect(names: Iterable[str]) -> Dialect | None:
    """Find the dialect in which most of the names are past inputs."""
    return _find_dialect(tuple(names))


@lru_cache(maxsize=64)  # asked several times of each file
def _find_dialect(names: tuple[str, ...]) -> Dialect | None:
    counts = [(sum(1 for _ in dialect.find_slots(names)), dialect) for dialect in load_dialects()]
    most = max((count for count, _ in counts), default=0)
    return next((dialect for count, dialect in counts if count == most), None) if most else None


ENCODER_LIKE = re.compile(r"last_hidden_state|n_layer_cross_[kv]|present_(key|value)_cross_[0-9]+", re.ASCII)
"""Outputs that only an encoder has: its states, or the cross-attention cache that it computes."""

CACHE_LIKE = re.compile(r"(input\.)?(past|present|cache)(_|\.|$).*", re.ASCII)
"""Names of inputs that look like a cache in any dialect."""


def looks_like_cache(name: str, shape: tuple[Dim, ...] | None) -> bool:
    """Whether an input looks like a cache: by its name, and as a tensor of three axes and more."""
    return CACHE_LIKE.match(name) is not None and (shape is None or len(shape) > 2)
