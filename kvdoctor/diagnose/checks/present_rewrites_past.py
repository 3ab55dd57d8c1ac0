"""A step changes the past.

What it means: the present that a step returns does not begin with the past that it was fed: entries of earlier tokens
change when tokens are appended, for instance because they are rotated again, or the oldest ones are cut off although
later tokens attend to them. The cache is wrong for the next step.

How it is decided: the first entries of the present are compared with the past that was fed, after a run whose logits
differ from the reference run. The finding names the nodes between past and present that change entries or cut them off.
Where the attention of the same step reads the changed entries, it is KV317. A step on a full ring changes the oldest
entry alone.

Reproduce: `kvdoctor step-test MODEL -v`, experiments `why` and `ring`.

Repair: export again so that the present is the past followed by the new entries.
"""

from dataclasses import replace

from kvdoctor.diagnose.checks._attribution import cause_in_use, leading_cause
from kvdoctor.diagnose.checks._dataflow import describe_changes
from kvdoctor.diagnose.checks._faults import RETAIN_WINDOW, CauseText, report_cause
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Faults, check

NAME = "present-rewrites-past"
WORDS = CauseText(
    cause="entries of the past change when tokens are appended",
    declared="a present that begins with the past",
    advice="export again so that the present is the past followed by the new entries",
    on_graph=True,
    on_ring="export again so that a step writes over the oldest entry alone: position p in entry p % N of a ring of N",
)
DROPPED = replace(
    WORDS, cause="a step drops the oldest entries of the past, which later tokens attend to", advice=RETAIN_WINDOW
)


@check("KV312", "present-rewrites-past", "runs")
def present_rewrites_past(context: RunContext) -> Faults:
    """Steps that change the entries of earlier tokens."""
    # What the experiment that decided saw of the slot concerned.
    found = [leading_cause(context), *(cause_in_use(context, run.experiment) for run in context.runs)]
    causes = (run.cause for _, run in filter(None, found))
    cause = next((one for one in causes if one is not None and one.name == NAME), None)
    for fault in report_cause(context, NAME, DROPPED if cause is not None and cause.dropped else WORDS):
        changes = describe_changes(context, cause.slot) if cause is not None else ()
        # What is cut off is missing from every later value: the first value that differs says nothing of the place.
        first = fault.evidence if cause is None or not (cause.dropped and changes) else ()
        yield fault.also(evidence=(*changes, *first))
