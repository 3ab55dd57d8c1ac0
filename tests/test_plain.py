"""Documents survive the way to JSON and back, and a wrong one is refused with its place."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.isolated import EXPORTS

from kvdoctor.contract import CacheContract
from kvdoctor.decode.runs import ObservedTensor, Run, Step
from kvdoctor.diagnose.inspection import inspect
from kvdoctor.records import from_plain, to_plain

NAMES = st.text(max_size=8)


def contract(name: str) -> CacheContract:
    found = inspect(str(EXPORTS / name)).stacks[0].contract
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["marian-4.57.6", "whisper", "llama-gqa"])
def test_a_contract_survives(name: str) -> None:
    before = contract(name)
    assert from_plain(CacheContract, json.loads(json.dumps(to_plain(before)))) == before


@given(
    st.dictionaries(
        NAMES, st.builds(ObservedTensor, NAMES, st.lists(st.integers(0, 9)).map(tuple), st.booleans()), max_size=3
    ),
    st.lists(NAMES).map(tuple),
    st.one_of(st.none(), st.integers(0, 9)),
)
def test_a_run_survives(fed: dict[str, ObservedTensor], empty: tuple[str, ...], failed: int | None) -> None:
    step = Step(0, "prefill", 0, 3, fed, {}, empty)
    run = Run("merged", "plain-loop", "onnxruntime==1", "CPU", "all", "failed", failed, steps=(step,))
    assert from_plain(Run, json.loads(json.dumps(to_plain(run)))) == run
    assert from_plain(Run, to_plain(replace(run, outcome="passed"))) != run


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("layout",), 7, r"CacheContract\.layout: got 7, expected str"),
        (("slots", 0, "carry"), "drop", r"slots\[0\]\.carry: got 'drop', expected 'feed-back' or 'hold'"),
        (("slots", 1, "shape", 0), [], r"slots\[1\]\.shape\[0\]"),
        (("surprise",), 1, "unknown field 'surprise'"),
    ],
)
def test_a_wrong_document_is_refused_with_its_place(place: tuple[Any, ...], value: Any, message: str) -> None:
    document = to_plain(contract("llama-gqa"))
    inner = document
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    with pytest.raises(ValueError, match=message):
        from_plain(CacheContract, document)


def test_a_missing_field_is_named() -> None:
    document = to_plain(contract("llama-gqa"))
    del document["phases"]
    with pytest.raises(ValueError, match="phases is missing"):
        from_plain(CacheContract, document)
