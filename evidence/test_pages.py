"""The pages of the evidence: every one is linked from the first one, and no link is broken."""

import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAGES = sorted(HERE.glob("*.md"))
LINK = re.compile(r"\]\(([^)#]+)[^)]*\)")


def test_the_first_page_links_to_every_table() -> None:
    linked = LINK.findall((HERE / "README.md").read_text(encoding="utf-8"))
    assert [page.name for page in PAGES if page.name not in {*linked, "README.md"}] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_link_leads_to_what_is_there(page: Path) -> None:
    for target in LINK.findall(re.sub(r"`[^`]*`", "", page.read_text(encoding="utf-8"))):
        assert target.startswith("https://") or (HERE / target).exists(), target
