"""Faults whose cause an experiment decided: the frame that their checks share."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvdoctor.case import Case, cause_in_use, leading_cause
from kvdoctor.checks.step_fails import explained_elsewhere, fails_only_so
from kvdoctor.findings import Advice, Fault, Severity
from kvdoctor.trace import Run


@dataclass(frozen=True, slots=True)
class Words:
    """What a check says of its fault, whatever the model."""

    cause: str
    promised: str
    advice: str


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
    if judged is not None and judged.outcome == "differs":
        yield decided(
            case, leading[1], words, "error", f"{judged.experiment}: logits differ at step {judged.failed_step}"
        )
    else:
        yield decided(case, leading[1], words, "error")


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
        promised=words.promised,
        observed=run.cause.evidence if run.cause else run.reason or _difference(run),
        cause=words.cause,
        advice=Advice("re-export", words.advice),
        follows=follows,
    )


def _difference(run: Run) -> str:
    step = next((step for step in run.steps if step.step == run.failed_step), None)
    size = f", off by {step.difference.relative:g} of their spread" if step and step.difference else ""
    return f"step {run.failed_step}: other logits{size}"
