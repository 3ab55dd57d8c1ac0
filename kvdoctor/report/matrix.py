"""The targets of a stack as a table: a row for each experiment, a column for each runtime."""

from collections.abc import Iterator

from kvdoctor.report.document import Report, TargetFacts
from kvdoctor.trace import Run

MOST_COLUMNS = 5
"""Runtimes beside one another on 80 columns."""

WORDS = {
    "passed": "ok",
    "failed": "FAILS",
    "differs": "DIFFERS",
    "died": "DIES",
    "ambiguous": "unclear",
    "inconclusive": "unclear",
    "skipped": "-",
}


def runs_here(report: Report, stack: str) -> list[Run]:
    """The runs of a stack under the runtime of this Python."""
    elsewhere = {target.runtime for target in report.targets} - {_here(report)}
    return [run for run in report.runs if run.stack == stack and run.target not in elsewhere]


def matrices(report: Report, stack: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Tables of header and rows; none where no target was run."""
    if not report.targets or not any(run.stack == stack for run in report.runs):
        return
    found = {target.runtime: target for target in report.targets}
    others = [target for runtime, target in found.items() if runtime != _here(report)]
    here = {run.experiment: run for run in runs_here(report, stack)}
    for start in range(0, max(len(others), 1), MOST_COLUMNS):
        columns = others[start : start + MOST_COLUMNS]
        there = [_runs_of(report, stack, target) for target in columns]
        header = ["experiment", f"{_release(_here(report))} here", *(target.onnxruntime for target in columns)]
        rows = [
            [
                name,
                _cell(here.get(name)),
                *(_there(stack, t, runs.get(name)) for t, runs in zip(columns, there, strict=True)),
            ]
            for name in _names(here, there)
        ]
        yield header, rows


def legend(report: Report) -> Iterator[str]:
    """Which targets stand for which runtime, and which were not run."""
    for target in report.targets:
        if target.asked != target.runtime:
            yield f"{target.onnxruntime} is what {target.asked} ships"


def limits(report: Report) -> Iterator[str]:
    """What each target takes."""
    for target in report.targets:
        if target.ir is not None:
            yield f"{target.asked} takes IR versions up to {target.ir} and opsets up to {target.opset}"


def _names(here: dict[str, Run], there: list[dict[str, Run]]) -> list[str]:
    """The experiments in the order in which they are run: those that findings rest on, where any runtime ran them."""
    from kvdoctor.experiments import load

    names = []
    for experiment in load():
        known = [runs[experiment.name] for runs in (here, *there) if experiment.name in runs]
        rests = experiment.judged and experiment.shown and not (experiment.asks_why or experiment.on_request)
        if rests and any(run.outcome != "skipped" or _is_refusal(run) for run in known):
            names.append(experiment.name)
    return names


def _is_refusal(run: Run) -> bool:
    """Whether an experiment could not begin, since its file does not open: the loops stand for the others then."""
    return run.experiment == "plain-loop"


def _runs_of(report: Report, stack: str, target: TargetFacts) -> dict[str, Run]:
    return {run.experiment: run for run in report.runs if run.stack == stack and run.target == target.runtime}


def _there(stack: str, target: TargetFacts, run: Run | None) -> str:
    if stack in target.not_run:
        return "not run"
    if run is not None and run.outcome == "skipped" and target.refused.get(stack):
        return "REFUSED"
    if run is not None and run.experiment in target.other_logits.get(stack, ()):
        return "DIFFERS"
    return _cell(run)


def _cell(run: Run | None) -> str:
    if run is None:
        return "-"
    at = f" {run.failed_step}" if run.outcome == "failed" and run.failed_step is not None else ""
    return WORDS[run.shows] + at


def _here(report: Report) -> str:
    return f"onnxruntime=={report.environment.get('onnxruntime', '?')}"


def _release(runtime: str) -> str:
    return runtime.partition("==")[2]
