"""Positions are not offset by the past in cached steps.

What it means: a step with a past computes its tokens as if they stood elsewhere in the sequence, mostly at its start.
Words come out that are right in grammar and wrong in place, and no runtime complains.

How it is decided: in the first layer the entry that a step adds to the cache depends on its token and position alone.
It is held against the entry of the same token in a prefill at its true position, and at every other one. Where keys
hold no position (T5), two entries of the past in each other's place must change the logits.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `why`.

Repair: export again with positions computed from the length of the past, or with `position_ids` as an input.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.checks.caused import Words, caused
from kvdoctor.findings import Fault, check

WORDS = Words(
    cause="cached steps compute their tokens at a wrong position",
    promised="new tokens at the positions behind the past",
    advice="export again with positions that start behind the past",
    on_graph=True,
)


@check("KV310", "positions-not-offset", "runs")
def positions_not_offset(case: Case) -> Iterator[Fault]:
    """Steps whose tokens are computed at the wrong position."""
    yield from caused(case, "positions-not-offset", WORDS)
