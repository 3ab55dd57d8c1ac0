"""A decode step computes wrong logits, and it is known whether it misreads the cache or fills it wrongly.

How it is decided: the entries of a prefill are compared with those of a longer one, and each new entry with the entry
of the same token in one call over all tokens, layer by layer; then noise is put into entries of the past. Where all
calls store the same entries, the graph decides at the first value that differs: entries are stored wrong if the
attention uses other new ones and reads old ones as they are, and read wrong if it uses the new ones that are stored and
changes old ones. Positions, masks, exchanged layers and the like have checks of their own, which go first. A difference
that only a float32 copy of the model shows is a warning.

Reproduce: `kvdoctor step-test MODEL -v`, experiment `why`.

Repair: `kvdoctor re-export MODEL -o FIXED` where entries are changed on their way out of the graph; otherwise export
again. The evidence names the first layer that is wrong.
"""

from kvdoctor.diagnose.checks._attribution import (
    find_faulty_uses,
    find_named_cause,
    find_wrong_length,
    leading_cause,
    leave_to_other,
)
from kvdoctor.diagnose.checks._dataflow import (
    describe_changes,
    describe_rounded,
    find_exchanged_entries,
    find_other_entries,
)
from kvdoctor.diagnose.checks._faults import HIDDEN, advise_place, build_difference, build_use_difference
from kvdoctor.diagnose.context import ContractContext, RunContext
from kvdoctor.findings import Advice, Fault, Faults, Severity, check


@check("KV317", "cache-misread", "runs")
def cache_misread(context: RunContext) -> Faults:
    """Right entries in the cache, and wrong logits.

    What it means: the entries of the cache are right, but the logits that a step computes from them are wrong. The past
    is scaled, reordered, cut or masked on its way to the attention, the entries are clipped or cast to integers on
    their way out of the graph, or what follows the attention differs from the call without a cache. A cache that is
    only rounded on its way out is KV301.
    """
    yield from _report(
        context, "cache-misread", "the cache holds what a prefill returns, and a step computes wrong logits from it"
    )


@check("KV317", "cache-misread", "contract")
def orders_differ(context: ContractContext) -> Faults:
    """Layers whose new keys are put before the past, and whose new values after it, or the other way round."""
    if context.checked_loop is None or context.passes_parity:
        return
    slots = [slot for slot in context.contract.of_kind("self-attention") if slot.growth in ("grow", "shared")]
    first = {slot.layer: slot.past for slot in slots if slot.prepended}
    after = {slot.layer: slot.past for slot in slots if not slot.prepended}
    if mixed := [layer for layer in first if layer in after]:
        cause = "keys and values of a layer are not in the same order of tokens"
        names = tuple(name for layer in mixed for name in (first[layer], after[layer]))
        advice = Advice("re-export", "join new keys and new values to the past at the same end, or export again")
        fault = Fault("error", names, cause, advice).compare(
            "new keys and new values at the same end of their pasts",
            f"new entries come before {names[0]}, and after {names[1]}",
        )
        yield fault.also(confidence="confirmed" if context.loop_is_wrong else "suspected")


@check("KV318", "new-entries-wrong", "runs")
def new_entries_wrong(context: RunContext) -> Faults:
    """Wrong keys or values that a step adds to the cache.

    What it means: a step adds other keys or values than a call without a cache computes for the same token, or a
    prefill returns other entries than its own attention used.
    """
    text = "the keys or values that are added to the cache are not those of a call without a cache"
    yield from _report(context, "new-entries-wrong", text)


EXCHANGED = ("layers-swapped", "key-value-swapped")
"""Causes that say more of entries which a step does not use: they are those of another slot."""


@check("KV318", "new-entries-wrong", "contract")
def other_entries_stored(context: ContractContext) -> Faults:
    """Slots that a step returns with other new entries than it uses itself."""
    leading = leading_cause(context)
    if context.checked_loop is None or context.passes_parity or (leading is not None and leading[0] in EXCHANGED):
        return
    others = {*context.rounded_presents, *(slot.present for slot, _ in find_exchanged_entries(context))}
    loop, slots = context.find_run("plain-loop"), (s for s in context.contract.slots if s.present not in others)
    slots = (slot for slot in slots if slot.trimmed or find_wrong_length(slot, loop) is None)  # KV205 has a length
    seen = ((slot.present or "", find_other_entries(context, slot)) for slot in slots)
    wrong = {name: text for name, text in seen if text is not None}
    if wrong:
        advice = Advice("re-export", "return the value that the step uses, and export again")
        fault = Fault("error", tuple(wrong), "a step uses one value for its new entries and returns another", advice)
        declared = "the past, then the new entries that the same step uses"
        fault = fault.compare(declared, next(iter(wrong.values())))
        yield fault.also(confidence="confirmed" if context.loop_is_wrong else "suspected")


def _report(context: RunContext, name: str, cause: str) -> Faults:
    run, leading = context.checked_loop, leading_cause(context)
    for other, use in find_faulty_uses(context, "differs"):
        if find_named_cause(context, other) == name and other.location is not None and other.location.cause == name:
            found = build_use_difference(context, other, use, f": {cause}")
            yield found.also(repair=Advice("re-export", advise_place(other)))
    if run is None or run.shows != "differs" or leading is None or leading[0] != name:
        return
    leave_to_other(context, name)
    severity: Severity = "warning" if run.hidden else "error"
    found = build_difference(context, run, severity, f"{cause}, {HIDDEN}" if run.hidden else cause)
    decided = leading[1].cause
    slot = decided.slot if decided is not None else ""
    changes = (describe_changes(context, slot) or describe_rounded(context, slot)) if slot else ()
    advice = context.advise_graph_repair(f"or {advise_place(run)}")
    yield found.also(evidence=(*changes, *found.evidence), repair=advice)
