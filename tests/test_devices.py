"""The table of documented limits of devices: each has its source and its time, and the page is made of it."""

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from kvdoctor.model.traverse import STANDARD

DOCS = Path(__file__).parents[1] / "docs"
MADE = runpy.run_path(str(DOCS / "make_devices.py"))
LIMITS: list[dict[str, Any]] = list(MADE["limits"]())


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit['device']}-{limit['when']}")
def test_each_limit_has_its_sources_and_says_when_they_were_right(limit: dict[str, Any]) -> None:
    assert limit["sources"]
    assert all(re.fullmatch(r"https://[\w./#-]+", url) for url in limit["sources"])
    assert limit["as_of"]
    lists = [limit[name] for name in ("supported", "unsupported") if limit.get(name)]
    assert len(lists) == (limit["when"] == "operators")


def test_listed_operators_exist() -> None:
    from onnx.defs import get_all_schemas

    known = {schema.name for schema in get_all_schemas() if schema.domain in STANDARD}
    retired = {"SimplifiedLayerNormalization"}  # ONNX Runtime puts it into the standard domain by itself
    listed = {name for one in LIMITS for kind in ("supported", "unsupported") for name in one.get(kind, "").split()}
    assert {name for name in listed if "." not in name} <= known | retired


def test_the_page_is_current() -> None:
    assert (DOCS / "devices.md").read_text(encoding="utf-8") == MADE["page"]()
