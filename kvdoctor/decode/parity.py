"""How close two computations of the same logits are, and whether that is close enough. numpy only."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from kvdoctor.decode.runs import LogitsDifference
from kvdoctor.decode.search import Array
from kvdoctor.decode.tolerances import TOLERANCES, Tolerance

Verdict = Literal["pass", "ambiguous", "fail"]

SMALLEST = 1e-14
"""Below it, a divergence is nothing but the rounding of the sums that it is made of."""
LEAST_DEVIATION = 1e-12
DEEP = 20
"""Tokens are masked where they lie this many times as far below all others as those are wide."""
LEAST_DEPTH = 500
"""Masks are deeper, and logits of a model that is sure of a few tokens are not so far apart."""
FEWEST_UNMASKED = 4
"""With fewer tokens above them, chance puts some so far below."""
BLOCK = 1 << 16
"""Logits that are compared at a time: as many as the caches of a core hold."""

UNMEASURABLE = LogitsDifference(-1.0, -1.0, same_top1=0.0, near_ties=0.0, finite=False, kl=-1.0)
"""The difference of logits that are not finite, or have no finite distance."""


def compare(actual: Array, expected: Array, limit: Tolerance = TOLERANCES["float"]) -> LogitsDifference:
    """Compare logits, both float[batch, new, vocabulary], of an arithmetic with that tolerance.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"logits have shape {list(actual.shape)}, expected {list(expected.shape)}")
    got, want = (logits.reshape(-1, logits.shape[-1]) for logits in (actual, expected))
    block = max(BLOCK // want.shape[-1], 1)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        parts = [_measure_positions(got[i : i + block], want[i : i + block]) for i in range(0, len(want), block)]
    worst, deviations, divergences = np.concatenate(parts, axis=1)
    if not np.isfinite(worst).all():
        return _compare_not_finite(got, want, limit)
    if not worst.any():
        return LogitsDifference(max_abs=0.0, relative=0.0, same_top1=1.0, near_ties=0.0, finite=True)
    if _find_masked(want[:1]).any() and (masked := _find_masked(want) & _find_masked(got)).any():
        return _compare_unmasked(masked, got, want, limit)
    if not (np.isfinite(deviations).all() and np.isfinite(divergences).all()):
        return UNMEASURABLE  # finite, and too large for their squares
    most, width = float(worst.max()), max(float(deviations.mean()), LEAST_DEVIATION)
    same, near = _share_same_top1(got, want, limit.passes * width)
    divergence = float(divergences.max())
    return LogitsDifference(
        max_abs=_round(most),
        relative=_round(most / width),
        same_top1=_round(same),
        near_ties=_round(near),
        finite=True,
        kl=_round(divergence) if divergence >= SMALLEST else 0.0,
    )


def _compare_not_finite(got: Array, want: Array, limit: Tolerance) -> LogitsDifference:
    """Infinite or undefined logits have no distance; masked vocabulary entries (-inf on both sides) do."""
    masked = np.isneginf(got) & np.isneginf(want)
    if np.isfinite(got[~masked]).all() and np.isfinite(want[~masked]).all() and not masked.all(-1).any():
        return _compare_unmasked(masked, got, want, limit)
    return UNMEASURABLE


def _compare_unmasked(masked: Array, got: Array, want: Array, limit: Tolerance) -> LogitsDifference:
    """The difference of all tokens but those that are masked on both sides: they get the least of the other logits."""
    floor = float(want[~masked].min(initial=0.0))
    return compare(np.where(masked, floor, got), np.where(masked, floor, want), limit)


def _find_masked(logits: Array) -> Array:
    """Which tokens are masked with a finite number, as -1e4, -1e9 or the least of the type; bool[positions, tokens].

    Whether it replaced the logits or was added, and in up to two depths: masked tokens would widen the standard
    deviation and hide every difference.
    """
    masked = np.zeros(logits.shape, bool)
    # Between the highest and the lowest there must be more than a mask is deep: one look spares most models the rest.
    if (logits.max(-1).astype(np.float64) - logits.min(-1) <= LEAST_DEPTH).all():
        return masked
    for _ in range(2):
        open_logits = np.where(masked, np.nan, logits.astype(np.float64))
        top, low = np.nanmax(open_logits, axis=-1, keepdims=True), np.nanmin(open_logits, axis=-1, keepdims=True)
        above = open_logits >= top - (top - low) / (DEEP + 1)
        least = np.where(above, open_logits, np.inf).min(-1, keepdims=True)
        highest = np.where(above | masked, -np.inf, open_logits).max(-1, keepdims=True)
        deep = (least - highest > np.maximum(DEEP * (top - least), LEAST_DEPTH)) & (
            above.sum(-1, keepdims=True) >= FEWEST_UNMASKED
        )
        masked |= deep & (open_logits <= highest)
    return masked


def measurable(logits: Array) -> bool:
    """Whether logits, float[..., vocabulary], can be compared: no NaN, no inf, and not all tokens are -inf."""
    if not logits.shape[-1]:
        return 0 in logits.shape[:-1]
    with np.errstate(invalid="ignore"):
        # The largest tells both in one pass: it is NaN where any is, and -inf where all are.
        return bool(np.isfinite(logits.max(-1)).all())


def divergences(got: Array, expected: Array) -> Array | None:
    """The Kullback-Leibler divergence of each position, float64[positions] in nats, of logits [positions, vocabulary].

    Tokens that both mask do not count. None where logits are not finite.
    """
    masked = np.isneginf(got) & np.isneginf(expected)
    if not (np.isfinite(got[~masked]).all() and np.isfinite(expected[~masked]).all()):
        return None
    if masked.any():
        # Two tokens of weight 0 add nothing, whatever their logits are.
        floor = float(expected[~masked].min()) - LEAST_DEPTH
        got, expected = np.where(masked, floor, got), np.where(masked, floor, expected)
    found: Array = np.maximum(_measure_positions(got, expected)[2], 0)
    return found


def correlate(got: Array, expected: Array) -> float:
    """The correlation over the vocabulary of logits [positions, vocabulary], as a mean over the positions.

    Tokens that both mask do not count. 0 where others are not finite.
    """
    masked = np.isneginf(got) & np.isneginf(expected)
    if not (np.isfinite(got[~masked]).all() and np.isfinite(expected[~masked]).all()):
        return 0.0
    one, other = (np.ma.masked_array(logits.astype(np.float64), masked) for logits in (got, expected))
    one, other = one - one.mean(-1, keepdims=True), other - other.mean(-1, keepdims=True)
    found = (one * other).sum(-1) / np.sqrt((one**2).sum(-1) * (other**2).sum(-1))
    return float(np.ma.filled(found, 0.0).mean())


def _measure_positions(got: Array, expected: Array) -> Array:
    """By position: largest difference, standard deviation, divergence; float64[3, positions].

    Vocabularies are wide, so everything is got in few passes. Where the difference is not finite, nothing is.
    """
    count = expected.shape[-1]
    one = list(_pieces(got, expected)) if count <= BLOCK else None
    pieces = one or _pieces(got, expected)
    found = np.array([[w.max(-1), gap.max(-1), -gap.min(-1), w.sum(-1), _dot(w, w)] for w, gap in pieces])
    (top, most, deepest), (total, squares) = found[:, :3].max(0), found[:, 3:].sum(0)
    worst, mean = np.maximum(most, deepest), total / count
    deviation = np.sqrt(np.maximum(squares / count - mean * mean, 0))
    if not worst.any():
        return np.stack([worst, deviation, np.zeros_like(worst)])
    sums = [_sum_piece(want, gap, top, most) for want, gap in one or _pieces(got, expected)]
    weights, weighted, likely = np.sum(sums, axis=0)
    return np.stack([worst, deviation, np.log(likely / weights) + (most - weighted / weights)])


def _pieces(got: Array, expected: Array) -> Iterator[tuple[Array, Array]]:
    """The expected logits and the differences to them, as many tokens at a time as the caches of a core hold."""
    for begin in range(0, expected.shape[-1], BLOCK):
        want = expected[:, begin : begin + BLOCK].astype(np.float64)
        yield want, got[:, begin : begin + BLOCK] - want


def _sum_piece(want: Array, gap: Array, top: Array, most: Array) -> list[Array]:
    """What is summed over the tokens once the largest logit and the largest difference are known; overwrites both."""
    np.exp(np.subtract(want, top[:, None], out=want), out=want)
    sums = [_dot(want, np.ones_like(want)), _dot(want, gap)]
    np.exp(np.subtract(gap, most[:, None], out=gap), out=gap)
    return [*sums, _dot(want, gap)]


def _dot(one: Array, other: Array) -> Array:
    """The product of rows with rows, without what a product of matrices makes of two cores."""
    rows: Array = np.einsum("nv,nv->n", one, other)
    return rows


def _share_same_top1(got: Array, want: Array, noise: float) -> tuple[float, float]:
    """Share of the positions with the same likeliest token, and of those where another is as likely but for noise."""
    top_got, top_want, rows = got.argmax(-1), want.argmax(-1), np.arange(len(want))
    differ = top_got != top_want
    near = differ & (want[rows, top_want].astype(np.float64) - want[rows, top_got] <= noise)
    return float(1 - differ.mean()), float(near.mean())


def slot_difference(actual: Array, expected: Array) -> float | None:
    """The largest difference of two tensors of a cache, as a fraction of the standard deviation of the expected one.

    None where their shapes differ, or where one is not finite: that says nothing of how close they are.
    """
    if actual.shape != expected.shape or not actual.size:
        return None
    got, want = actual.astype(np.float64), expected.astype(np.float64)
    worst = float(np.abs(got - want).max())
    return _round(worst / max(float(want.std()), LEAST_DEVIATION)) if np.isfinite(worst) else None


def describe_gap(difference: LogitsDifference) -> str:
    """How far logits are apart, for a message."""
    return f"off by {difference.relative:.1e} standard deviations" if difference.finite else "not finite"


def judge(difference: LogitsDifference, limit: Tolerance, noise: float = 0.0) -> Verdict:
    """Say whether a difference is noise, too much, or between.

    `noise` is the largest difference that the model shows without any fault, as a fraction of the standard deviation:
    differences within it pass, and a fault must exceed it clearly.
    """
    if not difference.finite or difference.relative > max(limit.fails, 4 * noise):
        return "fail"
    return "pass" if difference.relative <= max(limit.passes, 1.5 * noise) else "ambiguous"


def _round(value: float) -> float:
    """Keep three significant digits: more would be noise, and would make equal runs differ in print."""
    return float(f"{value:.3g}")
