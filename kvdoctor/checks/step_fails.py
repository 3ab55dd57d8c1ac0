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
    """The first step with past length 0."""
    run = case.run("empty-past")
    if run is not None and run.outcome == "failed":
        yield _fault(case, run, "error", "the first step fails when the past has length 0", "a past of length 0")


@check("KV202", "step-fails", "runs")
def step_fails(case: Case) -> Iterator[Fault]:
    """Judged runs that failed, but for what an emptied cache or an empty past explains."""
    empty = case.run("empty-past")
    if empty is not None and empty.outcome == "failed":
        raise CannotCheck("the first step already fails, see KV201")
    run = case.judged
    if run is None:
        return
    if has_wrong_lengths(case):
        raise CannotCheck("the present does not grow as it should, see KV205 and KV206")
    if run.outcome == "failed" and not emptied_explains(case, run):
        yield _fault(case, run, "error", f"decode step {run.failed_step} fails", "a step that runs")
        return
    for experiment, use in ALLOWED.items():
        other = case.run(experiment)
        if other is not None and other.outcome == "failed" and _right(case):
            yield _fault(case, other, "warning", f"decode step {other.failed_step} fails with {use}", use)


def emptied_explains(case: Case, run: Run) -> bool:
    """Whether the only difference to a loop that passes is the emptied cross-attention cache."""
    held = case.run("held-loop")
    emptied = any(slot.emptied for slot in (case.contract.slots if case.contract else ()))
    return emptied and run.experiment == "plain-loop" and held is not None and held.outcome == "passed"


def _right(case: Case) -> bool:
    """The loops with batch and encoder length of their own hold what the contract holds: compare them with that one."""
    held = case.run("held-loop")
    run = held if held is not None and held.steps else case.run("plain-loop")
    return run is not None and run.outcome == "passed"


def _fault(case: Case, run: Run, severity: Severity, cause: str, promised: str) -> Fault:
    place = f'{run.node.op} "{run.node.name}"' if run.node else f"file {case.decode_file}"
    step = run.steps[-1] if run.steps else None
    fed = {name: seen for name, seen in step.fed.items() if name.startswith("past") or "ids" in name} if step else {}
    shown = ", ".join(f"{name} {describe(seen.dtype, list(seen.shape))}" for name, seen in list(fed.items())[:3])
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
