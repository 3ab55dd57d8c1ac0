"""A run and the same run in float32: which of the two decides, and with what severity."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.rounded_models import EXPORTS
from support.text_fixtures import FOLDER, read

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.contract import Exactness
from kvdoctor.decode.runs import Control, Float32Result, LogitsDifference, Outcome, Run, Step
from kvdoctor.diagnose.checks._dataflow import describe_rounded
from kvdoctor.diagnose.context import RunContext
from kvdoctor.diagnose.float32 import find_rounding_limit, merge_results
from kvdoctor.diagnose.run_checks import CheckResults, run_checks
from kvdoctor.findings import Selection


def run(outcome: Outcome, relatives: list[float], unrounded: Float32Result | None) -> Run:
    steps = tuple(
        Step(number, "decode", 3 + number, 1, {}, {}, difference=LogitsDifference(off, off, 1.0, 0.0, finite=True))
        for number, off in enumerate(relatives)
    )
    at = 1 if outcome == "differs" else None
    return Run(
        *("decoder", "plain-loop", "onnxruntime==1", "CPUExecutionProvider", "all"),
        outcome=outcome,
        failed_step=at,
        steps=steps,
        unrounded=unrounded,
    )


def check(found: Run, exactness: Exactness = "float16") -> CheckResults:
    folder = open_folder(str(EXPORTS / "gpt2"))
    contract = replace(read_contract(folder.stacks[0], folder.side_cars), exactness=exactness)
    context = RunContext(folder=folder, stack=folder.stacks[0], contract=contract, runs=(found,))
    return run_checks(context, "runs", Selection(("KV301",)))


RIGHT = Float32Result("passed", (0.0, 1e-6, 1e-6, 1e-6), own="differs")
WRONG = Float32Result("differs", (0.0, 0.01, 0.01, 0.01), 1, own="passed")


def test_a_difference_without_a_float32_rerun_is_an_error() -> None:
    (finding,) = check(run("differs", [0.0, 0.2, 0.2, 0.2], None)).findings
    assert finding.severity == "error"


def test_one_step_that_rounding_moved_is_no_finding() -> None:
    results = check(run("differs", [0.0, 0.2, 0.001, 0.001], RIGHT))
    assert not results.findings
    (entry,) = results.not_checked
    assert "1.0e-06" in entry.reason
    assert "2.0e-01" in entry.reason
    assert not entry.essential


def test_most_steps_moved_by_rounding_are_a_warning() -> None:
    (finding,) = check(run("differs", [0.0, 0.2, 0.2, 0.2], RIGHT)).findings
    assert finding.severity == "warning"
    assert "by rounding alone" in finding.cause
    assert "1.0e-06" in finding.effects[0]


def test_a_fault_that_rounding_hides_is_a_warning_with_both_figures() -> None:
    (finding,) = check(run("differs", [0.0, 0.003, 0.002, 0.001], WRONG)).findings
    assert finding.severity == "warning"
    assert "off by 0.003 standard deviations, off by 0.01 in a float32 copy of the model" in finding.observed
    assert "0.0002" in finding.declared


def test_a_fault_above_rounding_is_an_error() -> None:
    (finding,) = check(run("differs", [0.0, 0.2, 0.2, 0.2], replace(WRONG, own="differs"))).findings
    assert finding.severity == "error"
    assert "0.02" in finding.declared


@pytest.mark.parametrize("outcome", ["ambiguous", "differs", "inconclusive"])
def test_a_difference_that_float32_does_not_show_is_rounding(outcome: Outcome) -> None:
    assert run(outcome, [0.0, 0.2], RIGHT).shows == "passed"
    assert run(outcome, [0.0, 0.2], replace(RIGHT, outcome="ambiguous")).shows == outcome
    assert run(outcome, [0.0, 0.2], None).shows == outcome


def spoilt(kind: str, effect: float, *, visible: bool = True) -> Control:
    return Control(f"{kind} cache zeroed", visible, LogitsDifference(effect, effect, 1.0, 0.0, finite=True))


def rounded_context(folder: Path, found: Run, tolerances: dict[str, float] | None = None) -> RunContext:
    """The context of a decoder whose self-attention cache is rounded on its way out."""
    opened = open_folder(str(read(FOLDER / "cached-differs-rounded-cast.onnxtxt").write(folder)))
    stack = opened.stacks[0]
    contract = read_contract(stack, opened.side_cars)
    return RunContext(folder=opened, stack=stack, contract=contract, runs=(found,), tolerances=tolerances or {})


@pytest.mark.parametrize(
    ("controls", "off", "shows"),
    [
        ((spoilt("self-attention", 4.0),), 0.7, "differs"),
        ((spoilt("self-attention", 4.0),), 0.5, "passed"),
        ((spoilt("self-attention", 0.2),), 0.15, "differs"),
        ((spoilt("self-attention", 0.2),), 0.05, "passed"),
        # What is not rounded, and what cannot be seen, is no measure of the rounding.
        ((spoilt("self-attention", 4.0), spoilt("cross-attention", 0.01)), 0.05, "passed"),
        ((spoilt("self-attention", 1e-5, visible=False),), 0.05, "passed"),
        # Neither is half of an effect that is itself within the tolerance.
        ((spoilt("self-attention", 3e-4),), 1.9e-4, "passed"),
        ((spoilt("self-attention", 1e-3),), 6e-4, "differs"),
    ],
)
def test_a_rounded_cache_is_too_coarse_by_its_effect_beside_that_of_a_corrupted_one(
    controls: tuple[Control, ...], off: float, shows: Outcome, tmp_path: Path
) -> None:
    found = replace(run("differs", [off] * 4, None), controls=controls)
    limit = find_rounding_limit(rounded_context(tmp_path, found))
    merged = merge_results(found, run("passed", [1e-6] * 4, None), limit)
    assert merged.shows == shows


def test_a_loosened_tolerance_holds_for_a_rounded_cache(tmp_path: Path) -> None:
    found = replace(run("passed", [1e-3] * 4, None), controls=(spoilt("self-attention", 1e-3),))
    assert find_rounding_limit(rounded_context(tmp_path, found)) == 5e-4
    assert find_rounding_limit(rounded_context(tmp_path, found, {"float": 2e-3})) == 2e-3


def test_a_cache_that_is_too_coarse_for_some_uses_is_one_finding(tmp_path: Path) -> None:
    too_coarse = replace(RIGHT, too_coarse=True)
    uses = [replace(run("differs", [0.0, 0.9, 0.9, 0.9], too_coarse), experiment=name) for name in ("chunk", "batch")]
    for loop in (run("passed", [0.0] * 4, None), run("differs", [0.0, 0.2, 0.2, 0.2], RIGHT)):
        context = replace(rounded_context(tmp_path, loop), runs=(loop, *uses))
        (finding,) = run_checks(context, "runs", Selection(("KV3",))).findings
        assert (finding.code, finding.severity) == ("KV301", "warning")
        assert "several new tokens" in finding.cause
        required = replace(context, required=("batch",))
        (finding,) = run_checks(required, "runs", Selection(("KV3",))).findings
        assert finding.severity == "error"


def test_one_step_beyond_the_limit_is_not_too_coarse() -> None:
    merged = merge_results(run("ambiguous", [0.01, 2.0, 0.01, 0.01], None), run("passed", [1e-6] * 4, None), 0.6)
    assert merged.shows == "passed"


def test_the_nodes_that_round_are_evidence_for_their_own_slot_alone(tmp_path: Path) -> None:
    context = rounded_context(tmp_path, run("passed", [0.0], None))
    (first,), (own,) = describe_rounded(context), describe_rounded(context, "past_key_values.1.key")
    assert "present.0.key" in first
    assert "present.1.key" in own
    assert describe_rounded(context, "past_key_values.2.key") == ()
