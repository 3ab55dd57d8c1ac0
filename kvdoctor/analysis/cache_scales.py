"""The scales of a cache that is stored in 8 or 4 bits: slots of their own next to the values, named `NAME_scale`.

kvdoctor's own conversion writes them so (`convert --cache-type`). A scale grows, is held and is reordered as its
values are, and belongs to the same layer.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from kvdoctor.analysis.dialects.dialect import SlotName
from kvdoctor.contract import SCALE_SUFFIX, Part, Slot
from kvdoctor.model.view import Declared

SCALE_PARTS: dict[Part, Part] = {"key": "key-scale", "value": "value-scale"}
STORED = ("int8", "uint8")
"""Element types of values that have a scale."""
SCALES = ("float16", "float", "bfloat16")


def find_stored(inputs: Mapping[str, Declared]) -> dict[str, str]:
    """The inputs that have a scale: by the name of the scale, that of the values."""
    found = {}
    for name, port in inputs.items():
        values = inputs.get(name.removesuffix(SCALE_SUFFIX)) if name.endswith(SCALE_SUFFIX) else None
        if values is None or values.dtype not in STORED or port.dtype not in SCALES:
            continue
        sizes = list(zip(port.shape or (), values.shape or (), strict=False))
        same_rank = port.shape is not None and values.shape is not None and len(port.shape) == len(values.shape)
        if same_rank and any(size == 1 and other != 1 for size, other in sizes):
            found[name] = values.name
    return found


def name_scales(names: Mapping[str, SlotName], stored: Mapping[str, str]) -> Iterator[SlotName]:
    """What the names of the values say about their scales."""
    for scale, values in stored.items():
        if values in names:
            name = names[values]
            yield replace(
                name,
                past=scale,
                part=scale_part(name.part),
                present=f"{name.present}{SCALE_SUFFIX}" if name.present is not None else None,
                filled_by=f"{name.filled_by}{SCALE_SUFFIX}" if name.filled_by is not None else None,
            )


def mark_scales(slots: list[Slot], stored: Mapping[str, str]) -> list[Slot]:
    """Scales as slots like their values: dataflow proves where they go, not what they are for."""
    by_past = {slot.past: slot for slot in slots}
    return [
        replace(
            values,
            past=slot.past,
            present=slot.present or (f"{values.present}{SCALE_SUFFIX}" if values.present is not None else None),
            dtype=slot.dtype,
            shape=slot.shape,
            part=scale_part(values.part),
            continues_as=slot.continues_as,
            takes_new=slot.takes_new,
            emptied=slot.emptied,
            used_as=None,
        )
        if (values := by_past.get(stored.get(slot.past, ""))) is not None and len(slot.shape) == len(values.shape)
        else slot
        for slot in slots
    ]


def fill_scales(slots: list[Slot], stored: Mapping[str, str], outputs: Collection[str]) -> list[Slot]:
    """Scales with the output that first fills them, where no name said it; `outputs` are those of the graph."""
    by_past = {slot.past: slot for slot in slots}
    filled = []
    for slot in slots:
        values = by_past.get(stored.get(slot.past, ""))
        beside = f"{values.filled_by}{SCALE_SUFFIX}" if values is not None and values.filled_by is not None else None
        if values is None or beside not in outputs or slot.filled_by == beside:
            filled.append(slot)
        else:
            filled.append(replace(slot, filled_by=beside, filled_in=values.filled_in, first=values.first))
    return filled


def scale_part(part: Part) -> Part:
    """The part that the scales of a key or of a value are."""
    return SCALE_PARTS.get(part, part)
