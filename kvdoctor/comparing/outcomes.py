"""Experiments side by side: what passed with A must pass with B."""

from collections.abc import Iterator

from kvdoctor.experiments import load
from kvdoctor.report import matrix
from kvdoctor.report.diff_document import Effect, Outcomes
from kvdoctor.report.document import Report
from kvdoctor.report.safe import shortened
from kvdoctor.trace import Run

BAD = ("failed", "differs", "died")
HERE = "here"
"""The runtime of this Python: releases of it may differ between a report and today, and are the same place."""


def outcomes(a: Report, b: Report, stack_a: str, stack_b: str) -> Iterator[Outcomes]:
    """Every experiment that was run on a side; one that findings do not rest on has no effect."""
    judged = {experiment.name for experiment in load() if experiment.judged and not experiment.asks_why}
    old, new = _runs(a, stack_a), _runs(b, stack_b)
    for key in dict.fromkeys([*old, *new]):
        before, after = old.get(key), new.get(key)
        if all(run is None or run.outcome == "skipped" for run in (before, after)):
            continue
        effect = _effect(before, after) if key[0] in judged else "neutral"
        yield Outcomes(*key, _said(before), _said(after), effect)


def _runs(report: Report, stack: str) -> dict[tuple[str, str], Run]:
    here = matrix.runs_here(report, stack)
    found = {(run.experiment, HERE): run for run in here}
    elsewhere = (run for run in report.runs if run.stack == stack and run not in here)
    return found | {(run.experiment, run.target): run for run in elsewhere}


def _effect(a: Run | None, b: Run | None) -> Effect:
    """A death by a limit says nothing of the model: it is listed with what could not be checked."""
    if a is None or b is None:
        return "neutral"
    if a.shows == "passed" and b.shows in BAD and b.died_by not in ("timeout", "memory"):
        return "worse"
    return "better" if a.shows in BAD and b.shows == "passed" else "neutral"


def _said(run: Run | None) -> str | None:
    if run is None:
        return None
    at = f" at step {run.failed_step}" if run.shows in ("failed", "differs") and run.failed_step is not None else ""
    return shortened(f"skipped: {run.reason}" if run.outcome == "skipped" else run.shows + at)
