"""Not a check: the fault of a run whose logits differ from the reference run."""

from typing import TYPE_CHECKING

from kvdoctor.decode.runs import Run, Step
from kvdoctor.decode.tolerances import find_tolerance
from kvdoctor.diagnose.checks._faults import describe_location, find_undeclared_size, list_nodes
from kvdoctor.diagnose.checks.step_fails import SHORT_STATE
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Fault, Severity
from kvdoctor.report.wording.runs import describe_difference, describe_growth

if TYPE_CHECKING:
    from kvdoctor.decode.experiments import Use

HIDDEN = "by no more than the model rounds; a float32 copy, which rounds nothing, shows the difference"
EXPORT_AGAIN = Advice("re-export", "export again with a current exporter, and test the result")


def build_difference(context: RunContext, run: Run, severity: Severity, cause: str) -> Fault:
    """The fault of a run whose logits differ, or of a step of it."""
    mismatch = find_undeclared_size(context, run)
    exactness = context.contract.exactness
    limit = find_tolerance("float" if run.hidden else exactness, context.tolerances)
    words = "in the float32 copy" if run.hidden else exactness
    step = next((step for step in run.steps if step.step == run.failed_step), None) or _find_worst(run)
    call = f"step {step.step} (past {step.past_length}, new {step.new_tokens})" if step else "reference run"
    seen = describe_difference(run, step) or run.reason or "of another shape"
    return Fault(
        severity=severity,
        file=context.decode_file,
        subject=(context.logits_name,),
        where=f"output {context.logits_name}, {run.experiment}",
        apart=() if run is context.checked_loop else (run.experiment,),
        declared=f"the reference logits, within {limit.passes:g} standard deviations of the logits ({words})",
        observed=f"{call}: logits {seen}{_describe_growth(run)}{_describe_search(context, run)}",
        cause=cause + (f": {mismatch}" if mismatch else ""),
        repair=SHORT_STATE if mismatch else EXPORT_AGAIN,
        evidence=describe_location(run),
        nodes=list_nodes(run),
    )


def _find_worst(run: Run) -> Step | None:
    """The step that is off the most, for a run whose steps are all within the limit of a fault."""
    compared = [step for step in run.steps if step.difference is not None and run.failed_step is None]
    return max(compared, key=lambda step: step.difference.relative if step.difference else 0.0, default=None)


def severity_of(run: Run, use: "Use") -> Severity:
    """One token per step in batch 1 must be right, whatever the lengths: else it is an error."""
    step = next((step for step in run.steps if step.step == run.failed_step), None)
    alone = run.experiment == "sweep" and step is not None and step.phase == "decode" and step.new_tokens == 1
    return "error" if alone else use.severity


def _describe_growth(run: Run) -> str:
    """The growth of the difference over the steps of a loop."""
    words = describe_growth(run)
    return f"; the error {words}" if words else ""


def _describe_search(context: RunContext, run: Run) -> str:
    """The evidence of the search for the cause, if it found none that has a check."""
    why = context.find_run("why")
    cause = why.cause if why is not None and run is context.checked_loop else None
    return f"; {cause.evidence}" if cause is not None else ""
