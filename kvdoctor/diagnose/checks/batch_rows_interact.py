"""A row's logits depend on the other rows of the batch.

What it means: a sequence has other logits in a batch than alone, even without a cache: the graph mixes the rows of a
batch, or computes all of them from one row. Or this happens only with a past: all rows attend to the cache of one
row.

How it is decided: two rows of a batch of 9 are run alone, and all in reverse order, without a cache. If those logits
agree and a batch of 2, or nine beams before they are reordered, still decode wrongly, the prompt and a step must give
each row the entries and the logits that it gets alone.
A graph that takes one token a call is run with each row alone, and with both in either order.

Reproduce: `kvdoctor step-test MODEL -v`, experiments `batch-rows` and `why-batch`.

Repair: export again; until then decode one sequence at a time.
"""

from kvdoctor.diagnose.checks._attribution import differs_before_reorder, find_faulty_uses, leading_cause
from kvdoctor.diagnose.checks._faults import CauseText, build_difference, report_cause
from kvdoctor.diagnose.context import RunContext
from kvdoctor.errors import CannotCheck, Explained
from kvdoctor.findings import Advice, Fault, Faults, check
from kvdoctor.report.wording.runs import describe_difference

ALONE = "export again; until then decode one sequence at a time"
WORDS = CauseText(
    cause="a step with a past gives a row other logits or entries than the row gets alone",
    declared="the logits and entries that the row gets alone",
    advice=ALONE,
)


@check("KV305", "batch-rows-interact", "runs")
def batch_rows_interact(context: RunContext) -> Faults:
    """Rows with other logits in a batch than alone."""
    run, leading = context.find_run("batch-rows"), leading_cause(context)
    if run is None or run.shows != "differs":
        yield from report_cause(context, "batch-rows-interact", WORDS)
        for one in (run for run, _ in find_faulty_uses(context, "differs") if differs_before_reorder(run)):
            fault = build_difference(context, one, "warning", f"in a batch of nine, {WORDS.cause}")
            yield fault.also(use="batch", repair=Advice("re-export", ALONE))
        return
    if leading and leading[0] == "nondeterministic":
        raise Explained(f"explained by {leading[0]}")
    if any(one is not None and one.not_finite for one in (context.checked_loop, context.find_run("batch"))):
        raise CannotCheck("logits are not finite, see KV304")
    graph = context.contract.graph("prefill")
    logits, step = graph.port("logits"), run.steps[run.failed_step or 0] if run.steps else None
    cause, repair = "a row's logits depend on the other rows of the batch", Advice("re-export", WORDS.advice)
    fault = Fault("warning", (logits.name if logits else "logits",), cause, repair)
    size = describe_difference(run, step) or run.reason or "differ"
    which = f"row {run.failed_step}" if run.failed_step in (0, 1) else "rows in reverse order"
    fault = fault.compare("the same logits alone and in a batch of 9, in any order", f"{which}: logits {size}")
    yield fault.also(file=graph.file, run=run, use="batch")
