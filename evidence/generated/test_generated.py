"""Generated decoders: no right one is called faulty, and no fault goes unnoticed, but for those that are listed."""

from pathlib import Path

import pytest

import kvdoctor
from evidence.generated.faults import KINDS
from evidence.generated.measure import SILENT, Case, diagnose, faulty, healthy
from evidence.generated.page import kinds_on

PAGE = Path(__file__).parents[1] / "faults.md"

QUICK, SLOW = 54, 9
"""Of so many cases one is run by the quick tests, and by the slow ones."""


def sample(cases: list[Case]) -> list[object]:
    """Every n-th case, those beyond the quick ones marked slow."""
    chosen = [case for number, case in enumerate(cases) if number % SLOW == 0]
    return [
        pytest.param(case, id=case.name, marks=() if number % (QUICK // SLOW) == 0 else pytest.mark.slow)
        for number, case in enumerate(chosen)
    ]


NAMED = {
    ("values to bfloat16", "delta"): "new-entries-wrong",
    ("mask not offset by the past", "delta"): "mask-not-offset",
    ("key and value exchanged in layer 2", "static learned"): "key-value-swapped",
    ("buffer decays", "static"): "present-rewrites-past",
    ("keys of another layer in the step", "no positions"): "layers-swapped",
    ("keys to 8 bits in layer 1", "stacked"): "new-entries-wrong",
    ("query scaled in a step", "no positions"): "branches-disagree",
    ("entries of every prefill in reverse", "stacked"): "new-entries-wrong",
    ("present rolled at multiples of 8", "llama-like"): "present-rewrites-past",
    ("values to bfloat16", "encoder merged"): "cached-differs",
    ("positions one too large in a step", "pair"): "positions-not-offset",
    ("tokens clipped at 500 in a step", "transposed keys"): "new-entries-wrong",
    ("the entry of position 0 lost", "mqa alibi"): "new-entries-wrong",
    ("positions restart in a chunk", "static"): "positions-not-offset",
    ("tokens of a chunk in reverse", "stacked"): "chunk-differs",
    ("logits of a chunk rolled", "4-D mask"): "chunk-differs",
    ("rows exchanged", "mqa alibi"): "batch-rows-interact",
    ("keys scaled in a step", "ring"): "new-entries-wrong",
    ("buffer cleared at past 32", "ring"): "present-rewrites-past",
    ("positions stop at 30 everywhere", "static learned"): "context-limit-fails",
    ("positions stop at 30 everywhere", "fused"): "context-limit-fails",
}
"""The finding that each fault in a base must have: the healthy bases must be silent."""


def quick_first(cases: list[tuple[str, ...]]) -> list[object]:
    """Every fourth case, the others marked slow."""
    return [
        pytest.param(*case, id=" | ".join(case), marks=() if number % 4 == 0 else pytest.mark.slow)
        for number, case in enumerate(cases)
    ]


def test_the_page_has_the_kinds_of_the_generator() -> None:
    assert kinds_on(PAGE.read_text(encoding="utf-8")) == list(KINDS)


@pytest.mark.parametrize(("kind", "base"), quick_first(list(NAMED)))
def test_a_fault_is_called_by_its_cause(kind: str, base: str) -> None:
    said = diagnose(Case(base, kind, healthy=False))
    assert (said.found, said.leading) == (True, NAMED[kind, base]), str(said)


@pytest.mark.parametrize(
    ("kind", "base"), [("positions of a chunk in reverse", "llama-like"), ("no bias in a step", "mqa alibi")]
)
def test_no_repair_is_advised_that_would_not_be_proved(kind: str, base: str, tmp_path: Path) -> None:
    """Both count positions from 0 and add the past: counting them from the past on would change a right part."""
    Case(base, kind, healthy=False).write(tmp_path)
    advice = [found.repair for found in kvdoctor.step_test(tmp_path).findings if found.name == "positions-not-offset"]
    assert [one.kind for one in advice] == ["re-export"]
    assert advice[0].command is None


@pytest.mark.parametrize("base", quick_first(sorted({(base,) for _, base in NAMED})))
def test_the_base_without_a_fault_is_healthy(base: str) -> None:
    said = diagnose(Case(base, "as it is", healthy=True))
    assert not said.alarm, str(said)


@pytest.mark.parametrize("case", sample(healthy()))
def test_a_right_decoder_is_not_called_faulty(case: Case) -> None:
    said = diagnose(case)
    assert not said.alarm, str(said)


@pytest.mark.parametrize("case", sample(faulty(2)))
def test_a_fault_does_not_go_unnoticed(case: Case) -> None:
    said = diagnose(case)
    assert said.found or case.kind in SILENT, str(said)
