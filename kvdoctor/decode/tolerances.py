"""How far logits may lie apart and still be the same, by the arithmetic that made them; standard library only.

The table is kvdoctor's own. A policy may loosen or tighten an entry within bounds (the option `tolerances`): whoever
compares logits is given the tolerance that holds, and the worker receives the requested shares with each job.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from kvdoctor.records import record


@record
class Tolerance:
    """Largest differences that pass and that are not yet a failure, in standard deviations of the logits."""

    passes: float
    fails: float
    reason: str


TOLERANCES = {
    "float": Tolerance(
        2e-4,
        6e-4,
        "float32: right splits differ by 1e-6 standard deviations, the smallest known mistake by 6e-4; weights stored "
        "in 8 or 4 bits change nothing of that, they are the same in every call",
    ),
    "float16": Tolerance(2e-2, 6e-2, "float16 keeps 11 bits: rounding adds up to about 1e-2 standard deviations"),
    "bfloat16": Tolerance(1.5e-1, 4e-1, "bfloat16 keeps 8 bits: rounding adds up to about 1e-1 standard deviations"),
    "static-quantization": Tolerance(
        3e-2,
        1e-1,
        "every activation, or entry of an 8-bit cache, is rounded by itself: right splits are equal, until the last "
        "bit of a float32 tips one rounding, which moved logits by up to 2.4e-2 standard deviations in one of 200 "
        "steps",
    ),
    "int4-cache": Tolerance(
        2e-1,
        6e-1,
        "every row of the cache is rounded by itself, to 15 levels: right splits are equal, until the last bit of a "
        "float32 tips one rounding, which moved logits by up to 1.1e-1 standard deviations",
    ),
    "dynamic-quantization": Tolerance(
        1e-1,
        3e-1,
        "activation scales depend on the whole tensor, so right splits differ by up to 5e-2 standard deviations",
    ),
}
"""By the exactness of the contract. The figures come from step-by-step runs of sixteen healthy decoders and of
the mistakes that a loop or an exporter makes on them; those of static quantization from 25 seeds on each of eleven
decoders with QDQ, QOperator and 4- and 8-bit weights (MatMulNBits), and with caches of 8 and 4 bits."""

ALIKE, UNLIKE = 0.8, 0.5
"""Bounds of the correlation over the vocabulary by which logits of rounded weights are judged.

The worst of 15 tiny models rounded to 8 and 4 bits had 0.91 as a mean over the steps, and two different models have
none. A single logit may be off by more than a standard deviation of the logits.
"""

MOST_TIGHT, MOST_LOOSE = 100, 10
MOST_FAILS = 1.0
"""Logits that differ by a standard deviation are unrelated, whatever rounds them."""

MOST_BY_ROUNDING = max(tolerance.fails for tolerance in TOLERANCES.values())
"""The loosest limit of the table, in standard deviations: beyond it a difference is a fault in every arithmetic."""
MOST_OF_CONTROL = 0.5
"""The share of the effect of a corrupted cache that a rounded one may have. Above it the two cannot be distinguished:
for dynamic quantization, too, a difference of half that effect is a fault."""


def bounds(exactness: str) -> tuple[float, float]:
    """The smallest and the largest fraction of the standard deviation that may be requested to pass.

    A hundredth and ten times of the table's. The limit of a failure scales with it, up to one standard deviation.
    """
    own = TOLERANCES[exactness]
    most = min(MOST_LOOSE * own.passes, MOST_FAILS * own.passes / own.fails)
    return own.passes / MOST_TIGHT, math.floor(most * 1000 + 1e-6) / 1000


def why_not(exactness: str, passes: object) -> str | None:
    """The reason why a fraction of the standard deviation may not be requested; None where it may."""
    if exactness not in TOLERANCES:
        return f"it takes {', '.join(TOLERANCES)}; got {exactness!r}"
    least, most = bounds(exactness)
    if type(passes) not in (int, float) or not least <= passes <= most:  # type: ignore[operator]
        return (
            f"{exactness} takes a fraction of the logits' standard deviation from {least:g} to {most:g}; got {passes!r}"
        )
    return None


def find_tolerance(exactness: str, requested: Mapping[str, float]) -> Tolerance:
    """The tolerance of an arithmetic; `requested` replaces the table's shares that pass, and scales the others."""
    own, passes = TOLERANCES[exactness], requested.get(exactness)
    scaled = None if passes is None else float(f"{passes * own.fails / own.passes:.6g}")
    return own if passes is None or scaled is None else replace(own, passes=passes, fails=scaled)


def list_loosened(passes: Mapping[str, float]) -> Iterator[str]:
    """A line for each loosened tolerance: a reader of a green report must know of it."""
    for exactness, share in sorted(passes.items()):
        own = TOLERANCES[exactness].passes
        if share > own:
            yield (
                f"the policy loosens the tolerance of {exactness}: logits within {share:g} standard deviations pass, "
                f"where kvdoctor's own limit is {own:g}"
            )
