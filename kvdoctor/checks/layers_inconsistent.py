"""Layers disagree, or one is missing.

What it means: heads or head width differ between layers, a layer number is skipped, or a layer has a key without a
value, and nothing in the graph gives a reason for it.

Reproduce: `kvdoctor inspect MODEL` lists the slots by layer.

Repair: export again; where the model really is built so, ignore this check for it.
"""

from collections.abc import Iterator

from kvdoctor.case import Case
from kvdoctor.contract import Slot
from kvdoctor.findings import Advice, Fault, check

MOST_NAMED = 8


@check("KV106", "layers-inconsistent", "contract")
def layers_inconsistent(case: Case) -> Iterator[Fault]:
    """Compare the layers of each kind of cache."""
    if case.contract is None:
        return
    for kind in ("self-attention", "cross-attention"):
        slots = tuple(slot for slot in case.contract.of_kind(kind) if slot.layer is not None)
        others = {s.layer for s in case.contract.slots if s.kind != kind and s.layer is not None}
        reasons = [*_gaps(slots, others), *_lonely(slots), *_widths(slots)]
        if reasons:
            yield Fault(
                severity="warning",
                file=case.decode_file,
                subject=tuple(slot.past for slot in slots),
                where=f"{kind} cache",
                promised="the same slots in every layer",
                observed="; ".join(reasons),
                cause="the layers of one cache are not alike",
                advice=Advice("re-export", "export again, or ignore this check if the model is built so"),
            )


def _gaps(slots: tuple[Slot, ...], others: set[int]) -> list[str]:
    """Layers without a slot between others that have one. Another kind of state there is the reason: a hybrid."""
    layers = {slot.layer for slot in slots if slot.layer is not None}
    lacking = sorted(set(range(max(layers, default=-1) + 1)) - layers - others)
    more = f" and {len(lacking) - MOST_NAMED} more" if len(lacking) > MOST_NAMED else ""
    return [f"layer {', '.join(map(str, lacking[:MOST_NAMED]))}{more} has no slot"] if lacking else []


def _lonely(slots: tuple[Slot, ...]) -> list[str]:
    parts: dict[int, set[str]] = {}
    for slot in slots:
        parts.setdefault(slot.layer or 0, set()).add(slot.used_as if slot.used_as == "key-value" else slot.part)
    alone = ({"key"}, {"value"})
    if not any({"key", "value"} <= found or found & {"key-value", "latent"} for found in parts.values()):
        return []  # no layer has both: a latent cache, from which both are made
    return [f"layer {layer} has a {min(found)} only" for layer, found in parts.items() if found in alone][:MOST_NAMED]


def _widths(slots: tuple[Slot, ...]) -> list[str]:
    reasons = []
    # Scales of a quantised cache are slots of another element type.
    for part, dtype in sorted({(slot.part, slot.dtype) for slot in slots if slot.part in ("key", "value")}):
        for axis in ("kv_heads", "head_dim"):
            sizes = {slot.size(axis) for slot in slots if (slot.part, slot.dtype) == (part, dtype)}
            if len(sizes) > 1:
                reasons.append(f"{axis} of the {part}s is {' and '.join(sorted(map(str, sizes)))}")
    return reasons
