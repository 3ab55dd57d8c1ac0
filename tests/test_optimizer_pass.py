"""The single pass of the optimizer that breaks a step, by disabling passes one half at a time."""

from pathlib import Path

import pytest
from support import text_fixtures

from kvdoctor import step_test
from kvdoctor.diagnose.locate.graph_runner import CannotLocate
from kvdoctor.diagnose.locate.optimizers import PASSES, find_pass


@pytest.mark.parametrize("culprit", [PASSES[0], PASSES[1], PASSES[len(PASSES) // 2], PASSES[-1]])
def test_any_pass_is_found_in_few_runs(culprit: str) -> None:
    asked: list[tuple[str, ...]] = []

    def is_right(disabled: tuple[str, ...]) -> bool:
        asked.append(disabled)
        return culprit in disabled

    assert find_pass(is_right) == culprit
    assert len(asked) <= 10


def test_what_no_single_pass_mends_has_no_pass() -> None:
    assert find_pass(lambda _: False) is None
    both = {PASSES[0], PASSES[-1]}
    assert find_pass(lambda disabled: both <= {*disabled}) is None


def test_a_search_that_is_cut_short_finds_none() -> None:
    def too_late(_: tuple[str, ...]) -> bool:
        raise CannotLocate("time is up")

    assert find_pass(too_late) is None


def test_names_are_written_once() -> None:
    assert len({*PASSES}) == len(PASSES)


def test_a_pass_of_the_runtime_is_named(tmp_path: Path) -> None:
    """Folding the constant in half precision makes it infinite; unfolded, the runtime computes it in float32."""
    text_fixtures.read(text_fixtures.FOLDER / "non-finite-half-mask.onnxtxt").write(tmp_path)
    (finding,) = [one for one in step_test(str(tmp_path)).findings if one.name == "non-finite"]
    assert "right with the pass ConstantFolding disabled" in finding.evidence[0]
