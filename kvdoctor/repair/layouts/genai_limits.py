"""What onnxruntime-genai takes of a decoder, whatever its kind: types, caches, logits, and the lengths of names.

Sources: src/models/kv_cache.cpp and src/models/input_ids.cpp (onnxruntime-genai 0.18.0).
"""

from kvdoctor.contract import Axis, CacheContract, Slot

CONSUMER = "onnxruntime-genai"
INTEGERS = ("int32", "int64")
FLOATS = ("float", "float16", "bfloat16")
SLOT_AXES: tuple[Axis, ...] = ("batch", "kv_heads", "past", "head_dim")


def refuse_slots(slots: tuple[Slot, ...], axes: tuple[Axis, ...] = SLOT_AXES) -> str | None:
    """Why it cannot carry caches: they must be one key and one value for each layer, of one type and size."""
    first = slots[0]
    for slot in slots:
        if (reason := _refuse_slot(slot, first, axes)) is not None:
            return reason
    keys, values = ([slot.layer for slot in slots if slot.part == part] for part in ("key", "value"))
    if sorted(map(str, keys)) != sorted(map(str, values)) or len({*keys}) != len(keys):
        return "its layers do not each have one key and one value"
    return None


def _refuse_slot(slot: Slot, first: Slot, axes: tuple[Axis, ...]) -> str | None:
    where = f"the cache {slot.past!r}"
    if slot.kind != first.kind or slot.part not in ("key", "value") or slot.layer is None:
        what = slot.kind if slot.kind not in ("self-attention", "cross-attention") else f"{slot.part} of {_whose(slot)}"
        return f"{where} is a {what}: this layout is for one key and one value in each layer"
    if slot.kind == "self-attention" and (slot.growth not in ("grow", "shared") or slot.trimmed):
        how = "cut to a window" if slot.trimmed else slot.growth
        return f"{where} neither grows with each step nor is one buffer for past and present ({how})"
    if slot.axes != axes:
        return f"the axes of {slot.past!r} are {', '.join(slot.axes)}: {CONSUMER} feeds {', '.join(axes)}"
    if slot.kind == "self-attention" and slot.present is None:
        return f"{where} is not returned"
    if slot.dtype not in FLOATS or slot.dtype != first.dtype:
        return f"{where} is {slot.dtype}, where {CONSUMER} feeds one type of {', '.join(FLOATS)} to all layers"
    own, sizes = ((one.size("kv_heads"), one.size("head_dim")) for one in (slot, first))
    if None in own:
        return f"the number of heads or the head size of {slot.past!r} is not known"
    if own != sizes:
        mine, others = ("x".join(map(str, pair)) for pair in (own, sizes))
        return f"{where} has {mine} heads x head size, {first.past!r} {others}: {CONSUMER} takes one size"
    return None


def _whose(slot: Slot) -> str:
    return "all layers" if slot.layer is None else f"layer {slot.layer}"


def refuse_logits(contract: CacheContract) -> str | None:
    """Why it cannot read the logits."""
    port = contract.graph("decode").port("logits")
    if port is None:
        return "it returns no logits"
    if port.dtype not in FLOATS or (port.shape is not None and len(port.shape) != 3):
        return f"its logits {port.name!r} are {port.dtype} with {len(port.shape or ())} axes, and {CONSUMER} reads 3"
    return None


def sort_slots(slots: tuple[Slot, ...]) -> list[Slot]:
    """Slots layer by layer, the key before the value."""
    return sorted(slots, key=lambda slot: (slot.layer or 0, slot.part == "value"))
