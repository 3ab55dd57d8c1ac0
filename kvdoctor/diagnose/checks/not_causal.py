"""A token's logits change with the tokens after it.

What it means: without any cache, another last token changes the logits of the tokens before it: the graph looks ahead.
A cache cannot work for such a model, because each new token invalidates the entries of the earlier ones.

How it is decided: the whole sequence is run twice, with two different last tokens, in one call each.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `later-token`.

Repair: export again with the causal mask; a model that is meant to look ahead (an encoder, a prefix model) has no use
for a cache.
"""

from kvdoctor.diagnose.checks._faults import CauseText, check_cause

WORDS = CauseText(
    cause="without a cache, the logits of a token change with later tokens",
    declared="logits that depend on the token and earlier ones alone",
    advice="export again with the causal mask",
)
check_cause(__name__, "KV313", "not-causal", "runs", WORDS)
