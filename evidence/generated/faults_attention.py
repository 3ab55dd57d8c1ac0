"""Faults of what a token attends to, and of where it believes to be."""

import numpy as np

from .decoders import Body
from .kinds import (
    BRANCH,
    CHUNK,
    DIFFERS,
    EARLY,
    MIXED,
    PADDED,
    PLACED,
    REWRITES,
    SEEN,
    appends,
    masked,
    numbered,
    relative,
    rotary,
    to_past,
    unbounded,
)
from .strikes import Fault, Fits, Strike, Walk, Wrong, anywhere
from .wrongs import (
    columns,
    first_row,
    hides,
    new_columns,
    ones,
    queries,
    recorded,
    rolled,
    shows,
    times,
    turned_around,
)


def masks() -> list[Fault]:
    """Which keys a token attends to."""

    def mask(name: str, wrong: Wrong, strike: Strike, walk: Walk, *accept: str, fits: Fits = anywhere) -> Fault:
        return Fault(name, "seen", wrong, strike, walk, accept or SEEN, fits)

    def beyond(b: Body) -> str:
        return b.all_of(b.op("GreaterOrEqual", columns(b), 24), b.op("Less", columns(b), queries(b)))

    def older(width: int) -> Wrong:
        return hides(lambda b: b.op("LessOrEqual", columns(b), b.op("Sub", queries(b), width)))

    def own(b: Body) -> str:
        return b.op("Equal", columns(b), queries(b))

    def before(by: int) -> Wrong:
        return hides(lambda b: b.op("Equal", columns(b), b.op("Sub", queries(b), by)))

    def from_start(b: Body, v: str, _: int) -> str:
        return b.op("And", v, b.op("LessOrEqual", columns(b), b.op("Sub", queries(b), b.past)))

    past_columns = hides(lambda b: b.op("Less", columns(b), b.past))
    first_column = hides(lambda b: b.op("Equal", columns(b), 0))
    beyond_32 = hides(lambda b: b.op("GreaterOrEqual", columns(b), 32))
    odd = hides(lambda b: b.all_of(b.op("Equal", b.op("Mod", columns(b), 2), 1), b.op("Less", columns(b), queries(b))))
    return [
        mask("keys beyond 24 never seen in a step", hides(beyond), Strike(), to_past(28)),
        mask("a window of 16 in the step alone", older(16), Strike(), to_past(20)),
        mask("a window of 40 in the step alone", older(40), Strike(), to_past(44), fits=unbounded),
        mask("a window of 12 in layer 3 of the step", older(12), Strike(layer=3), to_past(16)),
        mask("mask not offset by the past", from_start, Strike(), EARLY),
        mask("mask of a chunk not offset", from_start, Strike(new_from=2), CHUNK),
        mask("no causal mask in a chunk", shows(new_columns), Strike(new_from=2), CHUNK, *SEEN, "not-causal"),
        mask(
            "no causal mask in a chunk of 4 and more",
            shows(new_columns),
            Strike(new_from=4),
            Walk((9, 5)),
            *SEEN,
            "not-causal",
        ),
        mask(
            "no causal mask where a chunk crosses 32",
            shows(new_columns),
            Strike(across=32),
            to_past(30, 4),
            *SEEN,
            "not-causal",
        ),
        mask(
            "the second token of a chunk looks ahead",
            shows(new_columns),
            Strike(token=1, new_from=3),
            CHUNK,
            *SEEN,
            "not-causal",
        ),
        mask(
            "no causal mask in a chunk from past 20 on",
            shows(new_columns),
            Strike(new_from=2, past_from=20),
            to_past(20, 3),
            *SEEN,
            "not-causal",
        ),
        mask("past hidden in layer 2", past_columns, Strike(layer=2), EARLY),
        mask("past hidden in head 1", past_columns, Strike(head=1), EARLY),
        mask("past hidden from 36 on", past_columns, Strike(past_from=36), to_past(36)),
        mask("past hidden at past 19 only", past_columns, Strike(past_from=19, past_to=19), to_past(19)),
        mask("past hidden from a chunk", past_columns, Strike(new_from=2), CHUNK),
        mask("past hidden from row 1", past_columns, Strike(row=1), Walk((9, 1, 1), rows=2), *MIXED, *SEEN),
        mask("a token does not see itself in a step", hides(own), Strike(), EARLY),
        mask("the newest past token hidden at pasts divisible by 3", before(1), Strike(past_every=3), to_past(12)),
        mask("the first token hidden in a step", first_column, Strike(), EARLY),
        mask("the first token hidden from past 26 on", first_column, Strike(past_from=26), to_past(26), fits=unbounded),
        mask("a causal table of 32 in the step", beyond_32, Strike(), to_past(34)),
        mask("every other key hidden in a step", odd, Strike(), EARLY),
        Fault(
            "chunk masked softly",
            "scores",
            lambda b, v, _: b.op("Max", v, -4.0),
            Strike(new_from=2),
            CHUNK,
            (*SEEN, "not-causal"),
        ),
        Fault("scores scaled in a step", "scores", times(0.8), Strike(), EARLY, BRANCH),
        Fault(
            "scores capped from past 24 on",
            "scores",
            lambda b, v, _: b.op("Min", v, 0.3),
            Strike(past_from=24),
            to_past(24),
            DIFFERS,
        ),
        Fault(
            "looks ahead everywhere",
            "seen",
            shows(new_columns),
            Strike(branch="any"),
            Walk((9,)),
            ("not-causal",),
            fits=lambda d: not d.padded,
        ),
    ]


