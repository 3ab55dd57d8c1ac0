"""The causal mask is not offset by the past.

What it means: the mask counts the new tokens from the start of the cache, not from its end, or is missing when there is
a past. One token per step is mostly right; several new tokens on a cache (a chunked prefill, a second turn, speculative
decoding) attend to tokens after them, or do not attend to all of the past. It is an error if steps of one token are
wrong, and a warning if only steps of several tokens are. Or a graph of one token a call attends to places without one.

How it is decided: of 3 new tokens on a past of 5, the logits of the first must not change with the tokens after it, and
must change with each entry of the past. With one token per step, its logits must change with each entry of the past, on
a full ring with those of the same ages as before; where a call takes one token, not with places that hold none.

Reproduce: `kvdoctor step-test MODEL -v`, experiments `chunk`, `why-chunk`, `ring` and `history`.

Repair: export again; until then feed one token per step once there is a cache.
"""

from dataclasses import replace

from kvdoctor.decode.runs import HISTORY
from kvdoctor.diagnose.checks._attribution import leading_cause
from kvdoctor.diagnose.checks._faults import CauseText, report_cause
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Faults, check

AGAIN = "export again with the rows of the mask counted from the past: row i of a step is token past + i"
WORDS = CauseText(
    cause="the causal mask is not offset by the past",
    declared="each new token attends to all of the past, and to no later token",
    advice=f"{AGAIN}; until then feed one token per step once there is a cache",
    on_graph=True,
    on_ring="export again with a mask by position: entry e of a ring of N holds the newest position p with p % N = e",
)
UNWRITTEN = "a step attends to places of the cache that hold no token"
HIDE = "export again: write the new entry first, then attend with a mask that hides every place without a token"


@check("KV315", "mask-not-offset", "runs")
def mask_not_offset(context: RunContext) -> Faults:
    """One token per step that attends to too little, or several that attend to too much or too little."""
    loop = context.checked_loop
    fails = loop is not None and loop.shows == "differs"  # with one token per step already
    leading = leading_cause(context)
    empty = leading is not None and leading[1].experiment == HISTORY
    text = replace(WORDS, cause=UNWRITTEN, advice=HIDE) if empty else replace(WORDS, advice=AGAIN) if fails else WORDS
    yield from report_cause(context, "mask-not-offset", text)
