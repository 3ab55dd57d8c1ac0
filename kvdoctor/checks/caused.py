"""Faults whose cause an experiment decided: the frame that their checks share."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvdoctor.case import Case, leading_cause, off_by
from kvdoctor.checks.step_fails import explained_elsewhere
from kvdoctor.findings import Advice, Fault, Severity
from kvdoctor.trace import Run


@dataclass(frozen=True, slots=True)
class Words:
    """What a check says of its fault, whatever the model."""

    cause: str
    promised: str
    advice: str


def caused(case: Case, name: str, words: Words) -> Iterator[Fault]:
    """The error of a check whose hypothesis an experiment decided for; none where another fault explains the runs."""
    leading = leading_cause(case)
    if leading is None or leading[0] != name or explained_elsewhere(case, name):
        return
    judged = case.judged
    if judged is None or judged.shows != "differs":
        yield decided(case, leading[1], words, "error")
        return
    # Two graphs quantised apart have other weights, by no more than quantisation changes them anyway.
    severity: Severity = "warning" if judged.hidden and name == "branches-disagree" else "error"
    yield decided(case, leading[1], words, severity, f"{judged.experiment}: logits differ at step {judged.failed_step}")


def decided(case: Case, run: Run, words: Words, severity: Severity, *follows: str) -> Fault:
    """A fault that quotes the run which decided."""
    logits = case.contract.graph("decode").port("logits") if case.contract else None
    name = logits.name if logits else "logits"
    return Fault(
        severity=severity,
        file=case.decode_file,
        subject=(name,),
        where=f"output {name}, {run.experiment}",
        promised=words.promised,
        observed=_evidence(run),
        cause=words.cause,
        advice=Advice("re-export", words.advice),
        follows=follows,
    )


def _evidence(run: Run) -> str:
    """What decided, and whether that was seen without what the model rounds."""
    if run.cause is None:
        return run.reason or _difference(run)
    return run.cause.evidence + ("; so where nothing is rounded" if run.unrounded is not None else "")


def _difference(run: Run) -> str:
    step = next((step for step in run.steps if step.step == run.failed_step), None)
    size = off_by(run, step)
    return f"step {run.failed_step}: other logits" + (f", {size}" if size else "")
