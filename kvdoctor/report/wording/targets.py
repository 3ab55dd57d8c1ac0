"""The runs of a stack on its target runtimes, as a table: a row for each experiment, a column for each runtime."""

from collections.abc import Iterator

from kvdoctor.decode.runs import Run
from kvdoctor.report.document import Report
from kvdoctor.report.facts import TargetFacts

MOST_COLUMNS = 5
"""Runtimes beside one another on 80 columns."""

WORDS = {
    "passed": "ok",
    "failed": "FAILS",
    "differs": "DIFFERS",
    "died": "CRASHES",
    "ambiguous": "unclear",
    "inconclusive": "unclear",
    "skipped": "-",
}


def select_local_runs(report: Report, stack: str) -> list[Run]:
    """The runs of a stack on the local runtime, the onnxruntime of this Python."""
    others = {target.runtime for target in report.targets} - {_local_runtime(report)}
    return [run for run in report.runs if run.stack == stack and run.target not in others]


def tabulate_targets(report: Report, stack: str) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Tables of header and rows; none where no target was run."""
    if not report.targets or not any(run.stack == stack for run in report.runs):
        return
    found = {target.runtime: target for target in report.targets}
    others = [target for runtime, target in found.items() if runtime != _local_runtime(report)]
    local = {run.experiment: run for run in select_local_runs(report, stack)}
    for start in range(0, max(len(others), 1), MOST_COLUMNS):
        columns = others[start : start + MOST_COLUMNS]
        runs = [_runs_of(report, stack, target) for target in columns]
        header = [
            "experiment",
            f"{_release(_local_runtime(report))} (local)",
            *(target.onnxruntime for target in columns),
        ]
        rows = [
            [
                name,
                _cell(local.get(name)),
                *(_target_cell(stack, t, known.get(name)) for t, known in zip(columns, runs, strict=True)),
            ]
            for name in _experiment_names(local, runs)
        ]
        yield header, rows


def list_target_releases(report: Report) -> Iterator[str]:
    """The runtime release that each named target ships."""
    for target in report.targets:
        if target.asked != target.runtime:
            yield f"{target.asked} ships onnxruntime {target.onnxruntime}"


def list_target_limits(report: Report) -> Iterator[str]:
    """The file format versions that each target supports."""
    for target in report.targets:
        if target.ir is not None:
            yield f"{target.asked} supports IR versions up to {target.ir} and opsets up to {target.opset}"


def _experiment_names(local: dict[str, Run], others: list[dict[str, Run]]) -> list[str]:
    """The experiments that findings rest on and that any runtime ran, in the order in which they are run."""
    from kvdoctor.decode.experiments import load

    names = []
    for experiment in load():
        known = [runs[experiment.name] for runs in (local, *others) if experiment.name in runs]
        rests = experiment.judged and experiment.shown and not (experiment.explains or experiment.on_request)
        if rests and any(run.outcome != "skipped" or _may_be_refused(run) for run in known):
            names.append(experiment.name)
    return names


def _may_be_refused(run: Run) -> bool:
    """Whether a skipped run keeps its row: where the file does not load, the plain loop stands for all experiments."""
    return run.experiment == "plain-loop"


def _runs_of(report: Report, stack: str, target: TargetFacts) -> dict[str, Run]:
    return {run.experiment: run for run in report.runs if run.stack == stack and run.target == target.runtime}


def _target_cell(stack: str, target: TargetFacts, run: Run | None) -> str:
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


def _local_runtime(report: Report) -> str:
    return f"onnxruntime=={report.environment.get('onnxruntime', '?')}"


def _release(runtime: str) -> str:
    return runtime.partition("==")[2]
