"""Golden numbers: a small digest of what a model returned, with which a later run of it is compared. numpy only.

A digest has samples of the logits of every call and of each layer's cache, and the tokens that were fed. Caches are
sampled in the order of axes [batch, kv_heads, tokens, head_dim], so that another layout of the file compares.
"""

import math
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from kvdoctor.contract import Axis, CacheContract, Slot
from kvdoctor.decode.calls import Answer, Array, take_sample
from kvdoctor.decode.paired_walks import Walk
from kvdoctor.decode.parity import correlate
from kvdoctor.records import record

WALKS = (Walk(1, 8, (1,) * 24), Walk(1, 3, (2, 1, 3, 1)), Walk(2, 4, (1, 1, 1)))
"""A long decoding, chunks, and a batch: what a change of a runtime or of a graph tends to break. The first must run."""
TOP = 5
ORDER: tuple[Axis, ...] = ("batch", "layers", "parts", "kv_heads", "past", "head_dim")
LEAST_DEVIATION = 1e-12
SAMPLED, MOST_SIZES, MOST_TOKENS = 64, 256, 4096
"""Values of a sample (`calls.take_sample`); of a walk that is read the calls, and the tokens of a call, at most."""
MOST_STATES, MOST_VOCABULARY = 1 << 16, 1 << 31
"""Of a file that is read, the encoder states, and the tokens of a vocabulary of open size, at most."""


@record
class GoldenWalk:
    """The digest of one walk.

    Attributes:
        walk: The calls.
        tokens: int[batch, total]: what was fed.
        logits: float[calls, 64]: a sample of the last logits of each call.
        deviations: float[calls]: their standard deviations.
        top: int[calls, 5]: the likeliest tokens, the likeliest first.
        caches: By layer and part (`0.key`), float[64]: a sample of the cache after the last call.
        spreads: By the same name, its standard deviation.
    """

    walk: Walk
    tokens: tuple[tuple[int, ...], ...]
    logits: tuple[tuple[float, ...], ...]
    deviations: tuple[float, ...]
    top: tuple[tuple[int, ...], ...]
    caches: dict[str, tuple[float, ...]]
    spreads: dict[str, float]


@record
class GoldenDifference:
    """The first place where a run is not as the golden one.

    The call is that of the golden `walk` which ends with the token before `stop`; `cache` is the cache that differs
    (`0.key`), None for the logits. `relative` is how far off it is as a fraction of the standard deviation; `tokens`
    are the golden likeliest token and the one now, where these differ.
    """

    walk: Walk
    stop: int
    cache: str | None
    relative: float
    tokens: tuple[int, int] | None = None


def digest(walk: Walk, tokens: Array, logits: Array, last: Answer, contract: CacheContract) -> GoldenWalk:
    """The digest of a walk: `logits` float[calls, vocabulary], `last` what the last call returned."""
    # The head may be padded to more rows than there are tokens.
    top = np.argsort(-logits[:, : contract.vocabulary], axis=-1, kind="stable")[:, :TOP]
    top = np.pad(top, ((0, 0), (0, TOP - top.shape[1])), mode="edge")  # of a vocabulary of fewer tokens
    caches, spreads = {}, {}
    for slot in contract.of_kind("self-attention"):
        name = slot.present if walk.pieces else slot.filled_by
        if name is None or name not in last.outputs or slot.growth not in ("grow", "static", "shared"):
            continue
        values = _in_order(slot, last.outputs[name].array(), walk.total)
        if values is not None and values.size and np.issubdtype(values.dtype, np.floating):
            label = f"{slot.layer}.{slot.part}"
            caches[label], spreads[label] = _sample(values), float(values.astype(np.float64).std())
    deviations = tuple(float(row[np.isfinite(row)].std()) for row in logits)
    fed, likely = (tuple(map(tuple, rows.tolist())) for rows in (tokens, top))
    return GoldenWalk(walk, fed, tuple(map(_sample, logits)), deviations, likely, caches, spreads)


def _sample(values: Array) -> tuple[float, ...]:
    """A sample in the precision of float32: more digits would be noise."""
    return tuple(float(f"{value:.8g}") for value in take_sample(values))


def _in_order(slot: Slot, values: Array, total: int) -> Array | None:
    """The entries of a walk's tokens, with the axes in the order above; None where a cache has others."""
    axes = ["past" if axis in ("capacity", "total") else axis for axis in slot.axes]
    if sorted(axes) != sorted(set(axes)) or not {*axes} <= {*ORDER} or values.ndim != len(axes) or "past" not in axes:
        return None
    at = axes.index("past")
    if values.shape[at] < total:
        return None
    kept = np.take(values, range(total), axis=at)
    return np.transpose(kept, [axes.index(axis) for axis in ORDER if axis in axes])


