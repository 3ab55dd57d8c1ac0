"""Faults whose cause an experiment decided: the frame that their checks share."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvdoctor.case import Case, leading_cause
from kvdoctor.checks.placed import because, placed
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
    if judged is not None and judged.outcome == "differs":
        yield decided(
            case, leading[1], words, "error", f"{judged.experiment}: logits differ at step {judged.failed_step}"
        )
    else:
        yield decided(case, leading[1], words, "error")


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
        because=because(placed(case)),
    )


def _difference(run: Run) -> str:
    step = next((step for step in run.steps if step.step == run.failed_step), None)
    size = f", off by {step.difference.relative:g} of their spread" if step and step.difference else ""
    return f"step {run.failed_step}: other logits{size}"