def padding() -> list[Fault]:
    """The mask of the padding, and what is counted of it."""
    accept = ("padding-changes-logits", *DIFFERS)

    def past_ones(b: Body, v: str, _: int) -> str:
        at = b.op("Unsqueeze", b.count(b.size(v, 1)), [0])
        return b.op("Where", b.op("Less", at, b.past), [[1]], v)

    def from_length(b: Body, v: str, _: int) -> str:
        return b.op("Add", b.op("Mul", v, [0]), b.op("Unsqueeze", b.query_at, [0]))

    return [
        Fault("padding ignored in steps", "padding", ones, Strike(), PADDED, accept, masked),
        Fault(
            "padding ignored from past 20 on",
            "padding",
            ones,
            Strike(past_from=20),
            Walk((20, 1), 2, (0, 4)),
            accept,
            masked,
        ),
        Fault("padding of row 0 in all rows", "padding", first_row, Strike(), PADDED, accept, masked),
        Fault("padding mask one to the side", "padding", rolled(1), Strike(), PADDED, accept, masked),
        Fault("padding ignored in the past", "padding", past_ones, Strike(), PADDED, accept, masked),
        Fault(
            "padding ignored in a chunk", "padding", ones, Strike(new_from=2), Walk((9, 3), 2, (0, 4)), accept, masked
        ),
        Fault(
            "positions count the padding in steps",
            "positions",
            from_length,
            Strike(),
            PADDED,
            (*accept, "positions-not-offset"),
            lambda d: d.counted == "mask",
        ),
        Fault(
            "positions of row 0 in all rows",
            "positions",
            first_row,
            Strike(),
            PADDED,
            accept,
            lambda d: d.padded and numbered(d),
        ),
        Fault("padding ignored everywhere", "padding", ones, Strike(branch="any"), PADDED, accept, masked),
    ]