def find_difference(
    pairs: Sequence[tuple[GoldenWalk, GoldenWalk]], limits: tuple[float, float]
) -> GoldenDifference | None:
    """The first place where walks of now and then differ, each as (now, golden); the gravest kind of difference counts.

    `limits` are two numbers of standard deviations: logits beyond the larger one come before logits beyond the smaller,
    and caches count where all logits agree.
    """
    for passes in sorted(limits, reverse=True):
        found = next((one for pair in pairs if (one := _find_other_logits(*pair, passes)) is not None), None)
        if found is not None:
            return found
    return next((one for pair in pairs if (one := _find_other_cache(*pair, min(limits))) is not None), None)


def _find_other_logits(mine: GoldenWalk, golden: GoldenWalk, passes: float) -> GoldenDifference | None:
    """The first call whose logits are off; calls that end with the same token are compared."""
    for stop, here, there in _pair_calls(mine, golden):
        off = _measure(mine.logits[here], golden.logits[there], golden.deviations[there])
        if not off <= passes:
            tops = golden.top[there][0], mine.top[here][0]
            return GoldenDifference(golden.walk, stop, None, off, tops if tops[0] != tops[1] else None)
    return None


def _find_other_cache(mine: GoldenWalk, golden: GoldenWalk, passes: float) -> GoldenDifference | None:
    """The first cache that is off, of the same tokens."""
    for name in golden.caches if mine.walk.total == golden.walk.total else ():
        if name in mine.caches:
            off = _measure(mine.caches[name], golden.caches[name], golden.spreads[name])
            if not off <= passes:
                return GoldenDifference(golden.walk, golden.walk.total, name, off)
    return None


def count_calls(mine: GoldenWalk, golden: GoldenWalk) -> int:
    """The calls that are compared."""
    return len(list(_pair_calls(mine, golden)))


def measure_worst(mine: GoldenWalk, golden: GoldenWalk) -> float:
    """The largest difference of the logits, as a fraction of their standard deviation."""
    pairs = _pair_calls(mine, golden)
    return max(
        (_measure(mine.logits[here], golden.logits[at], golden.deviations[at]) for _, here, at in pairs),
        default=0.0,
    )


def correlate_samples(mine: GoldenWalk, golden: GoldenWalk) -> float:
    """The correlation of the samples of the logits, as a mean over the calls."""
    rows = [(mine.logits[here], golden.logits[there]) for _, here, there in _pair_calls(mine, golden)]
    return round(correlate(*(np.array(side) for side in zip(*rows, strict=True))), 4) if rows else 0.0


def _pair_calls(mine: GoldenWalk, golden: GoldenWalk) -> Iterator[tuple[int, int, int]]:
    """The calls of both that end with the same token: the end of the call, and its number in each."""
    ends = {stop: number for number, (_, stop) in enumerate(mine.walk.calls())}
    for number, (_, stop) in enumerate(golden.walk.calls()):
        if stop in ends:
            yield stop, ends[stop], number


def _measure(got: Sequence[float], want: Sequence[float], width: float) -> float:
    """The largest difference as a fraction of a deviation; infinite where only one of two is finite."""
    one, other = np.array(got), np.array(want)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    off = np.abs(np.where(same, 0.0, one - other))
    return float(f"{np.where(np.isfinite(off), off, np.inf).max(initial=0.0) / max(width, LEAST_DEVIATION):.3g}")


def check_recorded(one: GoldenWalk, vocabulary: int | None) -> None:
    """Check that a digest is that of a healthy model with that vocabulary; `record` writes no others.

    Logits of -inf pass: a model may hide tokens of its vocabulary so.

    Raises:
        ValueError: it has other sizes than its calls, a number is NaN, or a token is beyond the vocabulary.
    """
    walk, samples = one.walk, (*one.logits, *one.caches.values())
    sizes = (walk.batch, walk.prompt, *walk.pieces)
    if len(sizes) > MOST_SIZES or not all(0 < size <= MOST_TOKENS for size in sizes):
        raise ValueError("the sizes of a decoding are no counts")
    calls = {len(one.logits), len(one.deviations), len(one.top)} == {1 + len(walk.pieces)}
    widths = {*map(len, samples)} == {SAMPLED} and {*map(len, one.top)} == {TOP}
    fed = len(one.tokens) % walk.batch == 0 and {*map(len, one.tokens)} == {walk.total}
    if not (calls and widths and fed and one.caches.keys() == one.spreads.keys()):
        raise ValueError("a decoding has other sizes than its calls")
    if not all(math.isfinite(number) and number >= 0 for number in (*one.deviations, *one.spreads.values())):
        raise ValueError("its standard deviations are none")
    if any(math.isnan(number) for sample in samples for number in sample):
        raise ValueError("logits or caches are NaN, and a healthy model returns none")
    if not all(0 <= token < (vocabulary or MOST_VOCABULARY) for row in (*one.tokens, *one.top) for token in row):
        raise ValueError(f"a token is not one of its vocabulary of {vocabulary or 'an open size'}")


def checksum_draws(seed: int) -> int:
    """A checksum of what numpy draws with a seed: synthetic feeds are made of it, and another numpy may draw others."""
    random = np.random.default_rng(seed)
    drawn = random.integers(0, 1 << 16, 64, np.int64).tobytes() + random.standard_normal(64).astype("<f4").tobytes()
    return zlib.crc32(drawn)
