"""A run and the same run in float32: which of the two decides, and with what severity."""

from dataclasses import replace

import pytest
from support.rounded_models import EXPORTS

from kvdoctor.analysis.contract_reader import read_contract
from kvdoctor.analysis.model_folder import open_folder
from kvdoctor.contract import Exactness
from kvdoctor.decode.runs import Control, Float32Result, LogitsDifference, Outcome, Run, Step
from kvdoctor.diagnose.context import ContractContext, RunContext
from kvdoctor.diagnose.float32_rerun import find_rounding_limit, merge_results
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
    assert (
        "off by 0.003 standard deviations of the logits, off by 0.01 in a float32 copy of the model" in finding.observed
    )
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


@pytest.mark.parametrize(
    ("effect", "off", "shows"),
    [(4.0, 0.7, "differs"), (4.0, 0.5, "passed"), (0.2, 0.15, "differs"), (0.2, 0.05, "passed")],
)
def test_a_rounded_cache_is_too_coarse_by_its_effect_beside_that_of_a_corrupted_one(
    effect: float, off: float, shows: Outcome
) -> None:
    spoilt = Control("self-attention cache zeroed", True, LogitsDifference(effect, effect, 1.0, 0.0, finite=True))
    found = replace(run("differs", [off] * 4, None), controls=(spoilt,))
    folder = open_folder(str(EXPORTS / "gpt2"))
    contract = read_contract(folder.stacks[0], folder.side_cars)
    context = ContractContext(folder=folder, stack=folder.stacks[0], contract=contract, runs=(found,))
    limit = find_rounding_limit(context)
    merged = merge_results(found, run("passed", [1e-6] * 4, None), limit)
    assert merged.shows == shows


def test_one_step_beyond_the_limit_is_not_too_coarse() -> None:
    merged = merge_results(run("ambiguous", [0.01, 2.0, 0.01, 0.01], None), run("passed", [1e-6] * 4, None), 0.6)
    assert merged.shows == "passed"
