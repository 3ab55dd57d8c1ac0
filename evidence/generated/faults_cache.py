"""Faults of what is kept in the cache, and of what is read from it."""

from dataclasses import replace

from .decoders import Body
from .designs import Design
from .kinds import (
    BRANCH,
    CHUNK,
    DIFFERS,
    EARLY,
    LOST,
    MIXED,
    REWRITES,
    SEEN,
    appends,
    branched,
    buffered,
    grouped,
    readable,
    static,
    to_past,
    unbounded,
)
from .strikes import Fault, Fits, Strike, Walk, Wrong, anywhere
from .wrongs import (
    BFLOAT16,
    clipped,
    columns,
    first_row,
    of_layer,
    only,
    quantized,
    queries,
    recorded,
    rolled,
    rounded,
    shows,
    swapped_halves,
    times,
    turned_around,
)


def kept() -> list[Fault]:
    """New rows on their way into the cache."""

    def kept(name: str, part: str, wrong: Wrong, strike: Strike, walk: Walk, *accept: str) -> Fault:
        # The last entries of a ring are all that it keeps of a long prefill.
        fits = unbounded if strike.branch == "prefill" and strike.new_from == 24 else anywhere
        return Fault(name, f"kept {part}", wrong, strike, walk, accept or LOST, fits)

    batch = Walk((9, 1, 1, 1), rows=2)
    long = Walk((20, 1, 1))
    at = Strike(position=15, branch="any")
    return [
        kept("the entry of position 15 lost", "value", times(0), at, Walk((18, 1)), *LOST),
        kept("the entry of position 50 lost", "key", times(0), replace(at, position=50), to_past(50, 1, 1), *LOST),
        kept("the entry of position 0 lost", "key", times(0), replace(at, position=0), EARLY, *LOST),
        kept(
            "the entry of position 15 of another layer",
            "key",
            of_layer("made key", -1),
            replace(at, layer=2),
            Walk((18, 1)),
            *DIFFERS,
            "layers-swapped",
        ),
        kept("row 3 lost", "value", times(0), Strike(row=3), Walk((9, 1, 1), rows=4), *MIXED, *LOST),
        kept("chunks of exactly 2 lost", "value", times(0), Strike(new_from=2, new_to=2), Walk((9, 2, 1)), *LOST),
        kept(
            "chunks of exactly 5 in reverse",
            "value",
            turned_around(2),
            Strike(new_from=5, new_to=5),
            Walk((9, 5, 1)),
            *DIFFERS,
        ),
        kept("chunks of 16 and more halved", "key", times(0.5), Strike(new_from=16), Walk((9, 16, 1)), *DIFFERS),
        kept(
            "second token of a chunk of exactly 3 doubled",
            "key",
            times(2),
            Strike(token=1, new_from=3, new_to=3),
            Walk((9, 3, 1)),
            *DIFFERS,
        ),
        kept("values lost from past 24 on", "value", times(0), Strike(past_from=24), to_past(24, 1, 1)),
        kept("keys lost from past 40 on", "key", times(0), Strike(past_from=40), to_past(40, 1, 1)),
        kept("keys lost at pasts divisible by 16", "key", times(0), Strike(past_every=16), to_past(16, 1, 1)),
        kept("values wrong at pasts divisible by 5", "value", times(-1), Strike(past_every=5), to_past(10, 1, 1)),
        kept("values wrong at past 13 only", "value", times(-1), Strike(past_from=13, past_to=13), to_past(13, 1, 1)),
        kept("keys wrong at past 7 only", "key", times(-1), Strike(past_from=7, past_to=7), to_past(7, 1, 1)),
        kept(
            "values lost between pasts 30 and 33",
            "value",
            times(0),
            Strike(past_from=30, past_to=33),
            to_past(30, 1, 1),
        ),
        kept("keys lost up to past 6", "key", times(0), Strike(past_to=6), Walk((5, 1, 1))),
        kept(
            "key of the second token of a chunk lost", "key", times(0), Strike(token=1, new_from=2), CHUNK, *SEEN, *LOST
        ),
        kept("value of the third token of a chunk lost", "value", times(0), Strike(token=2), CHUNK),
        kept("values of a chunk in reverse", "value", turned_around(2), Strike(new_from=2), CHUNK),
        kept("values of a chunk of 4 and more scaled", "value", times(1.1), Strike(new_from=4), Walk((9, 4, 1))),
        kept("keys lost where a chunk crosses 32", "key", times(0), Strike(across=32), to_past(30, 4, 1)),
        kept("keys scaled in a step", "key", times(1.1), Strike(), EARLY, *BRANCH),
        kept("values to bfloat16", "value", rounded(BFLOAT16), Strike(), to_past(12), *DIFFERS),
        kept("keys to 8 bits in layer 1", "key", quantized(127), Strike(layer=1), to_past(16), *DIFFERS),
        kept("values to 8 bits", "value", quantized(127), Strike(), to_past(12), *DIFFERS),
        kept("keys to 8 bits in the prefill", "key", quantized(127), Strike(branch="prefill"), EARLY, *BRANCH),
        kept("keys saturate at 1.5", "key", clipped(1.5), Strike(), EARLY, *DIFFERS),
        kept("values of row 0 in all rows", "value", first_row, Strike(), batch, *MIXED),
        kept("rows exchanged", "key", turned_around(0), Strike(), batch, *MIXED),
        kept("row 2 lost", "value", times(0), Strike(row=2), Walk((9, 1, 1), rows=3), *MIXED, *LOST),
        kept(
            "rows exchanged from past 20 on",
            "value",
            turned_around(0),
            Strike(past_from=20),
            Walk((18, 1, 1, 1, 1), rows=2),
            *MIXED,
        ),
        kept("head 0 lost from past 12 on", "value", times(0), Strike(head=0, past_from=12), to_past(12, 1, 1)),
        kept(
            "key and value exchanged at past 20",
            "key",
            recorded("made value"),
            Strike(past_from=20, past_to=20),
            to_past(20, 1, 1),
            *DIFFERS,
            "key-value-swapped",
        ),
        kept(
            "key and value exchanged in layer 2",
            "value",
            recorded("made key"),
            Strike(layer=2),
            EARLY,
            "key-value-swapped",
            *DIFFERS,
        ),
        kept(
            "keys of another layer in the step",
            "key",
            of_layer("made key", -1),
            Strike(layer=1),
            EARLY,
            "layers-swapped",
            *DIFFERS,
        ),
        kept(
            "values of another layer from past 28 on",
            "value",
            of_layer("made value", -2),
            Strike(layer=2, past_from=28),
            to_past(28, 1, 1),
            "layers-swapped",
            *DIFFERS,
        ),
        kept(
            "entries of a long prefill in reverse",
            "value",
            turned_around(2),
            Strike(branch="prefill", new_from=16),
            long,
            *DIFFERS,
        ),
        kept(
            "entries of every prefill in reverse",
            "key",
            turned_around(2),
            Strike(branch="prefill"),
            EARLY,
            *DIFFERS,
            "branches-disagree",
        ),
        kept("last entry of a prefill lost", "value", only(-1, 2, times(0)), Strike(branch="prefill"), EARLY, *LOST),
        kept(
            "first entry of a long prefill lost",
            "key",
            only(0, 2, times(0)),
            Strike(branch="prefill", new_from=24),
            Walk((24, 1, 1)),
        ),
        kept(
            "prefill of 32 and more halved",
            "value",
            times(0.5),
            Strike(branch="prefill", new_from=32),
            Walk((33, 1)),
            *DIFFERS,
        ),
    ]


