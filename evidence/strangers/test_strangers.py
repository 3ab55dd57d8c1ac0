"""A sample of the decoders of strangers: they are what they claim, and are judged as the page says, or better."""

from pathlib import Path

import pytest

import kvdoctor
from evidence.strangers.cases import Case, faulty, right
from evidence.strangers.families import FAMILIES
from evidence.strangers.outcome import MEMORY, Said
from evidence.strangers.page import listed
from kvdoctor.report.document import exit_code

KNOWN = listed((Path(__file__).parents[1] / "strangers.md").read_text(encoding="utf-8"))
QUICK, SLOW = 25, 5
"""Of so many families one is run by the quick tests, and by the slow ones."""


def said_of(case: Case, folder: Path) -> Said:
    case.decoder.write(folder)
    report = kvdoctor.step_test(folder, max_memory=MEMORY)
    severe = [(one.severity, one.name) for one in report.findings if one.severity != "note"]
    return Said(exit_code(report, "error"), tuple(severe))


def marks(number: int) -> tuple[pytest.MarkDecorator, ...]:
    if number % QUICK == 0:
        return ()
    return (pytest.mark.slow,) if number % SLOW == 0 else (pytest.mark.slow, pytest.mark.exhaustive)


SAMPLE = [pytest.param(family, marks=marks(number)) for number, family in enumerate(FAMILIES)]


@pytest.mark.parametrize("family", SAMPLE)
def test_a_right_decoder_is_clean(family: str, tmp_path: Path) -> None:
    case = right(family)
    said = said_of(case, tmp_path)
    assert said.well(case.expected) or case.name in KNOWN, said


@pytest.mark.parametrize("family", SAMPLE)
def test_a_mistake_is_named(family: str, tmp_path: Path) -> None:
    for case in faulty(family, 0, 1):
        said = said_of(case, tmp_path)
        assert said.judged(case.expected) in ("named", KNOWN.get(case.name)), (case.name, said)
