"""Conversions of exports of many architectures: a sample of the tables in docs/conversions.md, made again."""

import make_conversions
import pytest
from making import Maker
from row import Row
from support.isolated import give_up
from support.sampling import spread
from tables import ROWS

pytestmark = [pytest.mark.zoo, pytest.mark.slow]

CHOSEN = [row for row in ROWS if f"{row.exporter}/{row.architecture}" in make_conversions.MODELS]
CHOSEN = [row for row in CHOSEN if row.variant == "exported"]


@pytest.mark.parametrize(("conversion", "row"), spread(make_conversions.CONVERSIONS, CHOSEN, 24), ids=str)
def test_a_conversion_does_what_the_tables_say(conversion: str, row: Row, maker: Maker) -> None:
    made = maker.make(row)
    if made.obstacle:
        give_up(made.obstacle)
    assert made.failure is None
    found = make_conversions.convert(made.folder, conversion)
    tables = make_conversions.read_tables()
    expected = tables[f"{row.exporter}/{row.architecture}"][conversion]
    assert (found == "proved") == (expected == "proved"), (found, expected)


def test_every_chosen_export_is_in_the_zoo() -> None:
    assert len(CHOSEN) == len(make_conversions.MODELS)