def read() -> list[Fault]:
    """The past as attention reads it, and the present as it is returned."""
    oldest, latest = only(0, 2, times(0)), only(-1, 2, times(0))

    def read(name: str, point: str, wrong: Wrong, strike: Strike, walk: Walk, *accept: str) -> Fault:
        fits = appends if point.startswith("present") else readable
        return Fault(name, point, wrong, strike, walk, accept or SEEN, fits)

    def several_heads(fault: Fault) -> Fault:
        return replace(fault, fits=lambda d: fault.fits(d) and grouped(d))

    return [
        read("a cache that decays", "present value", times(0.97), Strike(), EARLY, *REWRITES),
        read(
            "a cache scaled from past 32 on",
            "present key",
            times(0.8),
            Strike(past_from=32),
            to_past(32, 1, 1),
            *REWRITES,
        ),
        read(
            "present rolled at multiples of 8",
            "present value",
            rolled(2),
            Strike(past_every=8),
            to_past(16, 1, 1),
            *REWRITES,
        ),
        read(
            "oldest entry lost from past 32 on",
            "present key",
            oldest,
            Strike(past_from=32),
            to_past(32, 1, 1),
            *REWRITES,
        ),
        read(
            "cache cleared at past 40",
            "present value",
            times(0),
            Strike(past_from=40, past_to=40),
            to_past(40, 1, 1),
            *REWRITES,
            *LOST,
        ),
        read("cache to 8 bits in each step", "present key", quantized(127), Strike(), EARLY, *REWRITES),
        several_heads(
            read(
                "heads of the cache exchanged",
                "present key",
                turned_around(1),
                Strike(past_from=8),
                to_past(9, 1, 1),
                *REWRITES,
            )
        ),
        read(
            "rows of the cache exchanged",
            "present value",
            turned_around(0),
            Strike(past_from=15, past_to=15),
            Walk((14, 1, 1, 1), rows=2),
            *MIXED,
            *REWRITES,
        ),
        read("entries of the past read in reverse", "read value", turned_around(2), Strike(), EARLY),
        read("entries of the past read in reverse by a chunk", "read key", turned_around(2), Strike(new_from=2), CHUNK),
        read("past read scaled in layer 2", "read key", times(0.7), Strike(layer=2), EARLY, *DIFFERS),
        read(
            "newest entry of the past read as zero at even pasts",
            "read value",
            latest,
            Strike(past_every=2),
            to_past(10),
        ),
        read("past of layer 3 read as zero", "read value", times(0), Strike(layer=3), EARLY),
        read("past read as zero from 48 on", "read value", times(0), Strike(past_from=48), to_past(48)),
        several_heads(
            read(
                "heads of the past read in another order",
                "read value",
                turned_around(1),
                Strike(),
                EARLY,
                *DIFFERS,
            )
        ),
        read("past read from row 0", "read key", first_row, Strike(), Walk((9, 1, 1), rows=2), *MIXED),
        read("past read half and half", "read key", swapped_halves(2), Strike(past_from=12, past_every=4), to_past(16)),
    ]


