"""Copies that `re-export` converted decode in the users' languages, with the tokens of the original."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.isolated import EXPORTS
from support.loop_programs import assert_decodes
from support.probed_programs import built

from kvdoctor import api
from kvdoctor.loops.language import languages
from kvdoctor.model.output_folder import LOOP_MARK

pytestmark = pytest.mark.slow

CONVERSIONS: dict[str, dict[str, str]] = {
    "static": {"cache": "static=40"},
    "last": {"logits": "last"},
    "int8": {"cache_type": "int8"},
    "all": {"cache": "static=40", "cache_type": "int8", "logits": "last"},
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_onnxruntime_node_decodes_a_converted_copy(conversion: str, tmp_path: Path) -> None:
    copy = convert(EXPORTS / "gpt2", tmp_path / "copy", **CONVERSIONS[conversion])
    assert_decodes("javascript", copy)
    if "cache_type" in CONVERSIONS[conversion]:  # which rounds what it keeps
        return
    before, after = (read_tokens(path, tmp_path / f"loop-{path.name}") for path in (EXPORTS / "gpt2", copy))
    assert after.items() <= before.items()
    assert len(after) >= 2


@pytest.mark.parametrize(
    "language",
    [
        pytest.param(name, marks=() if name == "rust" else pytest.mark.exhaustive)
        for name in languages()
        if name not in ("python", "javascript")
    ],
)
def test_a_copy_with_two_kinds_of_positions_is_decoded(language: str, tmp_path: Path) -> None:
    """`position_ids` does not count padding, and `cache_position` does."""
    assert_decodes(language, convert(EXPORTS / "gpt2", tmp_path / "copy", cache="static=40"))


def convert(model: Path, copy: Path, **options: Any) -> Path:
    """A proved copy."""
    report = api.re_export(model, copy, **options)
    assert report.repair is not None
    assert all(entry.holds for entry in report.repair.proof)
    return copy


def read_tokens(model: Path, out: Path) -> dict[str, Any]:
    """The tokens that a program for a model must print, by its arguments."""
    mark = json.loads((built("python", model, out).folder / LOOP_MARK).read_text("utf-8"))
    return {" ".join(one["arguments"]): one["expected"] for one in mark["vectors"]}
