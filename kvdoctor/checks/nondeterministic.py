"""The same feed gives different logits.

What it means: two runs of the same call differ: dropout or another source of random numbers was left in the graph, or
the export was made in training mode.

How it is decided: the reference run is made twice.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `same-feed`.

Repair: export again in evaluation mode.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.checks.caused import Words, caused
from kvdoctor.findings import Fault, check

WORDS = Words(
    cause="the same feed twice gives different logits",
    promised="the same logits for the same feed",
    advice="export again in evaluation mode (`model.eval()`)",
)


@check("KV314", "nondeterministic", "runs")
def nondeterministic(case: Case) -> Iterator[Fault]:
    """Reference runs that differ from themselves."""
    yield from caused(case, "nondeterministic", WORDS)
