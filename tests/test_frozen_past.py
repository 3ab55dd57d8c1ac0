"""A past of fixed length: the declaration is found, and the step that meets it is shown by a run."""

from pathlib import Path

from support.text_fixtures import FOLDER, read

from kvdoctor.diagnose.pipeline import step_test


def test_the_step_that_meets_the_fixed_length_is_shown(tmp_path: Path) -> None:
    report = step_test(str(read(FOLDER / "past-axis-frozen-pair.onnxtxt").write(tmp_path)))
    (finding,) = report.findings
    assert finding.name == "past-axis-frozen"
    assert "step 2, fed a past of length 2, fails" in finding.effects[0]
    assert "2 decoder tokens or more" in finding.repair.text
    (run,) = (run for run in report.runs if run.outcome != "skipped")
    assert (run.experiment, run.outcome, run.failed_step) == ("frozen-past", "failed", 2)
    assert [step.past_length for step in run.steps] == [0, 1, 2]


def test_a_first_step_that_cannot_fill_it_is_not_run(tmp_path: Path) -> None:
    report = step_test(str(read(FOLDER / "past-axis-frozen.onnxtxt").write(tmp_path)))
    assert not report.runs
    assert any("fixed at 5" in entry.reason for entry in report.not_checked)
