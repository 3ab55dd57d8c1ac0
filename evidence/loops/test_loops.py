"""Loops for exports of many architectures and layouts print the tokens of their models, in every language."""

from pathlib import Path

import pytest
from support.isolated import give_up
from support.loop_programs import COMMITTED, played
from support.sampling import spread

from evidence.loops import against_pytorch, make_page
from evidence.zoo.making import Maker
from evidence.zoo.row import Row
from evidence.zoo.tables import ROWS
from kvdoctor.addons.loops.languages import LANGUAGES

CHOSEN = [row for row in ROWS if f"{row.exporter}/{row.architecture}" in make_page.ZOO and row.variant == "exported"]
"""Exports whose loops differ."""
COMPILED = [name for name in LANGUAGES if name != "python"]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


@pytest.mark.zoo
@pytest.mark.slow
@pytest.mark.parametrize(
    ("language", "row"), [*(("python", row) for row in CHOSEN), *spread(COMPILED, CHOSEN, 22)], ids=str
)
def test_a_loop_decodes_an_export(language: str, row: Row, maker: Maker, scratch: Path) -> None:
    made = maker.make(row)
    if made.obstacle:
        give_up(made.obstacle)
    assert made.failure is None
    done = played(language, made.folder, scratch)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_chosen_export_is_in_the_zoo() -> None:
    assert len(CHOSEN) == len(make_page.ZOO)


def test_the_page_has_a_line_for_each_model() -> None:
    first, _, second = make_page.PAGE.read_text(encoding="utf-8").partition(against_pytorch.HEAD)
    assert first.startswith(make_page.HEAD)
    assert [name for name, *_ in rows(first)] == [*COMMITTED, *make_page.ZOO, *make_page.TEXTS]
    asked = [[exporter, name] for exporter, names in against_pytorch.ARCHITECTURES.items() for name in names]
    assert [cells[:2] for cells in rows(second)] == asked
    assert not any("**" in cell for cells in rows(second) for cell in cells)


def rows(page: str) -> list[list[str]]:
    """The cells of the table of a page, without its head."""
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")][2:]
