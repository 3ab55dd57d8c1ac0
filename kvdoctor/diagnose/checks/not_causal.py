"""A token's logits change with the tokens after it.

What it means: without any cache, another last token changes the logits of the tokens before it: the graph looks ahead.
A cache cannot work for such a model, because each new token invalidates the entries of the earlier ones.

How it is decided: a sequence, also one beyond each threshold of the graph, is run in one call with each of two last
tokens; and again with that token hidden by the attention mask. The causal mask is named as missing if that removes the
change, or if the graph weighs scores to which no mask was added. Else the finding has the first node that the graph
does not show to be causal: one that bounds the scores after the mask, or moves entries of tokens to other places.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `later-token`.

Repair: export again with the causal mask, or with the node corrected that the finding names; a model that is meant to
look ahead (an encoder, a prefix model) has no use for a cache.
"""

from kvdoctor.analysis.proof.prove import Mixing, describe, find_mixing
from kvdoctor.diagnose.checks._faults import CauseText, report_cause
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Advice, Faults, check

MASK = "export again with the causal mask"
WORDS = CauseText(
    cause="without a cache, the logits of a token change with later tokens",
    declared="logits that depend on the token and earlier ones alone",
    advice="find what mixes the tokens of a call (a mask, an order, a Reshape), or export again",
)


@check("KV313", "not-causal", "runs")
def not_causal(context: RunContext) -> Faults:
    """Earlier logits that a later token changes; by the graph and by a mask it is known whether one is missing."""
    for fault in report_cause(context, "not-causal", WORDS):
        masked = fault.run is not None and fault.run.cause is not None and fault.run.cause.masked
        found = find_mixing(context.stack, context.contract)
        evidence, advice = _describe(found) if found is not None else ((), WORDS.advice)
        advice = MASK if masked else advice  # hidden by a mask, the token changes nothing: nothing else is wrong
        yield fault.also(evidence=(*evidence, *fault.evidence), repair=Advice("re-export", advice))


def _describe(found: Mixing) -> tuple[tuple[str, ...], str]:
    """Where the graph ceases to be causal, and what to do."""
    node = describe(found.node)
    if found.bent is not None:
        bent = describe(found.bent)
        text = f"{bent} bounds the scores after the mask: {node} gives weight to what the mask hid"
        return (text,), f"apply the mask after {bent}, or export again"
    if found.unmasked:
        return (f"{node} weighs the scores of later tokens: no mask hides them",), MASK
    along = " along another axis than that of the keys" if found.node.has("softmax") else ""
    text = f"first node that the graph does not show to be causal: {node}{along}"
    return (text,), f"correct {node} if it mixes the entries of tokens, or export again"
