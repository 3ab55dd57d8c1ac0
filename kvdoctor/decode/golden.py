"""Golden numbers: a small digest of what a model returned, with which a later run of it is compared. numpy only.

A digest has samples of the logits of every call and of each layer's cache, and the tokens that were fed. Caches are
sampled in the order of axes [batch, kv_heads, tokens, head_dim], so that another layout of the file compares.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvdoctor.contract import Axis, CacheContract, Slot
from kvdoctor.decode.calls import Answer, Array, take_sample
from kvdoctor.decode.paired_walks import Walk
from kvdoctor.records import record

WALKS = (Walk(1, 8, (1,) * 24), Walk(1, 3, (2, 1, 3, 1)), Walk(2, 4, (1, 2, 1)))
"""A long decoding, chunks, and a batch: what a change of a runtime or of a graph tends to break."""
TOP = 5
ORDER: tuple[Axis, ...] = ("batch", "layers", "parts", "kv_heads", "past", "head_dim")
LEAST_DEVIATION = 1e-12


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

    `call` is the number of the call, `what` the logits or a cache (`the cache 0.key`), `relative` how far off it is as
    a fraction of the standard deviation, `tokens` the golden likeliest token and the one now, where these differ.
    """

    walk: Walk
    call: int
    what: str
    relative: float
    tokens: tuple[int, int] | None = None


def digest(walk: Walk, tokens: Array, logits: Array, last: Answer, contract: CacheContract) -> GoldenWalk:
    """The digest of a walk: `logits` float[calls, vocabulary], `last` what the last call returned."""
    samples = np.stack([take_sample(row) for row in logits]).astype(np.float32)
    top = np.argsort(-logits, axis=-1, kind="stable")[:, :TOP].astype(np.int32)
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
    return GoldenWalk(walk, tokens, samples, logits.std(-1).astype(np.float32), top, caches, spreads)


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


def find_difference(mine: GoldenWalk, golden: GoldenWalk, passes: float) -> GoldenDifference | None:
    """The first call whose logits are off by more than `passes` standard deviations, or else the first such cache."""
    for call in range(min(len(mine.logits), len(golden.logits))):
        off = _measure(mine.logits[call], golden.logits[call], float(golden.deviations[call]))
        if not off <= passes:
            tops = int(golden.top[call, 0]), int(mine.top[call, 0])
            return GoldenDifference(golden.walk, call, "the logits", off, tops if tops[0] != tops[1] else None)
    last = len(golden.logits) - 1
    for name in golden.caches:
        if name in mine.caches:
            off = _measure(mine.caches[name], golden.caches[name], golden.spreads[name])
            if not off <= passes:
                return GoldenDifference(golden.walk, last, f"the cache {name}", off)
    return None


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
        found[f"{number}:sizes"] = np.array([one.walk.batch, one.walk.prompt, *one.walk.pieces], np.int64)
        found |= {f"{number}:tokens": one.tokens, f"{number}:logits": one.logits, f"{number}:top": one.top}
        found[f"{number}:deviations"] = one.deviations
        found |= {f"{number}:cache:{name}": sample for name, sample in one.caches.items()}
        found[f"{number}:spreads"] = np.array([one.spreads[name] for name in one.caches], np.float64)
    return found


def from_arrays(arrays: Mapping[str, Array]) -> tuple[GoldenWalk, ...]:
    """The digests of a file.

    Raises:
        ValueError: an array is missing, or has another shape or type than it must have.
    """
    walks: list[GoldenWalk] = []
    while f"{len(walks)}:sizes" in arrays:
        number = len(walks)
        own: dict[str, Any] = {
            name.partition(":")[2]: values for name, values in arrays.items() if name.startswith(f"{number}:")
        }
        walks.append(_read_walk(own))
    if not walks:
        raise ValueError("there is no walk in it")
    return tuple(walks)


def _read_walk(own: Mapping[str, Array]) -> GoldenWalk:
    missing = [name for name in ("sizes", "tokens", "logits", "top", "deviations", "spreads") if name not in own]
    if missing:
        raise ValueError(f"{missing[0]} is missing")
    sizes = own["sizes"]
    if sizes.ndim != 1 or not 2 <= sizes.size <= 256 or sizes.dtype.kind != "i" or not (sizes >= 1).all():
        raise ValueError("the sizes of a walk are no counts")
    walk = Walk(int(sizes[0]), int(sizes[1]), tuple(map(int, sizes[2:])))
    calls, names = 1 + len(walk.pieces), [name.partition(":")[2] for name in own if name.startswith("cache:")]
    shapes = {"tokens": (walk.batch, walk.total), "logits": (calls, 64), "top": (calls, TOP), "deviations": (calls,)}
    for name, shape in {**shapes, "spreads": (len(names),), **{f"cache:{one}": (64,) for one in names}}.items():
        kinds = "i" if name in ("tokens", "top") else "f"
        if own[name].shape != shape or own[name].dtype.kind != kinds:
            raise ValueError(f"{name} is {own[name].dtype}{list(own[name].shape)}, not {list(shape)} numbers")
    caches = {name: own[f"cache:{name}"] for name in names}
    spreads = dict(zip(names, own["spreads"].tolist(), strict=True))
    return GoldenWalk(walk, own["tokens"], own["logits"], own["deviations"], own["top"], caches, spreads)
