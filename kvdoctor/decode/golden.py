"""Golden numbers: a small digest of what a model returned, with which a later run of it is compared. numpy only.

A digest has samples of the logits of every call and of each layer's cache, and the tokens that were fed. Caches are
sampled in the order of axes [batch, kv_heads, tokens, head_dim], so that another layout of the file compares.
"""

import io
import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvdoctor.contract import Axis, CacheContract, Slot
from kvdoctor.decode.calls import Answer, Array, take_sample
from kvdoctor.decode.paired_walks import Walk
from kvdoctor.decode.samples import read_npz
from kvdoctor.records import record

WALKS = (Walk(1, 8, (1,) * 24), Walk(1, 3, (2, 1, 3, 1)), Walk(2, 4, (1, 1, 1)))
"""A long decoding, chunks, and a batch: what a change of a runtime or of a graph tends to break. The first must run."""
TOP = 5
ORDER: tuple[Axis, ...] = ("batch", "layers", "parts", "kv_heads", "past", "head_dim")
LEAST_DEVIATION = 1e-12
SAMPLED, MOST_BYTES = 64, 64 << 20
"""Values of a sample (`calls.take_sample`); unpacked bytes of a file: a model of 500 layers needs a fiftieth."""


@record(slots=False)
class GoldenWalk:
    """The digest of one walk.

    Attributes:
        walk: The calls.
        tokens: int64[batch, total]: what was fed.
        logits: float32[calls, 64]: a sample of the last logits of each call.
        deviations: float32[calls]: their standard deviations.
        top: int32[calls, 5]: the likeliest tokens, the likeliest first.
        caches: By layer and part (`0.key`), float32[64]: a sample of the cache after the last call.
        spreads: By the same name, its standard deviation.
    """

    walk: Walk
    tokens: Array
    logits: Array
    deviations: Array
    top: Array
    caches: Mapping[str, Array]
    spreads: Mapping[str, float]


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
    samples = np.stack([take_sample(row) for row in logits]).astype(np.float32)
    # The head may be padded to more rows than there are tokens.
    top = np.argsort(-logits[:, : contract.vocabulary], axis=-1, kind="stable")[:, :TOP].astype(np.int32)
    top = np.pad(top, ((0, 0), (0, TOP - top.shape[1])), mode="edge")  # of a vocabulary of fewer tokens
    caches, spreads = {}, {}
    for slot in contract.of_kind("self-attention"):
        name = slot.present if walk.pieces else slot.filled_by
        if name is None or name not in last.outputs or slot.growth not in ("grow", "static", "shared"):
            continue
        values = _in_order(slot, last.outputs[name].array(), walk.total)
        if values is not None and values.size and np.issubdtype(values.dtype, np.floating):
            label = f"{slot.layer}.{slot.part}"
            caches[label] = take_sample(values).astype(np.float32)
            spreads[label] = float(values.astype(np.float64).std())
    deviations = [float(row[np.isfinite(row)].std()) for row in logits]
    return GoldenWalk(walk, tokens, samples, np.array(deviations, np.float32), top, caches, spreads)


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
        off = _measure(mine.logits[here], golden.logits[there], float(golden.deviations[there]))
        if not off <= passes:
            tops = int(golden.top[there, 0]), int(mine.top[here, 0])
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
        (_measure(mine.logits[here], golden.logits[at], float(golden.deviations[at])) for _, here, at in pairs),
        default=0.0,
    )


def correlate(mine: GoldenWalk, golden: GoldenWalk) -> float:
    """The correlation of the samples of the logits, as a mean over the calls; 0 where others are infinite, or NaN.

    Tokens that both rule out (-inf) are left out.
    """
    found = []
    for _, here, there in _pair_calls(mine, golden):
        one, other = (values.astype(np.float64) for values in (mine.logits[here], golden.logits[there]))
        if not np.array_equal(np.isneginf(one), np.isneginf(other)):
            return 0.0
        one, other = one[~np.isneginf(one)], other[~np.isneginf(other)]
        one, other = one - one.mean(), other - other.mean()
        with np.errstate(all="ignore"):
            found.append(float((one * other).sum() / np.sqrt((one**2).sum() * (other**2).sum())))
    mean = sum(found) / max(len(found), 1)
    return round(mean, 4) if np.isfinite(mean) else 0.0


def _pair_calls(mine: GoldenWalk, golden: GoldenWalk) -> Iterator[tuple[int, int, int]]:
    """The calls of both that end with the same token: the end of the call, and its number in each."""
    ends = {stop: number for number, (_, stop) in enumerate(mine.walk.calls())}
    for number, (_, stop) in enumerate(golden.walk.calls()):
        if stop in ends:
            yield stop, ends[stop], number


def _measure(got: Array, want: Array, width: float) -> float:
    """The largest difference as a fraction of a deviation; infinite where only one of two is finite."""
    one, other = got.astype(np.float64), want.astype(np.float64)
    same = (one == other) | (np.isnan(one) & np.isnan(other))
    off = np.abs(np.where(same, 0.0, one - other))
    return float(f"{np.where(np.isfinite(off), off, np.inf).max(initial=0.0) / max(width, LEAST_DEVIATION):.3g}")


def to_arrays(walks: tuple[GoldenWalk, ...]) -> dict[str, Array]:
    """The digests as the arrays of a file: `WALK:FIELD`."""
    found: dict[str, Array] = {}
    for number, one in enumerate(walks):
        names = tuple(one.caches)
        fields = {
            "sizes": np.array([one.walk.batch, one.walk.prompt, *one.walk.pieces], np.int64),
            "tokens": one.tokens,
            "logits": one.logits,
            "top": one.top,
            "deviations": one.deviations,
            "names": to_text(list(names)),
            "caches": np.stack([one.caches[name] for name in names]) if names else np.zeros((0, SAMPLED), np.float32),
            "spreads": np.array([one.spreads[name] for name in names], np.float64),
        }
        found |= {f"{number}:{field}": values for field, values in fields.items()}
    return found


