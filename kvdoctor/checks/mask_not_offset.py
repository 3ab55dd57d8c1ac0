"""The causal mask is not anchored to the cache.

What it means: the mask counts the new tokens from the start of the cache, not from its end, or is left out when there
is a past. One token at a time is mostly right; several new tokens on a cache (a chunked prefill, a second turn,
speculation) see tokens that stand behind them, or do not see all of the past. A warning where only that is wrong, an
error where the loop of one token a step is.

How it is decided: of 3 new tokens on a past of 5, the first one's logits must not change with the tokens behind it,
and must change with each entry of the past; of one token a step, with each entry of the past.

Reproduce: `kvdoctor step-test MODEL -v`, experiments `chunk` and `why-chunk`.

Repair: export again with a current exporter; until then feed one token a step once there is a cache.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.checks.caused import Words, caused
from kvdoctor.findings import Fault, check

WORDS = Words(
    cause="the causal mask is not anchored to the cache",
    promised="each new token sees all of the past and nothing behind itself",
    advice="export again; until then feed one token a step once there is a cache",
    on_graph=True,
)


@check("KV315", "mask-not-offset", "runs")
def mask_not_offset(case: Case) -> Iterator[Fault]:
    """One token a step that sees too little, or several that see too much or too little."""
    yield from caused(case, "mask-not-offset", WORDS)
