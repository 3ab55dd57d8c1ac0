"""How fast a model decodes at some lengths of the past, and when it got slower. Standard library only.

A figure is the median of several rounds, and its spread is that of the rounds: on a machine that does other things, a
difference within the spread means nothing, and rounds that vary too much decide nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

from kvdoctor.records import record

PASTS = (16, 128, 1024)
"""Lengths of the past, in tokens; the longest that fits comes after them."""
ROUNDS = 5
LEAST_TOLERANCE, MOST_TOLERANCE = 0.1, 0.5
"""The share of time by which a figure may always be slower; rounds that ask for more than the second decide nothing."""
MEMORY_SHARE, MEMORY_BYTES = 0.1, 16 << 20
"""Resident memory may be larger by a tenth and 16 MiB: allocators round up."""
LEAST_STEPS, LEAK_BYTES = 100, 8 << 20
"""Steps after the first ones that must have been run to tell a leak; memory that equal steps take for good."""

What = Literal["time to the first token", "time of a step", "peak memory", "cache written per step"]


@record
class SpeedPoint:
    """What was measured at one length of the past.

    Attributes:
        past: Tokens in the cache.
        first: Seconds to the logits after a prompt of `past` tokens, one for each round; the encoder is not counted.
        step: Seconds of a step of one token on that past, the median of each round.
        peak_bytes: The most resident memory that the process had until then.
        written: Bytes of cache that a step returns.
    """

    past: int
    first: tuple[float, ...]
    step: tuple[float, ...]
    peak_bytes: int
    written: int


@record
class SpeedDifference:
    """A figure that is worse than before, or that could not be judged.

    `before` and `now` are seconds or bytes, `tolerance` the share by which it may be larger.
    """

    past: int
    what: What
    before: float
    now: float
    tolerance: float
    noisy: bool = False


def middle(rounds: Sequence[float]) -> float:
    """The median: the figure of some rounds."""
    ordered = sorted(rounds)  # the module statistics takes longer to import than a step takes
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


def spread(rounds: tuple[float, ...]) -> float:
    """The range of the rounds, as a share of the figure; the fastest and the slowest of four or more are left out.

    One round of five in which the machine did something else must not hide what the others say.
    """
    kept = sorted(rounds)[1:-1] if len(rounds) > 3 else rounds
    return (max(kept) - min(kept)) / max(middle(rounds), 1e-9)


def find_worse(now: tuple[SpeedPoint, ...], before: tuple[SpeedPoint, ...]) -> Iterator[SpeedDifference]:
    """The figures that are worse than before, and those that are too noisy, at the lengths that both have."""
    known = {point.past: point for point in before}
    for point in now:
        if (old := known.get(point.past)) is not None:
            yield from _compare_times(point.past, "time to the first token", point.first, old.first)
            yield from _compare_times(point.past, "time of a step", point.step, old.step)
            if point.peak_bytes > old.peak_bytes * (1 + MEMORY_SHARE) + MEMORY_BYTES:
                yield SpeedDifference(point.past, "peak memory", old.peak_bytes, point.peak_bytes, MEMORY_SHARE)
            if point.written > old.written:
                yield SpeedDifference(point.past, "cache written per step", old.written, point.written, 0.0)


def _compare_times(
    past: int, what: What, now: tuple[float, ...], before: tuple[float, ...]
) -> Iterator[SpeedDifference]:
    tolerance = max(LEAST_TOLERANCE, spread(now) + spread(before))
    noisy = tolerance > MOST_TOLERANCE
    if noisy or middle(now) > middle(before) * (1 + tolerance):
        yield SpeedDifference(past, what, middle(before), middle(now), tolerance, noisy)