def from_arrays(arrays: Mapping[str, Array]) -> tuple[GoldenWalk, ...]:
    """The digests of a file.

    Raises:
        ValueError: an array is missing, or has another shape or type than it must have.
    """
    walks: list[GoldenWalk] = []
    while f"{len(walks)}:sizes" in arrays:
        number = f"{len(walks)}:"
        own = {name.removeprefix(number): values for name, values in arrays.items() if name.startswith(number)}
        walks.append(_read_walk(own))
    if not walks:
        raise ValueError("there is no decoding in it")
    return tuple(walks)


def _read_walk(own: Mapping[str, Array]) -> GoldenWalk:
    names = ("sizes", "tokens", "logits", "top", "deviations", "names", "caches", "spreads")
    if missing := [name for name in names if name not in own]:
        raise ValueError(f"{missing[0]} is missing")
    sizes = own["sizes"]
    if sizes.ndim != 1 or not 2 <= sizes.size <= 256 or sizes.dtype.kind != "i" or not (sizes >= 1).all():
        raise ValueError("the sizes of a decoding are no counts")
    if int(sizes.max()) > 4096:
        raise ValueError("the sizes of a decoding are too large")
    walk = Walk(int(sizes[0]), int(sizes[1]), tuple(map(int, sizes[2:])))
    calls, caches = 1 + len(walk.pieces), from_text(own["names"])
    if not isinstance(caches, list) or not all(isinstance(name, str) for name in caches):
        raise ValueError("the names of the caches are no texts")
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "logits": ((calls, SAMPLED), "f"),
        "top": ((calls, TOP), "i"),
        "deviations": ((calls,), "f"),
        "caches": ((len(caches), SAMPLED), "f"),
        "spreads": ((len(caches),), "f"),
    }
    tokens = own["tokens"]  # several rows for each sequence where the tokens have codebooks
    if tokens.ndim != 2 or tokens.shape[0] % walk.batch or tokens.shape[1] != walk.total or tokens.dtype.kind != "i":
        raise ValueError(f"tokens is {tokens.dtype}{list(tokens.shape)}, not [{walk.batch}, {walk.total}] numbers")
    for name, (shape, kind) in shapes.items():
        if own[name].shape != shape or own[name].dtype.kind != kind:
            raise ValueError(f"{name} is {own[name].dtype}{list(own[name].shape)}, not {list(shape)} numbers")
    _check_numbers(own)
    samples = dict(zip(caches, own["caches"], strict=True))
    spreads = dict(zip(caches, own["spreads"].tolist(), strict=True))
    return GoldenWalk(walk, own["tokens"], own["logits"], own["deviations"], own["top"], samples, spreads)


def _check_numbers(own: Mapping[str, Array]) -> None:
    for name in ("deviations", "spreads"):
        if not (np.isfinite(own[name]) & (own[name] >= 0)).all():
            raise ValueError(f"{name} are no standard deviations")
    if (own["tokens"] < 0).any():
        raise ValueError("the tokens are no ids")


def check_recorded(walks: tuple[GoldenWalk, ...], vocabulary: int | None) -> None:
    """Check that digests are those of a healthy model with that vocabulary; `record` writes no others.

    Logits of -inf pass: a model may hide tokens of its vocabulary so.

    Raises:
        ValueError: a number is NaN, or a token is beyond the vocabulary.
    """
    for walk in walks:
        if np.isnan(walk.logits).any() or any(np.isnan(values).any() for values in walk.caches.values()):
            raise ValueError("logits or caches are NaN, and a healthy model returns none")
        if (walk.top < 0).any():
            raise ValueError("the likeliest tokens are no ids")
        if vocabulary is not None and ((walk.tokens >= vocabulary).any() or (walk.top >= vocabulary).any()):
            raise ValueError(f"a token is beyond its vocabulary of {vocabulary}")


def checksum_draws(seed: int) -> int:
    """A checksum of what numpy draws with a seed: synthetic feeds are made of it, and another numpy may draw others."""
    random = np.random.default_rng(seed)
    drawn = random.integers(0, 1 << 16, 64, np.int64).tobytes() + random.standard_normal(64).astype("<f4").tobytes()
    return zlib.crc32(drawn)


def to_text(value: object) -> Array:
    """A JSON value as an array of bytes, uint8[length]."""
    return np.frombuffer(json.dumps(value).encode("utf-8"), np.uint8)


def from_text(values: Array) -> Any:
    """The JSON value of such an array.

    Raises:
        ValueError: it holds none.
    """
    if values.dtype != np.uint8 or values.ndim != 1:
        raise ValueError("a text is no array of bytes")
    try:
        return json.loads(values.tobytes())
    except RecursionError:
        raise ValueError("a text is nested too deeply") from None


def pack(arrays: Mapping[str, Array]) -> bytes:
    """The content of an `.npz`. The same arrays make the same bytes: numpy would put the time into it."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, values in arrays.items():
            one = io.BytesIO()
            np.lib.format.write_array(one, np.ascontiguousarray(values), allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy")
            file.writestr(entry, one.getvalue(), zipfile.ZIP_DEFLATED)
    return content.getvalue()


def unpack(file: Path) -> dict[str, Array]:
    """The arrays of an `.npz`.

    Raises:
        ValueError: it is no such file, a damaged one, or too large.
    """
    return read_npz(file, MOST_BYTES)
