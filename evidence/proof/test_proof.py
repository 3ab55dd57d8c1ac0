"""Nothing that runs refute is proved: a sample of the injected faults, and of decoders that are drawn at random."""

from pathlib import Path

import pytest

from evidence.faults.registry import load
from evidence.proof.make_page import ALLOWED, DOCUMENT
from evidence.proof.measure import COMMITTED, prove_drawn, prove_faults
from evidence.strangers.families import FAMILIES

EACH = 12
"""Of so many families one is run by the quick tests."""


def test_no_injected_fault_of_lengths_is_proved(tmp_path: Path) -> None:
    found = list(prove_faults(tmp_path))
    assert len(found) > len(load())
    wrong = [one.name for check, one in found if one.holds and check not in ALLOWED and not one.proof.single]
    assert wrong == []


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if at % EACH == 0 else pytest.mark.slow) for at, name in enumerate(FAMILIES)],
)
def test_no_run_of_a_random_decoder_refutes_its_proof(family: str, tmp_path: Path) -> None:
    for drawn in prove_drawn(family, 0, 8, tmp_path):
        assert drawn.differing == (), drawn.proved


def test_the_page_names_the_exports() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert all(folder in text for folder in COMMITTED.values())
