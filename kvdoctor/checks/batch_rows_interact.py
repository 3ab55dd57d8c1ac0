"""The neighbour in the batch changes a row's logits.

What it means: a sequence gives other logits beside another one than alone, without any cache: the graph mixes the rows
of a batch, or computes all of them from one.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `batch-rows`: each row of a batch of 2 is run by itself.

Repair: export again; until then decode one sequence at a time.
"""

from collections.abc import Iterator

from kvdoctor.case import Case, leading_cause, off_by
from kvdoctor.findings import Advice, Fault, check


@check("KV305", "batch-rows-interact", "runs")
def batch_rows_interact(case: Case) -> Iterator[Fault]:
    """Rows that differ alone and in company."""
    run = case.run("batch-rows")
    leading = leading_cause(case)
    if run is None or run.shows != "differs" or case.contract is None or (leading and leading[0] == "nondeterministic"):
        return
    logits = case.contract.graph("prefill").port("logits")
    step = run.steps[run.failed_step or 0] if run.steps else None
    size = off_by(run, step) or run.reason or "other"
    yield Fault(
        severity="warning",
        file=case.contract.graph("prefill").file,
        subject=(logits.name if logits else "logits",),
        where=f"output {logits.name if logits else 'logits'}, batch of 2",
        promised="the same logits alone and beside a neighbour",
        observed=f"row {run.failed_step}: logits {size}",
        cause="the neighbour in the batch changes a row's logits",
        advice=Advice("re-export", "export again; until then decode one sequence at a time"),
    )
