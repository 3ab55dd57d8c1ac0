"""The caller's runtime does otherwise than ONNX Runtime here, from the same feed.

What it means: `--trace FILE` holds what your program fed and got. Every step keeps the cache contract, and the same
steps, run again here, give other shapes, other numbers or no error: the fault is in the binding, the version or the
execution provider of the caller, or in how its program reads tensors (a buffer used twice, another layout, an element
type).

Reproduce: `kvdoctor step-test MODEL --trace FILE`, and the same calls with onnxruntime for Python.

Repair: compare versions (`kvdoctor env`), try the CPU provider, copy outputs before the next call, and read them with
their own shape.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.caller import telling
from kvdoctor.case import Case
from kvdoctor.findings import Advice, CannotCheck, Fault, check
from kvdoctor.trace import REPLAY, Run

ADVICE = Advice(
    "caller",
    "compare the version and the provider of the runtime, copy outputs before the next call, and read each in its own "
    "shape and element type",
)


@check("KV420", "caller-runtime-differs", "caller")
def caller_runtime_differs(case: Case) -> Iterator[Fault]:
    """A loop that keeps the contract, and gets something else there than here."""
    held, run = case.caller, case.run(REPLAY)
    if held is None or held.step is not None or run is None:
        return
    if held.also:
        others = ", ".join(held.also)
        raise CannotCheck(f"the trace fits {others} as well, whose numbers are others: give the file in it, or as PATH")
    failed = held.failed.number if held.failed is not None else None
    if run.outcome == "differs":
        at = f"trace step {run.failed_step}" if run.failed_step is not None else "trace"
        fault = _fault(
            case, at, "what the same feed gives here", _seen(run), "the caller's runtime gives other outputs"
        )
        yield _unless(fault, held.blind) if held.blind else fault
    elif failed is not None and run.outcome in ("passed", "ambiguous"):
        error = telling.said(held.failed) if held.failed is not None else ""
        cause = "a step that keeps the contract fails in the caller's runtime, and runs here"
        yield _fault(case, f"trace step {failed}", "a step that runs, as it does here", error, cause)
    elif failed is None and run.outcome == "failed":
        cause = "a step that keeps the contract runs in the caller's runtime, and fails here"
        yield _fault(case, f"trace step {run.failed_step}", "a step that runs, as it did there", run.error or "", cause)


def _unless(fault: Fault, blind: tuple[str, ...]) -> Fault:
    """The fault where the trace does not tell all values: a loop that feeds others is as likely."""
    shown = ", ".join(blind[:2]) + (f" and {len(blind) - 2} more" if len(blind) > 2 else "")
    return replace(
        fault,
        confidence="suspected",
        cause="other outputs than from a right feed: the caller's runtime, or values fed that the trace does not tell",
        advice=Advice("caller", f"give the values of {shown} as well (npz, or data in each line): they decide"),
    )


def _seen(run: Run) -> str:
    if run.reason is not None:
        return run.reason
    for step in run.steps:
        if step.step == run.failed_step and step.difference is not None:
            if not step.difference.finite:
                return f"step {step.step}: logits that are not finite"
            return f"step {step.step}: logits off by {step.difference.relative:.2g} of their spread"
    return "other logits"


def _fault(case: Case, where: str, promised: str, observed: str, cause: str) -> Fault:
    return Fault(
        severity="error",
        file=case.decode_file,
        subject=(where,),
        where=where,
        promised=promised,
        observed=observed,
        cause=cause,
        advice=ADVICE,
    )
