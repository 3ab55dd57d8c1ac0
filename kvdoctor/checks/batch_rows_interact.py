"""The neighbour in the batch changes a row's logits.

What it means: a sequence gives other logits beside another one than alone, without any cache: the graph mixes the rows
of a batch, or computes all of them from one. Or it does so only once there is a past: all rows attend to the cache of
one of them.

How it is decided: each row of a batch of 2 is run by itself, without a cache. Where that is right and a batch of 2
still decodes wrongly, noise in the cache or the token of one row must not change the other's logits in a step.

Reproduce: `kvdoctor step-test MODEL -v`, experiments `batch-rows` and `why-batch`.

Repair: export again; until then decode one sequence at a time.
"""

from collections.abc import Iterator

from kvdoctor.case import Case, leading_cause, off_by
from kvdoctor.checks.caused import Words, caused
from kvdoctor.findings import Advice, CannotCheck, Fault, check

WORDS = Words(
    cause="a row's logits change with its neighbour, in steps with a past",
    promised="the same logits whatever the neighbour holds",
    advice="export again; until then decode one sequence at a time",
)


@check("KV305", "batch-rows-interact", "runs")
def batch_rows_interact(case: Case) -> Iterator[Fault]:
    """Rows that differ alone and in company."""
    run = case.run("batch-rows")
    leading = leading_cause(case)
    if run is None or run.shows != "differs":
        yield from caused(case, "batch-rows-interact", WORDS)
        return
    if case.contract is None or (leading and leading[0] == "nondeterministic"):
        return
    alone = case.judged
    if alone is not None and any(step.difference and not step.difference.finite for step in alone.steps):
        raise CannotCheck("logits are not finite, see KV304")
    logits = case.contract.graph("prefill").port("logits")
    step = run.steps[run.failed_step or 0] if run.steps else None
    size = off_by(run, step) or run.reason or "other"
    yield Fault(
        severity="warning",
        file=case.contract.graph("prefill").file,
        subject=(logits.name if logits else "logits",),
        where=f"output {logits.name if logits else 'logits'}, {run.experiment}",
        promised="the same logits alone and beside a neighbour",
        observed=f"row {run.failed_step}: logits {size}",
        cause="the neighbour in the batch changes a row's logits",
        advice=Advice("re-export", "export again; until then decode one sequence at a time"),
        use="batch",
    )
