"""Exports whose sizes were frozen on purpose are freed again, and proved; what the graph does not tell is refused."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.isolated import give_up

from evidence.faults.base_models import COMMITTED, LONE, Export
from evidence.faults.outcome import Missing, healthy_export
from evidence.faults.registry import Fault, load
from evidence.zoo.making import Maker
from kvdoctor.options import Options
from kvdoctor.repair.pipeline import re_export
from kvdoctor.repair.session import RepairRequest
from kvdoctor.report.document import Report

FAULTS = load()
FREED = {
    "past-declared": "free-past",
    "batch-declared": "free-batch",
    "new-declared": "free-sequence",
    "past-traced": "free-baked-sizes",
    "one-row-only": "free-baked-sizes",
    "one-encoder-length": "free-baked-sizes",
    "one-token-only": "free-baked-sizes",
    "infinity-times-zero": "finite-constants",
    "mask-from-the-start": "offset-mask",
}
"""The repair of each fault."""
KEPT = ("table-of-6", "first-entry-read", "mask-infinite-when-long", "positions-restart", "overflow-when-long")
"""Faults that the graph does not tell how to repair."""
SAMPLE = {("past-declared", "llama-gqa"), ("one-row-only", "gpt2")}
EACH = 1
"""Exports of each fault that the slow tests look at; the table of the repairs has more."""


def cells(faults: list[str], each: int) -> list[object]:
    """Each fault in some of the committed exports, the first ones in turn."""
    found: list[object] = []
    for number, name in enumerate(faults):
        bases = [base for base in FAULTS[name].bases if base in COMMITTED]
        for index, base in enumerate(bases):
            marks = () if (name, base) in SAMPLE else (pytest.mark.slow,)
            if (index - number) % len(bases) >= each and marks:
                marks = (*marks, pytest.mark.exhaustive)
            found.append(pytest.param(FAULTS[name], base, id=f"{name}-{base}", marks=marks))
    return found


def treated(harm: Callable[[Export], None], export: Export, folder: Path, options: Options) -> Report:
    harm(export)
    return re_export(RepairRequest(str(export.write(folder / "sick")), str(folder / "out")), options)


def taken(base: str, maker: Maker) -> Export:
    try:
        return healthy_export(base, maker)
    except Missing as missing:
        give_up(str(missing))
        raise


@pytest.mark.parametrize(("fault", "base"), cells(list(FREED), EACH))
def test_a_frozen_size_is_freed_and_proved(fault: Fault, base: str, maker: Maker, tmp_path: Path) -> None:
    report = treated(fault.harm, taken(base, maker), tmp_path, Options(consumer=fault.consumer))
    assert report.repair is not None
    assert FREED[fault.name] in {repair.name for repair in report.repair.repairs}
    assert report.repair.proved, [entry for entry in report.repair.proof if not entry.holds]
    assert report.verdict == "healthy"


@pytest.mark.parametrize(("fault", "base"), cells(list(KEPT), 1))
def test_what_the_graph_does_not_tell_is_refused(fault: Fault, base: str, maker: Maker, tmp_path: Path) -> None:
    report = treated(fault.harm, taken(base, maker), tmp_path, Options(consumer=fault.consumer))
    assert report.repair is not None
    assert not report.repair.proved
    assert not (tmp_path / "out").exists()
    assert fault.check in {entry.finding for entry in report.repair.not_repaired if entry.reason}


def guesses(export: Export) -> None:
    """The past through a Reshape that leaves its width to be worked out: with no entries it cannot be."""
    body = export.later
    body.replace_inside(body.self_pasts()[0], lambda old: body.op("Reshape", old, np.array([0, 0, 0, -1])))


def copies(export: Export) -> None:
    """The past laid out token by token and back: where its length is 0, that means to copy another axis."""
    body = export.later

    def laid_out(old: str) -> str:
        past = body.size(old, 2)
        width = body.op("Mul", body.size(old, 1), body.size(old, 3))
        rows = body.op("Concat", body.size(old, 0), past, width, axis=0)
        back = body.op("Concat", body.size(old, 0), body.size(old, 1), past, body.size(old, 3), axis=0)
        return body.op("Reshape", body.op("Reshape", old, rows), back)

    body.replace_inside(body.self_pasts()[0], laid_out)


@pytest.mark.slow
@pytest.mark.parametrize("base", LONE)
@pytest.mark.parametrize("harm", [guesses, copies])
def test_a_reshape_takes_an_empty_past_again(
    harm: Callable[[Export], None], base: str, maker: Maker, tmp_path: Path
) -> None:
    report = treated(harm, taken(base, maker), tmp_path, Options())
    assert report.repair is not None
    assert "empty-past" in {repair.name for repair in report.repair.repairs}
    assert report.repair.proved
    assert report.verdict == "healthy"
