"""Padding changes a row's logits.

What it means: a sequence that is padded to the length of its neighbour, on the left of its tokens or behind its
encoder states, gives other logits than alone, although the masks and positions that the graph takes hide the padding.
Batches of sequences of one length are right.

How it is decided: three rows are decoded, two of them padded, with masks that hide the padding and with positions,
where the graph takes them, that do not count it. Each row is held against the same row alone. The control, a mask that
shows the padding, must change the logits.

Reproduce: `kvdoctor step-test MODEL -v`, experiments `left-padding` and `encoder-padding`.

Repair: export again with `position_ids` as an input, or with positions and masks computed from the attention mask;
until then decode sequences of one length together. `--require left-padding` makes the finding an error.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.case import Case
from kvdoctor.checks.caused import Words, decided
from kvdoctor.checks.step_fails import explained_elsewhere, fails_only_so
from kvdoctor.findings import Fault, check

TOKENS = Words(
    cause="padding on the left changes a row's logits",
    promised="the logits of each row alone, without padding",
    advice="export again with position_ids as an input and masks made from attention_mask; until then decode sequences "
    "of one length together",
)
STATES = Words(
    cause="padding behind the encoder states changes a row's logits, although its mask hides them",
    promised="the logits of each row alone, with its own encoder states",
    advice="export again with the encoder mask used in every cross-attention; until then decode inputs of one length "
    "together",
)


@check("KV316", "padding-changes-logits", "runs")
def padding_changes_logits(case: Case) -> Iterator[Fault]:
    """Rows that differ with padding and without, where unpadded ones are right."""
    if explained_elsewhere(case):
        return
    for run, use in fails_only_so(case, "differs"):
        words = {"left-padding": TOKENS, "encoder-padding": STATES}.get(run.experiment)
        finite = all(step.difference is None or step.difference.finite for step in run.steps)
        if words is not None and finite:
            yield replace(decided(case, run, words, use.severity), use=use.required)
