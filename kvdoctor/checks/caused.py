"""Faults whose cause an experiment decided: the frame that their checks share."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvdoctor.case import Case, cause_in_use, leading_cause, off_by
from kvdoctor.checks.placed import because, placed
from kvdoctor.checks.step_fails import explained_elsewhere, fails_only_so
from kvdoctor.findings import Advice, Fault, Severity
from kvdoctor.trace import Run
from kvdoctor.uses import USES


@dataclass(frozen=True, slots=True)
class Words:
    """What a check says of its fault, whatever the model. `on_graph` says that a repair of the graph may mend it."""

    cause: str
    promised: str
    advice: str
    on_graph: bool = False


def caused(case: Case, name: str, words: Words) -> Iterator[Fault]:
    """The fault of a check whose hypothesis an experiment decided for; none where another fault explains the runs.

    Where only runs of other sizes differ for that cause, it is one fault, by the worst of them.
    """
    leading = leading_cause(case)
    if explained_elsewhere(case, name):
        return
    if leading is None or leading[0] != name:
        yield from _in_other_uses(case, name, words)
        return
    judged = case.judged
    if judged is None or judged.shows != "differs":
        yield decided(case, leading[1], words, "error")
        return
    # Two graphs quantised apart have other weights, by no more than quantisation changes them anyway.
    severity: Severity = "warning" if judged.hidden and name == "branches-disagree" else "error"
    yield decided(case, leading[1], words, severity, f"{judged.experiment}: logits differ at step {judged.failed_step}")


def _in_other_uses(case: Case, name: str, words: Words) -> Iterator[Fault]:
    found = []
    for run, use in fails_only_so(case, "differs"):
        cause = cause_in_use(case, run.experiment)
        if cause is not None and cause[0] == name:
            found.append((run, use, cause[1]))
    found.sort(key=lambda entry: entry[1].severity != "error")
    if found:
        _, use, why = found[0]
        shown = [f"{run.experiment}: logits differ at step {run.failed_step}" for run, _, _ in found]
        fault = decided(case, why, replace(words, cause=f"with {use.words}: {words.cause}"), use.severity, *shown)
        yield replace(fault, use=use.required)


def decided(case: Case, run: Run, words: Words, severity: Severity, *follows: str) -> Fault:
    """A fault that quotes the run which decided."""
    logits = case.contract.graph("decode").port("logits") if case.contract else None
    name = logits.name if logits else "logits"
    return Fault(
        severity=severity,
        file=case.decode_file,
        subject=(name,),
        where=f"output {name}, {run.experiment}",
        apart=(run.experiment,),
        promised=words.promised,
        observed=_evidence(run),
        cause=words.cause,
        advice=case.re_export(f"or {words.advice}") if words.on_graph else Advice("re-export", words.advice),
        follows=follows,
        because=because(run if run.place is not None or run.experiment in USES else placed(case)),
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
