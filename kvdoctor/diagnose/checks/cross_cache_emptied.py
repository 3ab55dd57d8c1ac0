"""A decode step returns an empty cross-attention cache.

What it means: a merged decoder (`decoder_model_merged.onnx`) has two branches that must return the same outputs. The
cached branch does not compute the cross-attention cache, so the exporter fills its outputs with constants without
elements, of shape (0, heads, 1, head_dim) and with a null data pointer. A loop that feeds every present back passes
this constant to the next step, which fails in a Reshape (`The dimension with value zero exceeds the dimension size of
the input tensor`) or in a MatMul (`right operand cannot broadcast on dim 0`), or runs without the encoder and generates
wrong tokens. Bindings that build a slice from the pointer abort. Dynamic axes, the IR version and the runtime are not
involved, and disabling the cache only hides the fault at quadratic cost.

Reproduce: `kvdoctor step-test MODEL`: the plain loop fails at step 2, the held loop passes.

Repair: `kvdoctor re-export MODEL -o FIXED` makes the cached branch return its past, after which every loop works. Or in
your loop: keep `present.*.encoder.*` of the first step and feed those values at every later step; feed back only
`present.*.decoder.*`.

Source: `_unify_onnx_outputs` in optimum/onnx/transformations_utils.py (optimum-onnx 0.1.0).
"""

from collections.abc import Iterator

from kvdoctor.contract import Slot, describe
from kvdoctor.diagnose.checks._faults import list_nodes
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Fault, Faults, check
from kvdoctor.model.edit import describe_graph
from kvdoctor.report.wording import shorten_names

REPAIR = "or, in your loop, keep the prefill values of these outputs and feed them at every step"


@check("KV203", "cross-cache-emptied", "contract")
def cross_cache_emptied(context: ContractContext) -> Faults:
    """Slots that a decode step returns without elements, by the graph or by the runs."""
    if not context.emptied_slots:
        return
    slot, names = context.emptied_slots[0], tuple(s.present for s in context.emptied_slots if s.present)
    plain = context.find_run("plain-loop")
    view, shape = context.decode_graph, context.decode_graph.emptied(slot.present or "")
    graph = describe_graph(view, view.behind(slot.present or "")[0].graph) if view.branches else "decode graph"
    constant = f"{graph}: a constant of shape {list(shape or ())} is returned as {shorten_names(names)}, not the past"
    harmless = context.consumer == "held" or (plain is not None and plain.outcome == "passed")
    cause = f"a decode step returns {shorten_names(names)} without elements"
    fault = Fault("note" if harmless else "error", names, cause, context.advise_graph_repair(REPAIR))
    declared = describe(slot.dtype, context.decode_graph.outputs[slot.present or ""].shape)
    fault = fault.compare(declared, _observed(context, slot)).also(nodes=list_nodes(plain))
    where, evidence = f"{graph}, {'computed' if shape is None else 'constant'}", () if shape is None else (constant,)
    yield fault.also(where=where, effects=tuple(_list_effects(context)), evidence=evidence)


def _observed(context: ContractContext, slot: Slot) -> str:
    plain = context.find_run("plain-loop")
    for step, seen in context.observed_presents(slot):
        pointer = ", data pointer null" if seen.null else ""
        prefill = plain.steps[0].returned.get(slot.filled_by or "") if plain and plain.steps else None
        before = f" (prefill: {describe(prefill.dtype, prefill.shape)})" if prefill else ""
        return f"decode step {step.step}: {describe(seen.dtype, seen.shape)}{pointer}{before}"
    return f"in the graph: a constant {describe(slot.dtype, context.decode_graph.emptied(slot.present or ''))}"


def _list_effects(context: ContractContext) -> Iterator[str]:
    plain = context.find_run("plain-loop")
    if plain is None or not plain.steps:
        yield "when it is fed back, a later decode step fails or computes without the encoder"
        return
    if plain.outcome == "failed":
        node = f" in {plain.node.shown}" if plain.node else ""
        yield f"when it is fed back, decode step {plain.failed_step} fails{node}"
    elif plain.outcome == "died":
        yield f"when it is fed back, decode step {plain.failed_step} ends the process of the runtime ({plain.died_by})"
    elif plain.outcome == "differs":
        yield f"when it is fed back, decode step {plain.failed_step} runs, with wrong logits"
    held = context.find_run("held-loop")
    if held is not None and held.outcome == "passed":
        yield "keeping the prefill values instead makes every step match the reference logits"
