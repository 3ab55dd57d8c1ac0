"""Layers differ, or one is missing.

What it means: heads or head width differ between layers, a layer number is skipped, or a layer has a key without a
value, and nothing in the graph explains it. It is a note where the decode steps are right: the model is built this way.

Reproduce: `kvdoctor inspect MODEL` lists the slots by layer.

Repair: export again; if the model is really built this way, ignore this check for it.
"""

from kvdoctor.contract import Slot
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.findings import Advice, Fault, Faults, check
from kvdoctor.report.wording import shorten_names

MOST_NAMED = 8
EXPORT_AGAIN = Advice("re-export", "export again, or ignore this check if the model is built this way")


@check("KV106", "layers-inconsistent", "contract")
def layers_inconsistent(context: ContractContext) -> Faults:
    """Compare the layers of each kind of cache."""
    loop = context.checked_loop
    proved = loop is not None and loop.shows == "passed"
    is_stage = context.contract.graph("decode").port("token_ids") is None
    for kind in ("self-attention", "cross-attention"):
        slots = tuple(slot for slot in context.contract.of_kind(kind) if slot.layer is not None)
        others = {s.layer for s in context.contract.slots if s.kind != kind and s.layer is not None}
        reasons = [*_find_gaps(slots, others, is_stage), *_find_lone_parts(slots), *_find_unequal_sizes(slots)]
        if reasons:
            cause = f"the caches of the layers differ: {reasons[0]}" + ", and decode steps with them are right" * proved
            subject = tuple(slot.past for slot in slots)
            fault = Fault("note" if proved else "warning", subject, cause, EXPORT_AGAIN, where=f"{kind} cache")
            yield fault.compare("the same slots in every layer", "; ".join(reasons))


def _find_gaps(slots: tuple[Slot, ...], others: set[int], is_stage: bool) -> list[str]:
    """Layers without a slot or another state (a hybrid) between others; a stage of a pipeline begins at any layer."""
    layers = {slot.layer for slot in slots if slot.layer is not None}
    first = min(layers, default=0) if is_stage else 0
    lacking = sorted(set(range(first, max(layers, default=-1) + 1)) - layers - others)
    return [f"layer {shorten_names([*map(str, lacking)], MOST_NAMED)} has no slot"] if lacking else []


def _find_lone_parts(slots: tuple[Slot, ...]) -> list[str]:
    parts: dict[int, set[str]] = {}
    for slot in slots:
        parts.setdefault(slot.layer or 0, set()).add(slot.used_as if slot.used_as == "key-value" else slot.part)
    alone = ({"key"}, {"value"})
    if not any({"key", "value"} <= found or found & {"key-value", "latent"} for found in parts.values()):
        return []  # no layer has both: a latent cache, from which both are made
    return [f"layer {layer} has a {min(found)} only" for layer, found in parts.items() if found in alone][:MOST_NAMED]


def _find_unequal_sizes(slots: tuple[Slot, ...]) -> list[str]:
    reasons = []
    # Scales of a quantized cache are slots of another element type.
    for part, dtype in sorted({(slot.part, slot.dtype) for slot in slots if slot.part in ("key", "value")}):
        for axis in ("kv_heads", "head_dim"):
            sizes = {slot.size(axis) for slot in slots if (slot.part, slot.dtype) == (part, dtype)}
            if len(sizes) > 1:
                reasons.append(f"{axis} of the {part}s is {' and '.join(sorted(map(str, sizes)))}")
    return reasons
