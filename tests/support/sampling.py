"""Which cases every run of the tests sees, and which are left to the slow ones."""

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(cases: Iterable[Any], every: int) -> list[Any]:
    """One case in `every` for all runs, the first one among them; a tuple holds the values of several parameters."""
    return [
        case
        if not index % every
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]
