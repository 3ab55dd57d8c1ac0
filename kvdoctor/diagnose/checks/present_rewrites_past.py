"""A step changes the past.

What it means: the present that a step returns does not begin with the past that it was fed: entries of earlier tokens
change when tokens are appended, for instance because they are rotated again. The cache is wrong for the next step.

How it is decided: the first entries of the present are compared with the past that was fed, after a run whose logits
differ from the reference run.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `why`.

Repair: export again so that the present is the past followed by the new entries.
"""

from collections.abc import Iterator

from kvdoctor.diagnose.checks._faults import CauseText, report_cause
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Fault, check

WORDS = CauseText(
    cause="entries of the past change when tokens are appended",
    declared="a present that begins with the past",
    advice="export again so that the present is the past followed by the new entries",
    on_graph=True,
)


@check("KV312", "present-rewrites-past", "runs")
def present_rewrites_past(context: RunContext) -> Iterator[Fault]:
    """Steps that change the entries of earlier tokens."""
    yield from report_cause(context, "present-rewrites-past", WORDS)
