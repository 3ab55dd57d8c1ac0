"""What is made of a run and of the same run without rounding: which of the two speaks, and how loud."""

from dataclasses import replace

import pytest
from rounded import EXPORTS

from kvdoctor.case import Case
from kvdoctor.contract import Exactness
from kvdoctor.findings import Selection, Verdicts, run_checks
from kvdoctor.model_folder import open_folder
from kvdoctor.reading import read_contract
from kvdoctor.trace import Difference, Outcome, Run, Step, Unrounded


def run(outcome: Outcome, relatives: list[float], unrounded: Unrounded | None) -> Run:
    steps = tuple(
        Step(number, "decode", 3 + number, 1, {}, {}, difference=Difference(off, off, 1.0, 0.0, finite=True))
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


def judged(found: Run, exactness: Exactness = "float16") -> Verdicts:
    folder = open_folder(str(EXPORTS / "gpt2"))
    contract = replace(read_contract(folder.stacks[0], folder.side_cars), exactness=exactness)
    verdicts = Verdicts()
    case = Case(folder, stack=folder.stacks[0], contract=contract, runs=(found,), declared_faults=())
    run_checks(case, "runs", Selection(("KV301",)), verdicts)
    return verdicts


RIGHT = Unrounded("passed", (0.0, 1e-6, 1e-6, 1e-6), own="differs")
WRONG = Unrounded("differs", (0.0, 0.01, 0.01, 0.01), 1, own="passed")


def test_a_difference_that_no_twin_speaks_to_is_an_error() -> None:
    (finding,) = judged(run("differs", [0.0, 0.2, 0.2, 0.2], None)).findings
    assert finding.severity == "error"


def test_one_step_that_rounding_moved_is_no_finding() -> None:
    verdicts = judged(run("differs", [0.0, 0.2, 0.001, 0.001], RIGHT))
    assert verdicts.findings == []
    (entry,) = verdicts.not_checked
    assert "1.0e-06" in entry.reason
    assert "2.0e-01" in entry.reason
    assert not entry.essential


def test_most_steps_moved_by_rounding_are_a_warning() -> None:
    (finding,) = judged(run("differs", [0.0, 0.2, 0.2, 0.2], RIGHT)).findings
    assert finding.severity == "warning"
    assert "by rounding alone" in finding.cause
    assert "1.0e-06" in finding.follows[0]


def test_a_fault_that_rounding_hides_is_a_warning_with_both_figures() -> None:
    (finding,) = judged(run("differs", [0.0, 0.003, 0.002, 0.001], WRONG)).findings
    assert finding.severity == "warning"
    assert "off by 0.003 of their spread, off by 0.01 where nothing is rounded" in finding.observed
    assert "0.0002" in finding.promised


def test_a_fault_above_rounding_is_an_error() -> None:
    (finding,) = judged(run("differs", [0.0, 0.2, 0.2, 0.2], replace(WRONG, own="differs"))).findings
    assert finding.severity == "error"
    assert "0.02" in finding.promised


@pytest.mark.parametrize("outcome", ["ambiguous", "differs", "inconclusive"])
def test_what_a_twin_does_without_fault_is_rounding(outcome: Outcome) -> None:
    assert run(outcome, [0.0, 0.2], RIGHT).shows == "passed"
    assert run(outcome, [0.0, 0.2], replace(RIGHT, outcome="ambiguous")).shows == outcome
    assert run(outcome, [0.0, 0.2], None).shows == outcome
