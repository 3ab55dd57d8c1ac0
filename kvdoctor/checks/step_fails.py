"""A decode step fails.

What it means: the runtime stops with an error in a call that the cache contract allows, for a cause that no other
check names. KV201 is the first step with an empty past, KV202 any other step.

Reproduce: `kvdoctor step-test MODEL -v` lists what each step was fed and what came back.

Repair: the node and the shapes that came in show which axis the export has fixed; export again with other sample
sizes. Several sequences at once or another encoder length may fail while one sequence is right: then it is a warning.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.checks.growth import has_wrong_lengths
from kvdoctor.contract import describe
from kvdoctor.findings import Advice, CannotCheck, Fault, Severity, check
from kvdoctor.trace import Run

ALLOWED = {"batch": "a batch of 2", "other-encoder-length": "an encoder length other than the first"}
EXPORT_AGAIN = Advice("re-export", "export again with sample sizes of 2 or more, all different")


@check("KV201", "empty-past-rejected", "runs")
def empty_past_rejected(case: Case) -> Iterator[Fault]:
    """The first step with past length 0, where a dummy of length 1 runs."""
    run = case.run("empty-past")
    if run is not None and _rejects_empty_past(case):
        yield _fault(case, run, "error", "the first step fails when the past has length 0", "a past of length 0")


@check("KV202", "step-fails", "runs")
def step_fails(case: Case) -> Iterator[Fault]:
    """Judged runs that failed for no cause that has a name of its own."""
    run = case.judged
    if run is None:
        return
    if reason := explained_elsewhere(case):
        raise CannotCheck(reason)
    if run.outcome == "failed":
        step = "the first step" if run.failed_step == 0 else f"decode step {run.failed_step}"
        yield _fault(case, run, "error", f"{step} fails", "a step that runs")
        return
    for experiment, use in ALLOWED.items():
        other = case.run(experiment)
        if other is not None and other.outcome == "failed" and run.outcome == "passed":
            yield _fault(case, other, "warning", f"step {other.failed_step} fails with {use}", use)


def explained_elsewhere(case: Case) -> str | None:
    """The check that names the cause of whatever the runs show, or None: one fault is one finding."""
    if case.declared_faults:
        return f"explained by {', '.join(case.declared_faults)}"
    if _rejects_empty_past(case):
        return "the first step already fails, see KV201"
    if has_wrong_lengths(case):
        return "the present does not grow as it should, see KV205 and KV206"
    return None


def _rejects_empty_past(case: Case) -> bool:
    empty, dummy = case.run("empty-past"), case.run("dummy-past-runs")
    return empty is not None and empty.outcome == "failed" and dummy is not None and dummy.outcome == "passed"


def _fault(case: Case, run: Run, severity: Severity, cause: str, promised: str) -> Fault:
    place = f'{run.node.op} "{run.node.name}"' if run.node else f"file {case.decode_file}"
    step = run.steps[-1] if run.steps else None
    fed = {name: seen for name, seen in step.fed.items() if name.startswith("past") or "ids" in name} if step else {}
    shown = ", ".join(f"{name} {describe(seen.dtype, seen.shape)}" for name, seen in list(fed.items())[:3])
    return Fault(
        severity=severity,
        file=case.decode_file,
        subject=(run.node.name,) if run.node else (case.decode_file,),
        where=place,
        promised=promised,
        observed=f"{run.experiment}, step {run.failed_step}"
        + (f", fed {shown}" if shown else "")
        + f": {run.error or run.reason}",
        cause=cause + (f" ({run.reason})" if run.reason and run.error else ""),
        advice=EXPORT_AGAIN,
    )