def positions() -> list[Fault]:
    """Where a step believes its tokens to be."""

    def placed(name: str, wrong: Wrong, strike: Strike, walk: Walk, *accept: str) -> Fault:
        return Fault(name, "positions", wrong, strike, walk, accept or PLACED, numbered)

    def less_past(b: Body, v: str, _: int) -> str:
        return b.op("Sub", v, b.past)

    def equal(b: Body, v: str, _: int) -> str:
        return b.op("Add", b.op("Mul", v, [0]), b.part(v, [0], [1], 1))

    def doubled(b: Body, v: str, _: int) -> str:
        return b.op("Add", v, b.op("Sub", v, b.part(v, [0], [1], 1)))

    def off(by: int) -> Wrong:
        return lambda b, v, _: b.op("Add", v, [by])

    def clip(at: int) -> Wrong:
        return lambda b, v, _: b.op("Min", v, [at])

    def wrap(at: int) -> Wrong:
        return lambda b, v, _: b.op("Mod", v, [at])

    second = Strike(token=1, new_from=2)
    return [
        placed("positions clipped at 20 in a step", clip(20), Strike(), to_past(23)),
        placed("positions clipped at 44 in a step", clip(44), Strike(), to_past(48)),
        placed("positions restart in a step", less_past, Strike(), EARLY),
        placed("positions restart in a chunk", less_past, Strike(new_from=2), CHUNK),
        placed("positions one too large in a step", off(1), Strike(), EARLY),
        placed("positions one too small from past 24 on", off(-1), Strike(past_from=24), to_past(24)),
        placed("positions wrap at 32 in a step", wrap(32), Strike(), to_past(34)),
        placed("position wrong at past 17 only", off(5), Strike(past_from=17, past_to=17), to_past(17)),
        placed("positions wrong at pasts divisible by 6", off(2), Strike(past_every=6), to_past(12)),
        placed("positions of a chunk all equal", equal, Strike(new_from=2), CHUNK),
        placed("positions of a chunk in steps of two", doubled, Strike(new_from=2), CHUNK),
        placed("positions of a chunk in reverse", turned_around(1), Strike(new_from=2), CHUNK),
        placed("position of the second token of a chunk wrong", off(3), second, CHUNK),
        placed("positions one too large where a chunk crosses 16", off(1), Strike(across=16), to_past(14, 4)),
        placed(
            "positions stop at 30 everywhere",
            clip(30),
            Strike(branch="any"),
            to_past(33),
            "context-limit-fails",
            *PLACED,
        ),
        Fault(
            "another rotary base in a step",
            "angles",
            lambda b, v, _: b.op("Mul", v, np.linspace(1, 0.8, b.design.depth // 2)),
            Strike(),
            EARLY,
            (*PLACED, "branches-disagree"),
            rotary,
        ),
        Fault("rotary scaled from past 28 on", "angles", times(0.9), Strike(past_from=28), to_past(28), PLACED, rotary),
        Fault(
            "keys rotated again",
            "present key",
            lambda b, v, _: b.op(
                "Mul", b.op("Concat", b.part(v, [1], [2**60], 3), b.part(v, [0], [1], 3), axis=3), -1.0
            ),
            Strike(past_every=7),
            to_past(14, 1, 1),
            REWRITES,
            lambda d: rotary(d) and appends(d),
        ),
        Fault(
            "keys not rotated from past 16 on",
            "rotated key",
            recorded("plain key"),
            Strike(past_from=16),
            to_past(16),
            PLACED,
            rotary,
        ),
        Fault(
            "distance not offset in a step",
            "distance",
            lambda b, v, _: b.op("Sub", v, b.past),
            Strike(),
            EARLY,
            (*PLACED, *SEEN),
            lambda d: d.position == "relative",
        ),
        Fault(
            "distance one too large in layer 1",
            "distance",
            lambda b, v, _: b.op("Add", v, [3]),
            Strike(layer=1),
            EARLY,
            PLACED,
            lambda d: d.position == "relative",
        ),
        Fault("no bias in a step", "bias", times(0), Strike(), EARLY, (*PLACED, "branches-disagree"), relative),
        Fault("no bias from past 30 on", "bias", times(0), Strike(past_from=30), to_past(30), PLACED, relative),
        Fault(
            "bias of the heads in reverse in a chunk",
            "bias",
            turned_around(0),
            Strike(new_from=2),
            CHUNK,
            DIFFERS,
            relative,
        ),
    ]
