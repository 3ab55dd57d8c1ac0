"""Padding changes a row's logits.

What it means: a sequence that is padded to the length of another row, on the left of its tokens, between its prompt and
the next token, or after its encoder states, has other logits than alone, although the masks and positions that the
graph takes exclude the padding. Batches of sequences of the same length are right. Or rows of a buffer of fixed size,
which need no padding, are taken for equally long: the index of the first row is used for all.

How it is decided: three rows are decoded, two of them padded, with masks that exclude the padding and with positions,
if the graph takes them, that do not count it. Each row is compared with the same row alone. The control, a mask that
includes the padding, must change the logits.

Reproduce: `kvdoctor step-test MODEL -v`, experiments `left-padding`, `encoder-padding` and `rows-apart`, with
`--thorough` also `right-padding`.

Repair: where positions count the padding of the new tokens alone, `kvdoctor re-export` counts it along the whole mask.
Otherwise export again with `position_ids` as an input, or with positions and masks computed from the attention mask;
until then decode only sequences of the same length together. `--require left-padding` makes the finding an error.
"""

from dataclasses import replace

from kvdoctor.analysis.proof.prove import describe, find_mixing
from kvdoctor.analysis.thresholds import find_sliced_counts
from kvdoctor.diagnose.checks._attribution import find_faulty_uses, leave_to_other
from kvdoctor.diagnose.checks._faults import CauseText, build_fault
from kvdoctor.diagnose.context import RunContext
from kvdoctor.findings import Faults, check
from kvdoctor.model.operators import operator_of

TOKENS = CauseText(
    cause="padding on the left changes a row's logits",
    declared="the logits of each row alone, without padding",
    advice="export again so that padding is left out: positions from position_ids, masks from attention_mask; until "
    "then decode only sequences of the same length together",
)
BETWEEN = CauseText(
    cause="padding between the prompt and the next tokens changes a row's logits",
    declared=TOKENS.declared,
    advice=TOKENS.advice,
)
APART = CauseText(
    cause="a row's logits change where the other row of the batch has another number of tokens",
    declared="the logits of each row alone, with the index and the positions of its own",
    advice="export again with the index, positions and mask of each row used for it; until then decode only sequences "
    "of the same length together",
)
STATES = CauseText(
    cause="padding after the encoder states changes a row's logits, although the mask excludes it",
    declared="the logits of each row alone, with its own encoder states",
    advice="export again with the encoder mask used in every cross-attention; until then decode only inputs of the "
    "same length together",
)
MASKS = ("attention_mask", "additive_mask", "padding_mask")
KINDS = {"left-padding": TOKENS, "right-padding": BETWEEN, "encoder-padding": STATES, "rows-apart": APART}


SLICED = CauseText(
    cause="positions count the padding of a step's own tokens alone: the prefill is right, and a step after it is not",
    declared="the logits of each row alone: each token at the number of tokens before it, padding left out",
    advice="export again with position_ids as an input, or with padding counted along the whole mask",
    on_graph=True,
)


@check("KV316", "padding-changes-logits", "runs")
def padding_changes_logits(context: RunContext) -> Faults:
    """Rows with other logits when padded, where rows without padding are right."""
    from kvdoctor.decode.experiments.padding import list_unmasked

    leave_to_other(context)
    for run, use in find_faulty_uses(context, "differs"):
        words = KINDS.get(run.experiment)
        # The prefill is right and a step is not, in a graph that counts the padding of the new tokens alone.
        mask, later = context.contract.graph("decode").port("attention_mask"), (run.failed_step or 0) > 0
        if words is TOKENS and later and mask and any(find_sliced_counts(context.decode_graph, mask.name)):
            words = SLICED
        lacking = list_unmasked(context.contract) if words is STATES else []
        if words is not None and lacking:
            words = replace(words, cause=f"padding after the encoder states changes a row's logits: {lacking[0]}")
        if words is not None and not run.not_finite:
            fault = build_fault(context, run, words, use.severity).also(use=use.required)
            yield fault.also(evidence=(*_find_place(context), *fault.evidence)) if words is TOKENS else fault


def _find_place(context: RunContext) -> tuple[str, ...]:
    """Where positions do not rest on the mask, or the first node that may mix rows or tokens; () for neither."""
    graph, dataflow = context.contract.graph("decode"), context.stack.main.dataflow
    ids, masks = graph.port("token_ids"), [port.name for port in graph.inputs if port.role in MASKS]
    flow = dataflow.flow if dataflow is not None and masks and graph.port("position_ids") is None else None
    found = ((node, node.input(at)) for node in (flow.nodes if flow else ()) for at in operator_of(node.op).places)
    other = {"", ids.name if ids else "", *(flow.fixed if flow else ())}  # fixed: of a length out of a shape
    places = {value: node for node, value in found if value not in other}
    if places and dataflow and all(dataflow.descent.ancestors(value).isdisjoint(masks) for value in places):
        node = describe(next(iter(places.values())))
        return (f"{node} takes positions that do not depend on {masks[0]}: padding counts among them",)
    mixing = find_mixing(context.stack, context.contract)
    return () if mixing is None else (f"first node that the graph does not show to be right: {describe(mixing.node)}",)
