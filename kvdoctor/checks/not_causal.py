"""A token's logits change with the token behind it.

What it means: without any cache, another last token changes the logits of the tokens before it: the graph looks
ahead. A cache cannot be right for such a model: what was computed for a token is out of date with the next one.

How it is decided: the whole sequence is run twice, with two last tokens, in one call each.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `later-token`.

Repair: export again with the causal mask; a model that is meant to look ahead (an encoder, a prefix model) has no use
for a cache.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.checks.caused import Words, caused
from kvdoctor.findings import Fault, check

WORDS = Words(
    cause="without a cache, logits of a prefix change when later tokens change",
    promised="logits that depend on earlier tokens alone",
    advice="export again with the causal mask",
)


@check("KV313", "not-causal", "runs")
def not_causal(case: Case) -> Iterator[Fault]:
    """Reference runs that look ahead."""
    yield from caused(case, "not-causal", WORDS)
