"""How far logits may lie apart and still be the same, by the arithmetic that made them; standard library only.

The table is kvdoctor's own. A policy may loosen or tighten an entry within bounds, for as long as one model is judged:
here, and in the worker, which is sent what holds with each job.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest differences, as a fraction of the logits' spread, that pass and that are not yet a failure."""

    passes: float
    fails: float
    reason: str


TOLERANCES = {
    "float": Tolerance(
        2e-4,
        6e-4,
        "float32: right splits differ by 1e-6 of the spread, the smallest known mistake by 6e-4; weights stored in 8 "
        "or 4 bits change nothing of that, they are the same in every call",
    ),
    "float16": Tolerance(2e-2, 6e-2, "float16 keeps 11 bits: rounding adds up to about 1e-2 of the spread"),
    "bfloat16": Tolerance(1.5e-1, 4e-1, "bfloat16 keeps 8 bits: rounding adds up to about 1e-1 of the spread"),
    "static-quantisation": Tolerance(
        3e-2,
        1e-1,
        "every activation, or entry of an 8-bit cache, is rounded by itself: right splits are equal, until the last "
        "bit of a float32 tips one rounding, which moved logits by up to 2.4e-2 of the spread in one of 200 steps",
    ),
    "dynamic-quantisation": Tolerance(
        1e-1, 3e-1, "activation scales depend on the whole tensor, so right splits differ by up to 5e-2 of the spread"
    ),
}
"""By the exactness of the contract. The figures come from step-by-step runs of sixteen healthy decoders and of
the mistakes that a loop or an exporter makes on them; those of static quantisation from 25 seeds on each of eleven
decoders with QDQ, QOperator and 4- and 8-bit weights (MatMulNBits), and with caches of 8 and 4 bits."""

MOST_TIGHT, MOST_LOOSE = 100, 10
MOST_FAILS = 1.0
"""Logits that lie apart by their whole spread have nothing to do with each other, whatever rounds them."""

_asked: ContextVar[Mapping[str, float]] = ContextVar("asked", default={})  # noqa: B039 - never changed in place


def bounds(exactness: str) -> tuple[float, float]:
    """The smallest and the largest share of the spread that may be asked to pass.

    A hundredth and ten times of the table's; what is not yet a failure goes with it, and never beyond the spread.
    """
    own = TOLERANCES[exactness]
    most = min(MOST_LOOSE * own.passes, MOST_FAILS * own.passes / own.fails)
    return own.passes / MOST_TIGHT, math.floor(most * 1000 + 1e-6) / 1000


def why_not(exactness: str, passes: object) -> str | None:
    """The reason why a share of the spread may not be asked for; None where it may."""
    if exactness not in TOLERANCES:
        return f"it takes {', '.join(TOLERANCES)}; got {exactness!r}"
    least, most = bounds(exactness)
    if type(passes) not in (int, float) or not least <= passes <= most:  # type: ignore[operator]
        return f"{exactness} takes a share of the logits' spread from {least:g} to {most:g}; got {passes!r}"
    return None


def scaled(exactness: str, passes: float) -> Tolerance:
    """The table's entry with another share that passes; what is not yet a failure keeps its distance."""
    own = TOLERANCES[exactness]
    return replace(own, passes=passes, fails=float(f"{passes * own.fails / own.passes:.6g}"))


def tolerance(exactness: str) -> Tolerance:
    """What holds for an arithmetic, for the model that is judged now."""
    return tolerance_under(_asked.get(), exactness)


def tolerance_under(asked: Mapping[str, float], exactness: str) -> Tolerance:
    """What holds for an arithmetic where these shares were asked to pass."""
    passes = asked.get(exactness)
    return TOLERANCES[exactness] if passes is None else scaled(exactness, passes)


def asked() -> dict[str, float]:
    """What was asked to pass in the place of the table's, by arithmetic; for a worker to be told."""
    return dict(_asked.get())


@contextmanager
def tolerating(passes: Mapping[str, float]) -> Iterator[None]:
    """Let other shares of the spread pass for as long as the block lasts; in this thread alone."""
    before = _asked.set(dict(passes))
    try:
        yield
    finally:
        _asked.reset(before)


def told(passes: Mapping[str, float]) -> Iterator[str]:
    """A line for each loosened tolerance: a reader of a green report must know of it."""
    for exactness, share in sorted(passes.items()):
        own = TOLERANCES[exactness].passes
        if share > own:
            yield (
                f"the policy loosens the tolerance of {exactness}: logits within {share:g} of their spread pass, "
                f"where kvdoctor's own limit is {own:g}"
            )
