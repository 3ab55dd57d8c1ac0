"""Positions are not offset by the past in cached steps.

What it means: a step with a past computes its tokens at a wrong position of the sequence, mostly at its start. The
generated text is grammatical but wrong, and no runtime reports an error.

How it is decided: in the first layer, the entry that a step adds to the cache depends only on its token and position.
It is compared with the entries of the same token in prefills at its true position and at all others, which shows the
position that it was given. If keys do not encode positions (T5), swapping two entries of the past must change the
logits. If a graph takes one token a call, one token must have other keys at each position, or the same ones at all and
two exchanged entries change the logits. On a full ring one token has a new key, and
equal distances have equal effects.

Reproduce: `kvdoctor step-test MODEL -v`, experiments `why`, `history` and `ring`.

Repair: export again with positions computed from the length of the past, or with `position_ids` as an input.
"""

from kvdoctor.diagnose.checks._faults import CauseText, check_cause

WORDS = CauseText(
    cause="cached steps compute their tokens at wrong positions",
    declared="new tokens at the positions after the past",
    advice="export again with positions that start after the past",
    on_graph=True,
    on_ring="export again with positions that go on beyond the size of the ring; an entry alone is placed modulo it",
)
check_cause(__name__, "KV310", "positions-not-offset", "runs", WORDS)
