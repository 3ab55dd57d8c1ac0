"""Which cases every run of the tests sees, and which are left to the slow ones."""

from collections.abc import Iterable
from typing import Any

import pytest

EXHAUSTIVE = pytest.mark.exhaustive
FEW = 10


def _values(case: Any) -> tuple[Any, ...]:
    return case if isinstance(case, tuple) else (case,)


def sampled(cases: Iterable[Any], every: int, rest: pytest.MarkDecorator = pytest.mark.slow) -> list[Any]:
    """One case in `every` for all runs, the first one among them; a tuple holds the values of several parameters.

    `rest` marks the others. Of slow ones beyond a few, those at odd places and every third are left to all tests.
    """
    known = list(cases)
    seldom = len(known) > FEW and rest == pytest.mark.slow
    return [
        case
        if not index % every
        else pytest.param(*_values(case), marks=[rest, EXHAUSTIVE] if seldom and (index % 2 or not index % 3) else rest)
        for index, case in enumerate(known)
    ]


def thinned(cases: Iterable[Any], quick: int, slow: int) -> list[Any]:
    """One case in `quick` for all runs, one in `slow` for slow ones, and the others for all tests."""
    return [
        pytest.param(
            *_values(case),
            marks=() if not n % quick else pytest.mark.slow if not n % slow else [pytest.mark.slow, EXHAUSTIVE],
        )
        for n, case in enumerate(cases)
    ]


def spread(rows: Iterable[Any], columns: Iterable[Any], every: int) -> list[Any]:
    """All pairs; one in `every` for slow runs, so that each row and each column has some, the others for all tests."""
    known = list(columns)
    return [
        pytest.param(row, column, marks=() if not (i + j) % every else pytest.mark.exhaustive)
        for i, row in enumerate(rows)
        for j, column in enumerate(known)
    ]


def first(cases: Iterable[Any], count: int) -> list[Any]:
    """The first cases for slow runs, the others for all tests; a tuple holds the values of several parameters."""
    return [
        case if index < count else pytest.param(*_values(case), marks=pytest.mark.exhaustive)
        for index, case in enumerate(cases)
    ]
