"""Conversions of exports of many architectures: a sample of the tables in evidence/conversions.md, made again."""

import re

import pytest
from support.isolated import give_up
from support.sampling import spread

from evidence.conversions import make_page
from evidence.zoo.making import Maker
from evidence.zoo.row import Row
from evidence.zoo.tables import ROWS

CHOSEN = [row for row in ROWS if f"{row.exporter}/{row.architecture}" in make_page.MODELS]
CHOSEN = [row for row in CHOSEN if row.variant == "exported"]


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize(("conversion", "row"), spread(make_page.CONVERSIONS, CHOSEN, 24), ids=str)
def test_a_conversion_does_what_the_tables_say(conversion: str, row: Row, maker: Maker) -> None:
    made = maker.make(row)
    if made.obstacle:
        give_up(made.obstacle)
    assert made.failure is None
    found = make_page.convert(made.folder, conversion)
    tables = make_page.read_tables()
    expected = tables[f"{row.exporter}/{row.architecture}"][conversion]
    assert (found == "proved") == (expected == "proved"), (found, expected)


def test_every_chosen_export_is_in_the_zoo() -> None:
    assert len(CHOSEN) == len(make_page.MODELS)


def test_each_conversion_is_proved_on_six_models() -> None:
    tables = make_page.read_tables()
    assert set(tables) == set(make_page.MODELS)
    for conversion in make_page.CONVERSIONS:
        assert [row[conversion] for row in tables.values()].count("proved") >= 6, conversion
    page = make_page.PAGE.read_text(encoding="utf-8")
    assert page.startswith(make_page.HEAD)
    reasons = re.findall(r"^(\d+)\. ", page, re.MULTILINE)
    assert {f"({number})" for number in reasons} == {c for row in tables.values() for c in row.values()} - {"proved"}
