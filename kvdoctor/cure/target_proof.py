"""What a repaired stack must show under the targets: its loops pass there as well, with the logits of here."""

from collections.abc import Iterator

from kvdoctor.findings import Finding
from kvdoctor.report.document import Proof, Report, TargetFacts
from kvdoctor.trace import Run

LOOPS = ("plain-loop", "held-loop")


def under_targets(stack: str, after: Report) -> Iterator[Proof]:
    """The loops that ran here, under every target that could be run."""
    for target in after.targets:
        for experiment in LOOPS if stack not in target.not_run else ():
            here, *there = _runs(after, stack, experiment) or (None,)
            run = next((run for run in there if run.target == target.runtime), None)
            if here is not None and here.target == target.runtime:
                run = here
            if run is not None and here is not None and here.outcome != "skipped":
                yield _passes(stack, experiment, run, target)


def is_of_use_there(finding: Finding) -> bool:
    """Whether it is a use that a target is not fit for: it could not show while the target refused the file."""
    return finding.severity == "warning" and finding.name in ("target-fails", "target-differs")


def _passes(stack: str, experiment: str, run: Run, target: TargetFacts) -> Proof:
    apart = experiment in target.other_logits.get(stack, ())
    detail = "other logits than here" if apart else run.error or run.reason or f"{len(run.steps)} steps"
    return Proof(stack, f"{experiment} passes under {target.asked}", run.shows == "passed" and not apart, detail)


def _runs(report: Report, stack: str, experiment: str) -> list[Run]:
    """The runs of an experiment, that of the runtime which is here first."""
    return [run for run in report.runs if run.stack == stack and run.experiment == experiment]
