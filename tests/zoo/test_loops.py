"""Loops for exports of many architectures and layouts print the tokens of their models, in every language."""

import make_loops
import pytest
from making import Maker
from row import Row
from support.isolated import give_up
from support.loop_programs import assert_decodes
from support.sampling import spread
from tables import ROWS

from kvdoctor.loops.language import languages

pytestmark = [pytest.mark.zoo, pytest.mark.slow]

CHOSEN = [row for row in ROWS if f"{row.exporter}/{row.architecture}" in make_loops.ZOO and row.variant == "exported"]
"""Exports whose loops differ."""
COMPILED = [name for name in languages() if name != "python"]


@pytest.mark.parametrize(
    ("language", "row"), [*(("python", row) for row in CHOSEN), *spread(COMPILED, CHOSEN, 22)], ids=str
)
def test_a_loop_decodes_an_export(language: str, row: Row, maker: Maker) -> None:
    made = maker.make(row)
    if made.obstacle:
        give_up(made.obstacle)
    assert made.failure is None
    assert_decodes(language, made.folder)


def test_every_chosen_export_is_in_the_zoo() -> None:
    assert len(CHOSEN) == len(make_loops.ZOO)
