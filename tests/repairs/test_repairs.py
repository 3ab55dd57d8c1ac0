"""Every fault with a repair is repaired and proved; for the others nothing is written, and the report says why."""

import os
from pathlib import Path

import make_repairs
import pytest
from making import Maker
from outcome import Missing, healthy_export
from registry import Fault
from repaired import NOT_REPAIRABLE, faults, repair_fault
from support.isolated import give_up

from kvdoctor.findings import all_checks
from kvdoctor.repair.repairs.registry import STAGES, load

FAULTS = faults()
SAMPLE = {
    ("pasts-swapped", "gpt2"),
    ("past-dropped", "t5"),
    ("cache-as-float16", "llama-gqa"),
    ("weights-stored-twice", "marian"),
}
"""What every test run sees."""
EACH = 1
"""Exports in which the slow tests look at each fault; the table, and `-m exhaustive`, have all of them."""


def parameters() -> list[object]:
    """Every fault of the table in its exports, those beyond the sample as slow ones."""
    found: list[object] = []
    for number, (name, fault) in enumerate(FAULTS.items()):
        bases = make_repairs.chosen(fault)
        for index, base in enumerate(bases):
            marks = () if (name, base) in SAMPLE else (pytest.mark.slow,)
            if (index - number) % len(bases) >= EACH and marks:
                marks = (pytest.mark.slow, pytest.mark.exhaustive)
            found.append(pytest.param(fault, base, id=f"{name}-{base}", marks=marks))
    return found


@pytest.fixture(scope="session")
def maker(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Exports in a folder that the processes of one test session share with the zoo."""
    mine = tmp_path_factory.getbasetemp()
    return Maker((mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "zoo")


@pytest.mark.parametrize(("fault", "base"), parameters())
def test_a_fault_is_repaired_and_proved_or_left_and_said(fault: Fault, base: str, maker: Maker, tmp_path: Path) -> None:
    try:
        export = healthy_export(base, maker)
    except Missing as missing:
        give_up(str(missing))
    done = repair_fault(fault, export, tmp_path)
    if fault.name in NOT_REPAIRABLE:
        assert not done.written, done.details
        assert done.code in (0, 1) if fault.severity == "warning" else done.code == 1, done.details
        assert any(entry["reason"] for entry in done.document["repair"]["not_repaired"]), done.details
        return
    assert done.proved, done.details
    assert done.code == 0, done.details
    assert fault.check not in [finding["name"] for finding in done.document["findings"]]


def test_the_document_holds_every_repair_and_fault_as_it_is() -> None:
    text = make_repairs.DOCUMENT.read_text(encoding="utf-8")
    measured = make_repairs.read(text)
    assert list(measured) == [name for name in FAULTS if name not in NOT_REPAIRABLE]
    assert make_repairs.page(measured) == text


def test_all_are_proved_in_four_exports() -> None:
    measured = make_repairs.read(make_repairs.DOCUMENT.read_text(encoding="utf-8"))
    for name, cells in measured.items():
        assert cells.proved == len(make_repairs.chosen(FAULTS[name])), name
    by_check: dict[str, set[str]] = {}
    for name in measured:
        by_check.setdefault(FAULTS[name].check, set()).update(make_repairs.chosen(FAULTS[name]))
    architectures = {check: {base.partition("-")[0] for base in found} for check, found in by_check.items()}
    # Only three of the architectures here have an encoder whose cache a merged decoder can lose.
    few = {"cross-cache-emptied", "attention-cache-half-wired"}
    assert {check: found for check, found in architectures.items() if len(found) < 4 and check not in few} == {}


def test_every_repair_names_checks_and_its_stage() -> None:
    known = {check.name for check in all_checks()}
    assert load()
    for repair in load():
        assert set(repair.checks) <= known, repair.name
        assert repair.stage in STAGES
        assert repair.summary.endswith(".")
        for word in ("Requires:", "Ensures:"):
            assert word in (__import__(repair.apply.__module__, fromlist=["x"]).__doc__ or ""), repair.name
