"""evidence/features.md: held to its table, and the table to what the commands print."""

from pathlib import Path

import pytest
from support.sampling import EXHAUSTIVE, sampled

from evidence.features import make_page
from evidence.features.table import FEATURES, Feature, Held, Shown, Tested

ROOT = Path(__file__).parents[2]
ALL = [feature for features in FEATURES.values() for feature in features]
COMMANDS = list(make_page.commands())
QUICK = [each for each in COMMANDS if each.command in ("explain KV315", "schema report", "env")]


def test_the_page_is_made_from_the_table() -> None:
    assert make_page.PAGE.read_text(encoding="utf-8") == make_page.page()


def test_the_table_has_every_row_once() -> None:
    assert len({feature.words for feature in ALL}) == len(ALL) == 94


@pytest.mark.parametrize("feature", ALL, ids=lambda each: each.words)
def test_an_answer_has_its_evidence_or_its_reason(feature: Feature) -> None:
    assert bool(feature.evidence) == (feature.answer != "no")
    assert bool(feature.missing) == (feature.answer != "yes")
    for each in feature.evidence:
        if isinstance(each, Shown):
            assert each.words(), "nothing is looked for"
            assert each.code in (0, 1, 2, 3)
        elif isinstance(each, Tested):
            assert f"\ndef {each.name}(" in (ROOT / each.file).read_text(encoding="utf-8")
        elif isinstance(each, Held):
            assert each.text in (ROOT / each.file).read_text(encoding="utf-8")


def test_evidence_that_is_not_there_is_found() -> None:
    assert make_page.problem_of(Shown("explain KV315", "no such words")) is not None
    assert make_page.problem_of(Shown("explain KV315", "KV315", code=1)) is not None
    assert make_page.problem_of(Shown("env", "kvdoctor", file="absent.txt")) is not None
    wrong = Shown("inspect fixtures/exports/gpt2", at="stacks.0.layout", value="optimum-merged")
    assert make_page.problem_of(wrong) == "stacks.0.layout is 'optimum-decoder-only'"


@pytest.mark.parametrize("shown", QUICK, ids=lambda each: each.command)
def test_a_command_shows_what_its_row_says(shown: Shown) -> None:
    assert make_page.problem_of(shown) is None


@pytest.mark.slow
@pytest.mark.parametrize("shown", sampled(COMMANDS, 5, EXHAUSTIVE), ids=lambda each: f"{each.command}: {each.words()}")
def test_every_command_shows_what_its_row_says(shown: Shown) -> None:
    assert make_page.problem_of(shown) is None
