"""The two branches, or the two files, compute different things.

What it means: the graph that fills the cache and the one that takes it hold different weights or different
mathematics: files of two exports were put together, or only one of them was quantised or trained further.

How it is decided: the cached branch is run from an empty past, where no cache, position or mask can be at fault, and
gives the very first token other logits than the branch without a past.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `why`.

Repair: export both files again from one checkpoint.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.checks.caused import Words, caused
from kvdoctor.findings import Fault, check

WORDS = Words(
    cause="the graph with a past and the one without compute different things",
    promised="the same logits for the first token from both",
    advice="export both again from one checkpoint",
)


@check("KV311", "branches-disagree", "runs")
def branches_disagree(case: Case) -> Iterator[Fault]:
    """Branches that differ where no cache is at play."""
    yield from caused(case, "branches-disagree", WORDS)
