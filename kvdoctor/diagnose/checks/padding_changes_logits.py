"""Padding changes a row's logits.

What it means: a sequence that is padded to the length of another row, on the left of its tokens or after its encoder
states, has other logits than alone, although the masks and positions that the graph takes exclude the padding. Batches
of sequences of the same length are right.

How it is decided: three rows are decoded, two of them padded, with masks that exclude the padding and with positions,
if the graph takes them, that do not count it. Each row is compared with the same row alone. The control, a mask that
includes the padding, must change the logits.

Reproduce: `kvdoctor step-test MODEL -v`, experiments `left-padding` and `encoder-padding`.

Repair: export again with `position_ids` as an input, or with positions and masks computed from the attention mask;
until then decode only sequences of the same length together. `--require left-padding` makes the finding an error.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.diagnose.checks._attribution import find_explanation, find_faulty_uses
from kvdoctor.diagnose.checks._faults import CauseText, build_fault
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Fault, check

TOKENS = CauseText(
    cause="padding on the left changes a row's logits",
    declared="the logits of each row alone, without padding",
    advice="export again with position_ids as an input and masks made from attention_mask; until then decode only "
    "sequences of the same length together",
)
STATES = CauseText(
    cause="padding after the encoder states changes a row's logits, although the mask excludes it",
    declared="the logits of each row alone, with its own encoder states",
    advice="export again with the encoder mask used in every cross-attention; until then decode only inputs of the "
    "same length together",
)


@check("KV316", "padding-changes-logits", "runs")
def padding_changes_logits(context: RunContext) -> Iterator[Fault]:
    """Rows with other logits when padded, where rows without padding are right."""
    if find_explanation(context):
        return
    for run, use in find_faulty_uses(context, "differs"):
        words = {"left-padding": TOKENS, "encoder-padding": STATES}.get(run.experiment)
        finite = all(step.difference is None or step.difference.finite for step in run.steps)
        if words is not None and finite:
            yield replace(build_fault(context, run, words, use.severity), use=use.required)
