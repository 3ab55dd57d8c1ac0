"""Generated decoders: no right one is called faulty, and no fault goes unnoticed, but for those that are listed."""

import pytest

from tests.generated.measure import Case, diagnose, faulty, healthy

SILENT = {
    "positions stop at 30 everywhere": "the call without a cache has the same fault, so that both agree",
    "cross cache lost at past 14 only": "the walk over all lengths keeps the cross-attention cache of the prefill",
    "written in a ring of 23": "no call without a cache takes more tokens than the ring holds",
    "rotary scaled from past 28 on": "in the ring, no call without a cache takes more tokens than it holds",
    "batch of the tokens declared as 1": "a note: a graph for one sequence may be meant so",
}
"""Kinds of faults that a step-test does not find in some designs, with the reason."""

QUICK, SLOW = 54, 6
"""Of so many cases one is run by the quick tests, and by the slow ones."""


def sample(cases: list[Case]) -> list[object]:
    """Every n-th case, those beyond the quick ones marked slow."""
    chosen = [case for number, case in enumerate(cases) if number % SLOW == 0]
    return [
        pytest.param(case, id=case.name, marks=() if number % (QUICK // SLOW) == 0 else pytest.mark.slow)
        for number, case in enumerate(chosen)
    ]


@pytest.mark.parametrize("case", sample(healthy()))
def test_a_right_decoder_is_not_called_faulty(case: Case) -> None:
    said = diagnose(case)
    assert (said.verdict, said.severity) in {("healthy", ""), ("healthy", "note")}, str(said)


@pytest.mark.parametrize("case", sample(faulty(2)))
def test_a_fault_does_not_go_unnoticed(case: Case) -> None:
    said = diagnose(case)
    assert said.found or case.kind in SILENT, str(said)
