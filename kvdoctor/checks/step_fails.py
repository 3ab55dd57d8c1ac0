"""A decode step fails.

What it means: the runtime stops with an error in a call that the cache contract allows, for a cause that no other
check names. KV201 is the first step with an empty past, KV202 any other step.

Reproduce: `kvdoctor step-test MODEL -v` lists what each step was fed and what came back.

Repair: the node and the shapes that came in show which axis the export has fixed. `kvdoctor re-export` frees it where
numbers of the graph stand for it, else export again with other sample sizes. Several sequences at once or another
encoder length may fail while one sequence is right: then it is a warning. A length that no config declares usable is no
fault.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.case import Case, broken_promise, leading_cause
from kvdoctor.checks.lengths import has_wrong_lengths
from kvdoctor.checks.placed import because, node_words
from kvdoctor.checks.session_refused import fails_where_opened
from kvdoctor.contract import describe
from kvdoctor.findings import Advice, CannotCheck, Fault, Severity, check
from kvdoctor.trace import Run, Seen, Step
from kvdoctor.uses import USES, Use

TELLING = ("token_ids", "token_and_position", "embeddings", "past")

SHORT_STATE = Advice(
    "caller", "bring that state to its declared size before it is fed (zeros in front), or export again so that it is"
)
EXPORT_AGAIN = "or export again with sample sizes of 2 or more, all different"


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
        yield _fault(case, run, "error", _what_fails(run), "a step that runs")
        return
    for other, use in fails_only_so(case, "failed"):
        if other.experiment in ("chunk", "full-context"):
            continue  # those have checks of their own
        last = other.steps[-1] if other.steps else None
        uncached = last is not None and last.phase != "decode"
        if other.experiment == "long-past" and last and uncached and (_limit(case) or 0) < last.new_tokens:
            raise CannotCheck(
                f"{last.past_length + last.new_tokens} tokens fail, and no config declares so many usable"
            )
        fault = _fault(case, other, use.severity, f"with {use.words}, {_what_fails(other)}", use.words)
        yield replace(fault, use=use.required)


def fails_only_so(case: Case, outcome: str) -> Iterator[tuple[Run, Use]]:
    """Runs of other sizes with that outcome, where the judged loop itself passes and no simpler use fails as well."""
    judged = case.judged
    if judged is None or judged.shows != "passed":
        return
    wrong = {run.experiment for run in case.runs if run.shows in ("failed", "differs")}
    for experiment, use in USES.items():
        run = case.run(experiment)
        if run is not None and run.shows == outcome and not wrong.intersection(use.after):
            yield run, use


def _what_fails(run: Run) -> str:
    last = run.steps[-1] if run.steps else None
    if last is not None and last.phase == "reference":
        return f"the reference run, {last.new_tokens} tokens in one call without a cache, fails"
    return "the first step fails" if run.failed_step == 0 else f"decode step {run.failed_step} fails"


def _limit(case: Case) -> int | None:
    return case.contract.context_limit if case.contract else None


def explained_elsewhere(case: Case, name: str = "cached-differs") -> str | None:
    """The check that names the cause of whatever the runs show, or None: one fault is one finding.

    `name` is the check that asks: what it finds itself does not explain it away.
    """
    if case.declared_faults:
        return f"explained by {', '.join(case.declared_faults)}"
    if fails_where_opened(case):
        return "the runtime refuses the file, see KV010"
    if _rejects_empty_past(case):
        return "the first step already fails, see KV201"
    if has_wrong_lengths(case):
        return "the present does not grow as it should, see KV205 and KV206"
    leading = leading_cause(case)
    if leading is not None and leading[0] not in (name, "cached-differs"):
        return f"explained by {leading[0]}"
    return None


def _rejects_empty_past(case: Case) -> bool:
    empty, dummy = case.run("empty-past"), case.run("dummy-past-runs")
    return empty is not None and empty.outcome == "failed" and dummy is not None and dummy.outcome == "passed"


def _telling(case: Case, step: Step | None) -> list[tuple[str, Seen]]:
    """The tokens and pasts that a call was fed."""
    if step is None or case.contract is None:
        return []
    decode = step.phase == "decode"
    ports = case.contract.graph("decode" if decode else "prefill").inputs
    return [(port.name, step.fed[port.name]) for port in ports if port.role in TELLING and port.name in step.fed]


def _fault(case: Case, run: Run, severity: Severity, cause: str, promised: str) -> Fault:
    node = run.place.node if run.place and run.place.node else run.node
    place = f'{node.op} "{node.name}"' if node else f"file {case.decode_file}"
    place = node_words(run.place) if run.place and run.place.node else place
    step = run.steps[-1] if run.steps else None
    promise = broken_promise(case, run)
    shown = ", ".join(f"{name} {describe(seen.dtype, seen.shape)}" for name, seen in _telling(case, step)[:3])
    call = "reference run" if step and step.phase == "reference" else f"step {run.failed_step}"
    return Fault(
        severity=severity,
        file=case.decode_file,
        subject=(node.name,) if node else (case.decode_file,),
        where=place,
        apart=(*(() if run is case.judged else (run.experiment,)), *((node.op,) if node and not node.name else ())),
        promised=promised,
        observed=f"{run.experiment}, {call}" + (f", fed {shown}" if shown else "") + f": {run.error or run.reason}",
        cause=cause + (f" ({run.reason})" if run.reason and run.error else "") + (f": {promise}" if promise else ""),
        advice=SHORT_STATE if promise else case.re_export(EXPORT_AGAIN),
        because=because(run),
    )
