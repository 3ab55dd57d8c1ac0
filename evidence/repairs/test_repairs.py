"""Every fault with a repair is repaired and proved; for the others nothing is written, and the report says why."""

from pathlib import Path

import pytest
from support.isolated import give_up

from evidence.faults.outcome import Missing, healthy_export
from evidence.faults.registry import Fault
from evidence.repairs import make_page
from evidence.repairs.repaired import NOT_REPAIRABLE, faults, repair_fault
from evidence.zoo.making import Maker

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
        bases = make_page.chosen(fault)
        for index, base in enumerate(bases):
            marks = () if (name, base) in SAMPLE else (pytest.mark.slow,)
            if (index - number) % len(bases) >= EACH and marks:
                marks = (pytest.mark.slow, pytest.mark.exhaustive)
            found.append(pytest.param(fault, base, id=f"{name}-{base}", marks=marks))
    return found


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
    text = make_page.DOCUMENT.read_text(encoding="utf-8")
    measured = make_page.read(text)
    assert list(measured) == [name for name in FAULTS if name not in NOT_REPAIRABLE]
    assert make_page.page(measured) == text


def test_all_are_proved_in_four_exports() -> None:
    measured = make_page.read(make_page.DOCUMENT.read_text(encoding="utf-8"))
    for name, cells in measured.items():
        assert cells.proved == len(make_page.chosen(FAULTS[name])), name
    by_check: dict[str, set[str]] = {}
    for name in measured:
        by_check.setdefault(FAULTS[name].check, set()).update(make_page.chosen(FAULTS[name]))
    architectures = {check: {base.partition("-")[0] for base in found} for check, found in by_check.items()}
    # Only three of the architectures here have an encoder whose cache a merged decoder can lose.
    few = {"cross-cache-emptied", "attention-cache-half-wired"}
    assert {check: found for check, found in architectures.items() if len(found) < 4 and check not in few} == {}
