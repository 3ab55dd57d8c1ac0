"""Mistakes: a change of a value, where, and when; and the findings that are right for each."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from .changes import CHANGES, Change
from .presents import LENGTHS

if TYPE_CHECKING:
    from .body import Body
    from .decoder import Decoder


@dataclass(frozen=True)
class When:
    """When a mistake strikes: a condition that broadcasts with a value of these axes; always without one."""

    name: str
    condition: Callable[[Body, str], str] | None = None
    names: tuple[str, ...] = ()
    counts: bool = False
    """Whether the graph must know how many tokens the past has."""


@dataclass(frozen=True)
class Fault:
    """One mistake in one decoder: a slip where there is no change."""

    point: str
    change: Change | None = None
    when: When | None = None
    layer: int = -1
    slip_names: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        if self.change is None:
            return self.point
        where = " of the second layer" if self.layer > 0 else ""
        return f"{self.point}{where}: {self.change.name}, {self.when.name if self.when else ''}"

    @property
    def slug(self) -> str:
        return re.sub(r"[^a-z0-9]+", "_", self.kind.lower()).strip("_")

    @property
    def names(self) -> tuple[str, ...]:
        """The findings that are right for it."""
        if self.change is None or self.when is None:
            return self.slip_names
        own = self.change.names
        part = PART_NAMES.get(self.point.partition(".")[0], ()) if "." in self.point else ()
        # Of one new token both the first and the last entry are all that is stored.
        none = ("present-does-not-grow",) if self.point[:7] == "stored." and "entry lost" in self.change.name else ()
        return tuple(dict.fromkeys([*own, *part, *none, *self.when.names]))

    def strikes_here(self, body: Body) -> bool:
        """In files with a branch for the past, that branch is at fault."""
        return body.cached

    def applied(self, body: Body, value: str, axes: str, layer: int) -> str:
        """The wrong value, where and when it strikes."""
        if self.change is None or self.when is None or not self.strikes_here(body):
            return value
        body.layer = layer
        wrong = self.change.apply(body, value, axes)
        if self.when.condition is None:
            return wrong
        condition = self.when.condition(body, axes)
        if self.point in ("seen", "mask"):
            right = body.both(body.op("Not", condition), value)
            return body.op("Or", right, body.both(condition, wrong))
        return body.where(condition, wrong, value)


PART_NAMES = {
    "past": ("cache-misread", "present-rewrites-past"),
    "read": ("cache-misread",),
    "stored": ("new-entries-wrong",),
    "present": ("present-rewrites-past", "new-entries-wrong"),
}
"""The findings that are right for a wrong value of the cache, by where it is wrong."""

# When


def _past(body: Body) -> str:
    return body.reshape(body.part(body.past, 0, 1, 0), 1)


def _more(value: Callable[[Body], str], least: int) -> Callable[[Body, str], str]:
    return lambda body, _: body.op("Greater", value(body), [least])


def _rows(body: Body, axes: str) -> str:
    after = body.op("Greater", body.count(body.rows), 0)
    others = [axis for axis in range(len(axes)) if axis != axes.index("b")]
    return body.lift(after, *others) if others else after


ALWAYS = When("always")
CHOSEN = ("branches-disagree",)
"""A graph that computes something else from a length of the past on has two branches."""
WHENS = (
    ALWAYS,
    When("with a past", _more(_past, 0), CHOSEN, counts=True),
    When(
        "in chunks on a past",
        lambda body, _: body.both(body.op("Greater", _past(body), [0]), body.op("Greater", body.new, [1])),
        ("chunk-differs", *CHOSEN),
        counts=True,
    ),
    When("in calls of one token", lambda body, _: body.op("Equal", body.new, [1]), ("cached-differs", "chunk-differs")),
    When(
        "in calls of several tokens",
        lambda body, _: body.op("Greater", body.new, [1]),
        ("chunk-differs", "cached-differs"),
    ),
    When("from 8 tokens of past on", _more(_past, 7), (*LENGTHS, *CHOSEN), counts=True),
    When("from 16 tokens of past on", _more(_past, 15), (*LENGTHS, *CHOSEN), counts=True),
    When(
        "at odd lengths of the past",
        lambda body, _: body.op("Equal", body.op("Mod", _past(body), [2]), [1]),
        (*LENGTHS, *CHOSEN),
        counts=True,
    ),
    When("in batches", lambda body, _: body.op("Greater", body.rows, [1]), ("batch-rows-interact",)),
    When("in rows after the first", _rows, ("batch-rows-interact",)),
)


def faults_of(decoder: Decoder) -> Iterator[Fault]:
    """All mistakes that this decoder can have: the slips of its author, then changes of values."""
    design = decoder.design
    for slip, names in decoder.slips.items():
        yield Fault(slip, slip_names=names)
    counted = design.counted != "shape" or any(point in ("past.k", "past.c", "past.m") for point in decoder.body.points)
    for point, axes in decoder.body.points.items():
        for change in CHANGES:
            if not re.match(change.points, point) or not set(change.needs) <= set(axes):
                continue
            for when in WHENS:
                if (when.counts and not counted) or ("rows after" in when.name and "b" not in axes):
                    continue
                if design.files == "one" or when is ALWAYS or when.counts:
                    yield Fault(point, change, when)


def drawn(decoder: Decoder) -> Iterator[Fault]:
    """All mistakes of one decoder, in an order of its own: one of each place in turn, slips of the author early."""
    random = np.random.default_rng(zlib.crc32(decoder.design.name.encode()))
    places: dict[str, list[Fault]] = {}
    for each in faults_of(decoder):
        one_layer = each.point in decoder.body.layered and random.integers(2)
        fault = replace(each, layer=1) if one_layer else each
        places.setdefault(fault.point.partition(".")[0] if fault.change else "slip", []).append(fault)
    turns = {name: [faults[n] for n in random.permutation(len(faults))] for name, faults in places.items()}
    for turn in range(max(map(len, turns.values()))):
        order = [name for name in turns if name != "slip"]
        order = [order[n] for n in random.permutation(len(order))]
        order.insert(int(random.integers(4)), "slip")
        for name in order:
            yield from turns[name][turn : turn + 1]
