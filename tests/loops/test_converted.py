"""Copies that `convert` makes decode in the users' languages, with the tokens of the original."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.isolated import EXPORTS
from support.loop_programs import materials, played
from support.proofs import repair_of
from test_programs import COMPILED, scratch

from kvdoctor.addons.conversions import api as conversions

assert scratch  # a fixture
pytestmark = pytest.mark.slow

CONVERSIONS: dict[str, dict[str, Any]] = {
    "static": {"cache": "static=40"},
    "last": {"logits": "last"},
    "int8": {"cache_type": "int8"},
    "all": {"cache": "static=40", "cache_type": "int8", "logits": "last"},
    "sizes": {"sizes": "batch=1,new=1,past=16"},
}


@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_onnxruntime_node_decodes_a_converted_copy(conversion: str, tmp_path: Path, scratch: Path) -> None:
    copy = convert(EXPORTS / "gpt2", tmp_path / "copy", **CONVERSIONS[conversion])
    done = played("javascript", copy, scratch)
    assert done.returncode == 0, done.stdout + done.stderr
    if "cache_type" in CONVERSIONS[conversion]:  # which rounds what it holds
        return
    before, after = (read_tokens(path, scratch) for path in ("gpt2", copy))
    both = before.keys() & after.keys()
    assert len(both) >= 5
    assert {fed: after[fed] for fed in both} == {fed: before[fed] for fed in both}


@pytest.mark.parametrize(
    "language",
    [
        pytest.param(name, marks=() if name == "rust" else pytest.mark.exhaustive)
        for name in COMPILED
        if name != "javascript"
    ],
)
def test_a_copy_with_two_kinds_of_positions_is_decoded(language: str, tmp_path: Path, scratch: Path) -> None:
    """`position_ids` does not count padding, and `cache_position` does."""
    done = played(language, convert(EXPORTS / "gpt2", tmp_path / "copy", cache="static=40"), scratch)
    assert done.returncode == 0, done.stdout + done.stderr


def convert(model: Path, copy: Path, **options: Any) -> Path:
    """A proved copy."""
    report = conversions.convert(model, copy, **options)
    assert all(entry.holds for entry in repair_of(report).proof)
    return copy


def read_tokens(model: str | Path, scratch: Path) -> dict[tuple[int, ...], int]:
    """The tokens that a program for a model must find, by the tokens before them."""
    runs = json.loads((materials(model, scratch).folder / "vectors.json").read_text("utf-8"))["runs"]
    found = {}
    for run in (run for run in runs if run["name"] not in ("rewind", "reorder")):
        before: list[list[int]] = [[] for _ in run["calls"][0]["rows"]]
        for call in run["calls"]:
            before = [[*row, *new] for row, new in zip(before, call["rows"], strict=True)]
            found |= {tuple(row): token for row, token in zip(before, call["expect"], strict=True) if token >= 0}
    return found
