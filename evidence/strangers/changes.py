"""What a mistake does to a value of a decoder, and the findings that are right for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .presents import LENGTHS
from .sheet import FAR

if TYPE_CHECKING:
    from .body import Body

Apply = Callable[["Body", str, str], str]
"""The wrong value of the right one, whose axes have these letters."""


@dataclass(frozen=True)
class Change:
    """What is done to a value. `points` is a pattern; `needs` are letters that its axes must have."""

    name: str
    points: str
    apply: Apply
    names: tuple[str, ...] = ()
    needs: str = ""


def _taken(value: tuple[int, int] | None, letter: str) -> Apply:
    """Entries along an axis of a known size, in another order."""

    def apply(body: Body, tensor: str, axes: str) -> str:
        size = body.size(tensor, axes.index(letter))
        count = body.count(size)
        if value is None:
            order = body.sub(body.sub(size, 1), count)
        else:
            first, step = value
            order = body.op("Mod", body.add(body.mul(count, step), first), body.op("Max", size, 1))
        return body.op("Gather", tensor, order, axis=axes.index(letter))

    return apply


def _rolled(letter: str) -> Apply:
    return _taken((1, 1), letter)


def _first(letter: str) -> Apply:
    return _taken((0, 0), letter)


def _reversed(letter: str) -> Apply:
    return _taken(None, letter)


def _one(place: int) -> Apply:
    """The position of one token for all of a chunk: the first one (0) or the last one (-1)."""

    def apply(body: Body, tensor: str, _: str) -> str:
        end = 1 if place == 0 else FAR
        return body.add(body.mul(tensor, 0), body.part(tensor, place, end, 1))

    return apply


def _stopped(body: Body, tensor: str, _: str) -> str:
    return body.op("Min", tensor, 11)


def _wrapped(body: Body, tensor: str, _: str) -> str:
    return body.op("Mod", tensor, 16)


def _without(letter: str, last: bool) -> Apply:
    """The first or the last entry along an axis as zeros."""

    def apply(body: Body, tensor: str, axes: str) -> str:
        axis = axes.index(letter)
        size = body.size(tensor, axis)
        count = body.count(size)
        spared = body.op("Less", count, body.sub(size, 1)) if last else body.op("Greater", count, 0)
        others = [each for each in range(len(axes)) if each != axis]
        return body.where(body.lift(spared, *others), tensor, 0.0)

    return apply


def _remade(letters: str) -> Apply:
    """Two axes read in the other order: the numbers of [a, b] taken as [b, a]."""

    def apply(body: Body, tensor: str, axes: str) -> str:
        first, second = sorted(axes.index(letter) for letter in letters)
        order = list(range(len(axes)))
        order[first], order[second] = second, first
        return body.op("Reshape", body.move(tensor, *order), body.op("Shape", tensor), allowzero=1)

    return apply


def _key(body: Body, tensor: str, _: str) -> str:
    return body.record.get((body.at_point.replace(".v", ".k"), body.layer), tensor)


def _five_bits(body: Body, tensor: str, _: str) -> str:
    codes = body.op("Clip", body.op("Round", body.mul(tensor, 32.0)), np.float32(-16), np.float32(15))
    return body.op("Div", codes, 32.0)


def _renormed(body: Body, tensor: str, _: str) -> str:
    root = body.op("Sqrt", body.add(body.mean(body.mul(tensor, tensor), -1), 1e-4))
    return body.op("Div", tensor, root)


PARTS = r"\.(k|v|c|r|m|u|s|z|ssm|conv|shift|aa|bb|h|n|xk|xv)$"
CACHED, KEPT, OLD, PRESENT = (
    f"({points}){PARTS}" for points in ("past|stored|present|read", "stored|present", "past", "present")
)
POSITIONS, SLOTS = r"positions(\.query|\.key)?$|bias\.query$", r"mask\.query$"
TOKENS, COMPUTED = r"(tokens|hidden|logits|attended|drafted)$", r"(hidden|logits|attended)$"
ROWS, OFFSET, MASKED, PADDED = (
    (name,) for name in ("batch-rows-interact", "positions-not-offset", "mask-not-offset", "padding-changes-logits")
)
CHUNKS = ("chunk-differs", "cached-differs")
MIXED_UP = (*CHUNKS, "not-causal")
STEP = ("cached-differs", "cache-misread", "branches-disagree")
TOKEN = ("new-entries-wrong", "cached-differs")
ROOT = (*OFFSET, *MASKED, "not-causal", "past-ignored")
"""The number of past tokens, of which positions and masks are made."""
WRITTEN = ("new-entries-wrong", "present-rewrites-past", "cache-misread")


def _changes(points: str, names: tuple[str, ...], table: dict[str, Apply], needs: str = "") -> list[Change]:
    return [Change(name, points, apply, names, needs) for name, apply in table.items()]


CHANGES: tuple[Change, ...] = (
    # Values of the cache: these are named by where they are wrong
    *_changes(
        CACHED,
        (),
        {
            "scaled by 1.3": lambda b, x, _: b.mul(x, 1.3),
            "negated": lambda b, x, _: b.op("Neg", x),
            "halved": lambda b, x, _: b.mul(x, 0.5),
            "with 0.5 added": lambda b, x, _: b.add(x, 0.5),
            "clipped at 0.5": lambda b, x, _: b.op("Clip", x, np.float32(-0.5), np.float32(0.5)),
            "rounded to halves": lambda b, x, _: b.op("Div", b.op("Round", b.mul(x, 2.0)), 2.0),
            "cut to 5 bits": _five_bits,
            "squared": lambda b, x, _: b.mul(x, x),
            "normed once more": _renormed,
            "activated": lambda b, x, _: b.silu(x),
        },
    ),
    *_changes(
        CACHED,
        (),
        {"heads rolled": _rolled("h"), "heads reversed": _reversed("h"), "first head for all": _first("h")},
        "h",
    ),
    *_changes(CACHED, (), {"width rolled": _rolled("d"), "width reversed": _reversed("d")}, "d"),
    *_changes(
        CACHED,
        (),
        {
            "first entry lost": _without("s", last=False),
            "entries reversed": _reversed("s"),
            "entries rolled": _rolled("s"),
            "first entry for all": _first("s"),
        },
        "s",
    ),
    *_changes(f"(past|stored|read){PARTS}", (), {"last entry lost": _without("s", last=True)}, "s"),
    *_changes(PRESENT, ("present-does-not-grow",), {"last entry lost": _without("s", last=True)}, "s"),
    *_changes(CACHED, (), {"heads and width in the other order": _remade("hd")}, "hd"),
    *_changes(CACHED, (), {"heads and sequence in the other order": _remade("hs")}, "hs"),
    *_changes(CACHED, (), {"state transposed": _remade("de")}, "de"),
    *_changes(CACHED, ROWS, {"rows and heads in the other order": _remade("bh")}, "bh"),
    *_changes(CACHED, ROWS, {"rows reversed": _reversed("b"), "first row for all": _first("b")}, "b"),
    *_changes(OLD, ("past-ignored",), {"as zeros": lambda b, x, _: b.mul(x, 0.0)}),
    *_changes(KEPT, ("present-does-not-grow", "past-ignored"), {"as zeros": lambda b, x, _: b.mul(x, 0.0)}),
    *_changes(CACHED, ("layers-swapped",), {"that of layer 0": lambda b, x, _: b.record.get((b.at_point, 0), x)}),
    *_changes(r"(past|stored|present|read)\.v$", ("key-value-swapped",), {"keys in place of values": _key}),
    # Positions, and the number of past tokens
    *_changes(
        POSITIONS,
        OFFSET,
        {
            "from 0": lambda b, x, _: b.sub(x, b.part(x, 0, 1, 1)),
            "one too large": lambda b, x, _: b.add(x, 1),
            "one too small": lambda b, x, _: b.op("Max", b.sub(x, 1), 0),
            "doubled": lambda b, x, _: b.mul(x, 2),
        },
    ),
    *_changes(POSITIONS, (*OFFSET, *LENGTHS), {"stopped at 11": _stopped, "wrapped at 16": _wrapped}),
    *_changes(POSITIONS, (*OFFSET, *CHUNKS), {"reversed": _reversed("s"), "that of the first token": _one(0)}),
    *_changes(
        r"past$",
        ROOT,
        {
            "one too large": lambda b, x, _: b.add(x, 1),
            "one too small": lambda b, x, _: b.op("Max", b.sub(x, 1), 0),
            "doubled": lambda b, x, _: b.mul(x, 2),
            "traced as 5": lambda b, x, _: b.add(b.mul(x, 0), 5),
            "as 0": lambda b, x, _: b.mul(x, 0),
        },
    ),
    *_changes(r"past$", (*ROOT, *LENGTHS), {"stopped at 11": _stopped, "wrapped at 16": _wrapped}),
    # Masks
    *_changes(SLOTS, MASKED, {"from 0": lambda b, x, _: b.sub(x, b.part(x, 0, 1, 1))}),
    *_changes(SLOTS, (*MASKED, "not-causal"), {"one too large": lambda b, x, _: b.add(x, 1)}),
    *_changes(SLOTS, (*MASKED, "cache-misread"), {"one too small": lambda b, x, _: b.op("Max", b.sub(x, 1), 0)}),
    *_changes(SLOTS, (*MASKED, *MIXED_UP), {"that of the last token": _one(-1), "that of the first token": _one(0)}),
    *_changes(SLOTS, (*MASKED, *LENGTHS), {"stopped at 11": _stopped}),
    *_changes(
        r"seen$",
        (*MASKED, *PADDED, "not-causal", "cache-misread"),
        {
            "all keys": lambda b, x, _: b.op("Or", x, b.op("Not", x)),
            "first key hidden": lambda b, x, _: b.both(x, b.op("Greater", b.count(b.size(x, 3)), 0)),
            "keys reversed": lambda b, x, _: b.op("Slice", x, [-1], [-FAR], [3], [-1]),
        },
    ),
    *_changes(
        r"mask$",
        (*PADDED, *MASKED, "past-ignored", "cache-misread"),
        {
            "not read": lambda b, x, _: b.op("Or", x, b.op("Not", x)),
            "inverted": lambda b, x, _: b.op("Not", x),
            "rolled by one": _rolled("t"),
        },
    ),
    *_changes(r"(seen|mask)$", (*PADDED, *ROWS), {"first row for all": _first("b"), "rows reversed": _reversed("b")}),
    # Where new entries are written
    *_changes(r"write$", WRITTEN, {"one too large": lambda b, x, _: b.add(x, 1)}),
    *_changes(r"write$", (*WRITTEN, *CHUNKS), {"reversed": _reversed("s")}, "s"),
    *_changes(r"write$", WRITTEN, {"from 0": lambda b, x, _: b.sub(x, b.part(x, 0, 1, 1))}, "s"),
    *_changes(r"write$", (*WRITTEN, *LENGTHS), {"stopped at 11": _stopped, "wrapped at 16": _wrapped}),
    # Tokens, and what is computed of them
    *_changes(
        TOKENS,
        MIXED_UP,
        {"that of the first token": _first("s"), "tokens reversed": _reversed("s"), "tokens rolled": _rolled("s")},
    ),
    *_changes(TOKENS, ROWS, {"rows reversed": _reversed("b"), "first row for all": _first("b")}),
    *_changes(COMPUTED, ROWS, {"mean of the rows added": lambda b, x, _: b.add(x, b.mean(x, 0))}),
    *_changes(r"tokens$", TOKEN, {"another token": lambda b, x, _: b.op("Mod", b.add(x, 1), 80)}),
    *_changes(r"tokens$", TOKEN, {"clipped at 40": lambda b, x, _: b.op("Min", x, 40)}),
    *_changes(COMPUTED, STEP, {"scaled by 1.3": lambda b, x, _: b.mul(x, 1.3)}),
    *_changes(COMPUTED, STEP, {"width rolled": _rolled("d")}, "d"),
    *_changes(COMPUTED, ("nondeterministic",), {"with noise": lambda b, x, _: b.add(x, b.op("RandomNormalLike", x))}),
    *_changes(COMPUTED, ("non-finite",), {"not a number": lambda b, x, _: b.op("Log", b.op("Neg", b.op("Abs", x)))}),
)
