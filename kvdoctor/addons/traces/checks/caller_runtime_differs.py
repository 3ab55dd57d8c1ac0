"""The same feed gives other results in the caller's runtime than in the local ONNX Runtime.

What it means: `--trace FILE` contains the inputs and outputs of your program. Every step follows the cache contract,
but the same steps, run again locally, give other shapes, other numbers or no error. The fault is in the binding, the
version or the execution provider of the caller's runtime, or in how the program reads tensors (a buffer used twice,
another layout, another element type). Of a trace with several runs, each is compared.

Reproduce: `kvdoctor step-test MODEL --trace FILE`, and the same calls with onnxruntime for Python.

Repair: compare versions (`kvdoctor env`), try the CPU provider, copy outputs before the next call, and read them with
their own shape.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdoctor.addons.traces.step_test import CallerContext
from kvdoctor.decode.runs import CALLER_ROUNDS, Run, quote_error
from kvdoctor.errors import CannotCheck
from kvdoctor.findings import Advice, Fault, check
from kvdoctor.report.wording import join_some

if TYPE_CHECKING:
    from kvdoctor.addons.traces.check import TraceCheck

OTHER = "the caller's runtime gives other outputs"
ROUNDED = "the caller's runtime rounds more: no likeliest token changes in these steps"
ADVICE = Advice(
    "caller",
    "compare the version and the provider of the runtime, copy outputs before the next call, and read each with its "
    "own shape and element type",
)


@check("KV420", "caller-runtime-differs", "caller")
def caller_runtime_differs(context: CallerContext) -> Iterator[Fault]:
    """A loop that follows the contract, and whose results differ from those of the local runtime."""
    trace, run, recorded = context.trace_check, context.replay, context.trace_run
    written = recorded.due is not None  # by a program that kvdoctor wrote
    if trace.step is not None or run is None:
        return
    if recorded.error is not None and trace.failed is None and run.outcome != "differs":
        call = next((step for step in recorded.trace if step.error is not None), None)
        name = "the program" if call is None else f"the call of {call.file}"
        where = "program" if call is None else f"trace ({call.place})"
        cause = f"{name} fails in the caller's runtime"
        quoted = quote_error(recorded.error)
        yield _fault(where, "a run that ends with the expected tokens", quoted, cause)
        return
    if trace.also:
        others = f"the trace fits {', '.join(trace.also)} as well, with other weights"
        raise CannotCheck(f"{others}: name the file in the trace, or as PATH")
    if written and trace.failed is not None and run.outcome == "failed":
        yield _fails_everywhere(trace)
        return
    failed = trace.failed.number if trace.failed is not None else None
    if run.outcome == "differs":
        at = f"trace step {run.failed_step}" if run.failed_step is not None else "trace"
        fault = _fault(at, "the outputs of the local runtime for the same feed", _describe_outputs(run), OTHER)
        if run.cause is not None and run.cause.name == CALLER_ROUNDS:
            fault = replace(fault, severity="warning", cause=ROUNDED)
        yield _weaken(fault, trace.blind) if trace.blind and not written else fault
    elif failed is not None and run.outcome in ("passed", "ambiguous"):
        error = quote_error(trace.failed.error or "") if trace.failed is not None else ""
        cause = "a step that follows the contract fails in the caller's runtime, and passes in the local one"
        yield _fault(f"trace step {failed}", "a step that passes, as in the local runtime", error, cause)
    elif failed is None and run.outcome == "failed":
        cause = "a step that follows the contract passes in the caller's runtime, and fails in the local one"
        yield _fault(
            f"trace step {run.failed_step}", "a step that passes, as in the caller's runtime", run.error or "", cause
        )


def _fails_everywhere(trace: "TraceCheck") -> Fault:
    """A run that fails in the caller's runtime, and locally as well when fed what that returned."""
    if trace.untrue is not None:
        wrong = trace.untrue
        observed = f"step {wrong.step}: {wrong.output} was returned as {wrong.observed}"
        return _fault(f"trace step {wrong.step}", wrong.declared, observed, OTHER)
    error = quote_error(trace.failed.error or "") if trace.failed is not None else ""
    number = trace.failed.number if trace.failed is not None else None
    cause = "a step fails in the caller's runtime, and also locally when fed what that returned"
    return _fault(f"trace step {number}", "a run that ends with the expected tokens", error, cause)


def _weaken(fault: Fault, blind: tuple[str, ...]) -> Fault:
    """The fault where the trace does not have values: a loop that feeds wrong ones is as likely."""
    shown = join_some(blind, 2)
    return replace(
        fault,
        confidence="suspected",
        cause="the outputs differ from those of a correct feed: the caller's runtime, or values that the trace omits",
        repair=Advice("caller", f"add the data of {shown} to the trace: they decide which"),
    )


def _describe_outputs(run: Run) -> str:
    found = next((one.difference for one in run.steps if one.step == run.failed_step), None)
    if run.reason is not None or found is None:
        return run.reason or "the logits differ"
    off = f"off by {found.relative:.2g} standard deviations of the logits" if found.finite else "are not finite"
    return f"step {run.failed_step}: logits {off}"


def _fault(where: str, declared: str, observed: str, cause: str) -> Fault:
    return Fault(
        severity="error",
        subject=(where,),
        where=where,
        declared=declared,
        observed=observed,
        cause=cause,
        repair=ADVICE,
    )
