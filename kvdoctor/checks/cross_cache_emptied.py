"""A decode step returns an empty cross-attention cache.

What it means: a merged decoder (`decoder_model_merged.onnx`) has two branches that must return the same outputs. The
cached branch does not compute the cross-attention cache, so the exporter fills its outputs with constants without
elements, of shape (0, heads, 1, head_dim) and with a null data pointer. A loop that feeds every present back hands
this constant to the next step. That step dies in a Reshape (`The dimension with value zero exceeds the dimension size
of the input tensor`) or in a MatMul (`right operand cannot broadcast on dim 0`), or runs without the encoder and
gives wrong words. Bindings that build a slice from the pointer abort. Dynamic axes, the IR version and the runtime
have no part in it, and switching the cache off only hides it at quadratic cost.

Reproduce: `kvdoctor step-test MODEL`: the plain loop fails at step 2, the held loop passes.

Repair: in the graph, `kvdoctor re-export MODEL -o FIXED` makes the cached branch pass its past through, and every loop
is right. Or in your loop: keep `present.*.encoder.*` of the first step and feed those values at every later step; feed
back only `present.*.decoder.*`.

Source: `_unify_onnx_outputs` in optimum/onnx/transformations_utils.py (optimum-onnx 0.1.0).
"""

from collections.abc import Iterator

from kvdoctor.case import Case, first_and_count
from kvdoctor.contract import Slot, describe
from kvdoctor.findings import Fault, check
from kvdoctor.trace import Run

REPAIR = "or, in your loop, hold the prefill value of these outputs and feed it at every step"


@check("KV203", "cross-cache-emptied", "contract")
def cross_cache_emptied(case: Case) -> Iterator[Fault]:
    """Slots that a decode step returns without elements: read from the graph, or shown by the runs."""
    if not case.emptied:
        return
    slot, names = case.emptied[0], tuple(s.present for s in case.emptied if s.present)
    plain = case.run("plain-loop")
    harmless = case.consumer == "held" or (plain is not None and plain.outcome == "passed")
    yield Fault(
        severity="note" if harmless else "error",
        file=case.decode_file,
        subject=names,
        where=_where(case, slot),
        promised=describe(slot.dtype, case.main.outputs[slot.present or ""].shape),
        observed=_observed(case, slot),
        cause=f"a decode step returns {first_and_count(names)} without elements",
        advice=case.re_export(REPAIR),
        follows=tuple(_consequences(case)),
    )


def _where(case: Case, slot: Slot) -> str:
    branch = f'If "{case.main.branches[1].node.name}", cached branch' if case.main.branches else "decode graph"
    return f"{branch}, {'constant' if case.main.emptied(slot.present or '') is not None else 'computed'}"


def _observed(case: Case, slot: Slot) -> str:
    for step, seen in case.returned(slot):
        pointer = ", data pointer null" if seen.null else ""
        prefill = case.run("plain-loop").steps[0].returned.get(slot.filled_by or "")  # type: ignore[union-attr]
        before = f"   (prefill: {describe(prefill.dtype, prefill.shape)})" if prefill else ""
        return f"decode step {step.step}: {describe(seen.dtype, seen.shape)}{pointer}{before}"
    return f"in the graph: a constant {describe(slot.dtype, case.main.emptied(slot.present or ''))}"


def _consequences(case: Case) -> Iterator[str]:
    plain = case.run("plain-loop")
    if plain is None or not plain.steps:
        yield "fed back, a later decode step fails or computes without the encoder"
        return
    if plain.outcome == "failed":
        yield f"fed back, decode step {plain.failed_step} fails{_place(plain)}"
    elif plain.outcome == "died":
        yield f"fed back, decode step {plain.failed_step} takes the runtime's process with it ({plain.died_by})"
    elif plain.outcome == "differs":
        yield f"fed back, decode step {plain.failed_step} runs and gives wrong logits"
    held = case.run("held-loop")
    if held is not None and held.outcome == "passed":
        yield "held instead, every step has the logits of the reference run"


def _place(run: Run) -> str:
    return f' in {run.node.op} "{run.node.name}"' if run.node else ""
