"""The page of changed values: what it says of the committed exports, and of the others where they can be made."""

import re

import pytest

from evidence.config.changes import FAMILIES, change_each, findings, row_of
from evidence.config.make_page import DOCUMENT, tabulate
from evidence.zoo.making import Maker
from evidence.zoo.tables import ROWS


def test_most_changed_values_are_named() -> None:
    found = re.search(r"^(\d+) of (\d+) changed values", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    assert int(found[1]) >= int(found[2]) * 8 // 9
    assert int(found[2]) == sum(map(len, FAMILIES.values()))


@pytest.mark.parametrize(
    "row", [row for row in ROWS if (row.exporter, row.variant) == ("committed", "exported")], ids=str
)
def test_a_committed_export_agrees_with_its_config(row, maker: Maker) -> None:
    assert findings(maker.make(row).folder) == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family[1])
def test_a_family_has_its_row(family: tuple[str, str], maker: Maker) -> None:
    made = maker.make(row_of(*family))
    if made.obstacle is not None:
        pytest.skip(made.obstacle)
    row = tabulate(f"{family[1]} ({family[0]})", list(change_each(made.folder, FAMILIES[family])))
    assert row in DOCUMENT.read_text(encoding="utf-8")