def buffers() -> list[Fault]:
    """Where rows are written in a buffer of fixed size."""

    def write(name: str, wrong: Wrong, strike: Strike, walk: Walk, *accept: str, fits: Fits = static) -> Fault:
        accepted = accept or (*LOST, "present-rewrites-past")
        return Fault(name, "write at", wrong, strike, walk, accepted, fits)

    def off(by: int) -> Wrong:
        return lambda b, v, _: b.op("Max", b.op("Add", v, [by]), [0])

    def first(b: Body, v: str, _: int) -> str:
        return b.op("Add", b.op("Mul", v, [0]), b.part(v, [0], [1], 0))

    def wrap(at: int) -> Wrong:
        return lambda b, v, _: b.op("Mod", v, [at])

    def around(b: Body, _: str, __: int) -> str:
        return b.op("Mod", b.last(b.design.called("slot"), 24, 0), [23])

    def constant(at: int) -> Wrong:
        return lambda b, v, _: b.op("Add", b.op("Mul", v, [0]), [at])

    def ring(design: Design) -> bool:
        return design.layout == "ring"

    return [
        write("written one slot off", off(1), Strike(), EARLY, fits=buffered),
        write("written one slot late from past 20 on", off(-1), Strike(past_from=20), to_past(20, 1, 1)),
        write(
            "written to slot 0 at pasts divisible by 8",
            constant(0),
            Strike(past_every=8),
            to_past(16, 1, 1),
            fits=buffered,
        ),
        Fault("written in a ring of 23", "write at", around, Strike(), to_past(26, 1, 1, 1), LOST, ring),
        write("written modulo 32", wrap(32), Strike(), to_past(34, 1, 1)),
        write("a chunk written to one slot", first, Strike(new_from=2), CHUNK, fits=buffered),
        write("a chunk written in reverse", turned_around(0), Strike(new_from=2), CHUNK),
        write("prefill written one slot off", off(1), Strike(branch="prefill"), EARLY),
        write("written to slot 24 beyond it", lambda b, v, _: b.op("Min", v, [24]), Strike(), to_past(26, 1, 1)),
        write("written wrong in layer 2", off(1), Strike(layer=2), EARLY, fits=buffered),
        Fault(
            "buffer cleared at past 32",
            "present value",
            times(0),
            Strike(past_from=32, past_to=32),
            to_past(32, 1, 1),
            (*REWRITES, *LOST),
            buffered,
        ),
        Fault("buffer decays", "present key", times(0.95), Strike(), EARLY, REWRITES, buffered),
        Fault(
            "one slot too many seen",
            "seen",
            shows(lambda b: b.op("Equal", columns(b), b.op("Add", queries(b), 1))),
            Strike(),
            EARLY,
            (*SEEN, "not-causal"),
            static,
        ),
        Fault(
            "all slots seen",
            "seen",
            lambda b, v, _: b.op("Or", v, b.op("Not", v)),
            Strike(),
            EARLY,
            (*SEEN, "not-causal"),
            static,
        ),
    ]


def lengths() -> list[Fault]:
    """Presents of a wrong length."""

    def length(name: str, point: str, wrong: Wrong, strike: Strike, walk: Walk, *accept: str) -> Fault:
        return Fault(name, point, wrong, strike, walk, accept, appends, fails=True, outright=True)

    def first_token(b: Body, v: str, _: int) -> str:
        return b.part(v, [0], [1], 2)

    def from_oldest(at: int) -> Wrong:
        """Without the oldest entry from a past of `at` on."""
        return lambda b, v, _: b.part(v, b.op("Where", b.op("GreaterOrEqual", b.past, [at]), [1], [0]), [2**60], 2)

    def newest(b: Body, v: str, _: int) -> str:
        return b.last(v, b.new, 2)

    def window(size: int) -> Wrong:
        return lambda b, v, _: b.last(v, size, 2)

    grow = ("present-does-not-grow", "step-fails", *DIFFERS)
    return [
        length(
            "present holds the new rows alone", "present value", newest, Strike(), EARLY, "present-drops-past", *grow
        ),
        length(
            "present without its oldest from past 20 on",
            "present key",
            from_oldest(20),
            Strike(branch="any"),
            to_past(20, 1, 1),
            *grow,
        ),
        length("present cut to 16", "present value", window(16), Strike(branch="any"), to_past(18, 1, 1), *grow),
        Fault(
            "first token of a chunk kept alone",
            "kept key",
            first_token,
            Strike(),
            CHUNK,
            (*grow, "chunk-fails"),
            lambda d: appends(d) and branched(d),
            fails=True,
            outright=True,
        ),
    ]
