"""How close two computations of the same logits are, and whether that is close enough. numpy only."""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from kvdoctor.trace import Difference

Verdict = Literal["pass", "ambiguous", "fail"]


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest differences, as a fraction of the logits' spread, that pass and that are not yet a failure."""

    passes: float
    fails: float
    reason: str


TOLERANCES = {
    "float": Tolerance(
        2e-4, 6e-4, "float32: right splits differ by 1e-6 of the spread, the smallest known mistake by 6e-4"
    ),
    "float16": Tolerance(2e-2, 6e-2, "float16 keeps 11 bits: rounding adds up to about 1e-2 of the spread"),
    "bfloat16": Tolerance(1.5e-1, 4e-1, "bfloat16 keeps 8 bits: rounding adds up to about 1e-1 of the spread"),
    "dynamic-quantisation": Tolerance(
        1e-1, 3e-1, "activation scales depend on the whole tensor, so right splits differ by up to 5e-2 of the spread"
    ),
}
"""By the exactness of the contract. The figures come from step-by-step runs of sixteen healthy decoders and of
the mistakes that a loop or an exporter makes on them."""


def compare(actual: "np.ndarray[Any, Any]", expected: "np.ndarray[Any, Any]", exactness: str = "float") -> Difference:
    """Compare logits, both float[batch, new, vocabulary], computed in the arithmetic that `exactness` names.

    Raises:
        ValueError: the shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"logits have shape {list(actual.shape)}, expected {list(expected.shape)}")
    got, want = actual.astype(np.float64), expected.astype(np.float64)
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        return _not_finite(got, want, exactness)
    worst, width = float(np.abs(got - want).max(initial=0.0)), spread(want)
    top_got, top_want = got.argmax(-1), want.argmax(-1)
    differ = top_got != top_want
    lead = np.take_along_axis(want, top_want[..., None], -1) - np.take_along_axis(want, top_got[..., None], -1)
    near = differ & (lead[..., 0] <= TOLERANCES[exactness].passes * width)
    return Difference(
        max_abs=_rounded(worst),
        relative=_rounded(worst / width),
        same_top1=_rounded(float(1 - differ.mean())),
        near_ties=_rounded(float(near.mean())),
        finite=True,
    )


def _not_finite(got: "np.ndarray[Any, Any]", want: "np.ndarray[Any, Any]", exactness: str) -> Difference:
    """Infinite or undefined logits have no distance; masked vocabulary entries (-inf on both sides) do."""
    masked = np.isneginf(got) & np.isneginf(want)
    if np.isfinite(got[~masked]).all() and np.isfinite(want[~masked]).all() and not masked.all(-1).any():
        floor = float(want[~masked].min(initial=0.0))
        return compare(np.where(masked, floor, got), np.where(masked, floor, want), exactness)
    return Difference(max_abs=-1.0, relative=-1.0, same_top1=0.0, near_ties=0.0, finite=False)


def spread(logits: "np.ndarray[Any, Any]") -> float:
    """Standard deviation of logits over the vocabulary, as a mean over positions; never zero."""
    return max(float(np.mean(np.std(logits, axis=-1))), 1e-12)


def judge(difference: Difference, exactness: str, noise: float = 0.0) -> Verdict:
    """Say whether a difference is noise, too much, or between, for the arithmetic named by `exactness`.

    `noise` is what the model at hand was seen to differ by without any fault, as a fraction of the spread: what stays
    within it passes, and a fault must stand well out of it.
    """
    tolerance = TOLERANCES[exactness]
    if not difference.finite or difference.relative > max(tolerance.fails, 4 * noise):
        return "fail"
    return "pass" if difference.relative <= max(tolerance.passes, 1.5 * noise) else "ambiguous"


def _rounded(value: float) -> float:
    """Keep three significant digits: more would be noise, and would make equal runs differ in print."""
    return float(f"{value:.3g}")
