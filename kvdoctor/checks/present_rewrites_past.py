"""A step changes the past.

What it means: the present that a step returns does not begin with the past that it was fed: entries of earlier tokens
are changed when tokens are appended, for instance rotated again. What was cached is not valid for the next step.

How it is decided: the first entries of the present are held against the past that was fed, after a run whose logits
differ from the reference.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `why`.

Repair: export again so that the present is the past followed by the new entries.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.checks.caused import Words, caused
from kvdoctor.findings import Fault, check

WORDS = Words(
    cause="entries of the past change when tokens are appended",
    promised="a present that begins with the past",
    advice="export again so that the present is the past and behind it the new entries",
    on_graph=True,
)


@check("KV312", "present-rewrites-past", "runs")
def present_rewrites_past(case: Case) -> Iterator[Fault]:
    """Steps that return other entries than they were fed."""
    yield from caused(case, "present-rewrites-past", WORDS)
