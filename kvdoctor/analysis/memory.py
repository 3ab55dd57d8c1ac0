"""The memory plan: the bytes of a cache. Standard library only.

Pure arithmetic over a cache contract; all sizes in bytes. Weights and activations are not counted.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvdoctor.analysis.slot_memory import (
    OVER_ENCODER,
    OVER_TOKENS,
    Counted,
    Factor,
    SizeValues,
    SlotBytes,
    Workload,
    counted_or_none,
    measure_slot,
    product,
    total,
)
from kvdoctor.contract import CacheContract, Growth, MissingPart, SlotKind
from kvdoctor.records import record

Source = Literal["option", "config", "graph"]


@record
class CachePart:
    """Slots of the same kind, type and sizes; the bytes are the sum over all of them, for one sequence.

    The product of `factors` is the bytes of one position: the number of tensors first, the bytes of an element last.
    `bytes_in_step` are allocated while a step runs. `subject` is the past input of the first slot. The bytes of parts
    with `once_for_the_batch` are not multiplied by the batch.
    """

    kind: SlotKind
    growth: Growth
    dtype: str
    parts: tuple[str, ...]
    layers: tuple[int, ...]
    slots: int
    subject: str
    factors: tuple[Factor, ...]
    counted: Counted
    positions: int | None
    bytes_per_position: int | None
    bytes: int | None
    bytes_in_step: int | None
    window: int | None = None
    once_for_the_batch: bool = False


@record
class MemoryPlan:
    """The bytes of a cache for one sequence: per decoded token, per encoder state, and at the context length.

    `bytes_at_context` counts the slots that hold tokens; `bytes_per_sequence` adds the cross-attention cache and the
    states; `bytes_total` is for the batch, and `bytes_in_step` for the batch while a step runs, with past and present
    allocated. A size is None where a number is not known: a width, which `unknown` names, the context or the encoder
    length.
    """

    bytes_per_token: int | None
    bytes_per_encoder_state: int | None
    context: int | None
    bytes_at_context: int | None
    batch: int
    encoder_length: int | None
    context_from: Source | None
    encoder_length_from: Source | None
    bytes_per_sequence: int | None
    bytes_total: int | None
    bytes_in_step: int | None
    parts: tuple[CachePart, ...]
    unknown: tuple[MissingPart, ...]
    notes: tuple[str, ...]


def plan_memory(
    contract: CacheContract,
    load: Workload | None = None,
    encoder_length: int | None = None,
    windows: Mapping[int, int] | None = None,
) -> MemoryPlan:
    """Plan the cache of a contract for a workload.

    `encoder_length`, in encoder states, and `windows`, in tokens by layer, are the config's, used where neither the
    workload nor the graph gives them.
    """
    load = load or Workload()
    measure = SizeValues(
        context=load.context or counted_or_none(contract.context_limit),
        encoder_length=load.encoder_length or encoder_length,
        heads=counted_or_none(contract.heads),
        windows=windows or {},
    )
    return _Planner(contract, load, measure).plan()


@dataclass(eq=False, repr=False)
class _Planner:
    """Plans one contract.

    `slots` are all slots; `counted` has each set of equal sizes with the number of slots that have it: a decoder of a
    hundred layers has few.
    """

    contract: CacheContract
    load: Workload
    measure: SizeValues
    slots: list[SlotBytes] = field(init=False)
    counted: list[tuple[SlotBytes, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.slots = [measure_slot(slot, self.measure) for slot in self.contract.slots]
        self.counted = list(Counter(map(_without_names, self.slots)).items())
        self.batch = self.load.batch or fixed_batch(self.contract) or 1

    def plan(self) -> MemoryPlan:
        context, load = self.measure.context, self.load
        over_tokens, over_encoder = (
            [(one, count) for one, count in self.counted if one.slot.kind in kinds]
            for kinds in (OVER_TOKENS, OVER_ENCODER)
        )
        lengths = {one.positions for one, _ in over_encoder}
        encoder = next(iter(lengths)) if len(lengths) == 1 else None
        asked: Source = "option" if load.encoder_length else "config"
        is_open = any(one.slot.size("encoder") is None for one in self.slots if one.counted == "encoder-states")
        sequence, everything, in_step = self._sum_bytes()
        equal: dict[tuple[object, ...], list[SlotBytes]] = {}  # slots that differ only in layer or part
        for one in self.slots:
            slot, sizes = one.slot, (one.factors, one.counted, one.positions, one.window, one.step)
            equal.setdefault((slot.kind, slot.growth, slot.carry, slot.dtype, *sizes), []).append(one)
        groups = list(equal.values())
        return MemoryPlan(
            bytes_per_token=total(product([one.position, count]) for one, count in over_tokens),
            bytes_per_encoder_state=total(product([one.position, count]) for one, count in over_encoder),
            context=context,
            bytes_at_context=total(product([one.held, count]) for one, count in over_tokens) if context else None,
            batch=self.batch,
            encoder_length=encoder,
            context_from=None if context is None else "option" if load.context else "config",
            encoder_length_from=None if encoder is None else asked if is_open else "graph",
            bytes_per_sequence=sequence,
            bytes_total=everything,
            bytes_in_step=in_step,
            parts=tuple(_describe_group(group) for group in groups),
            unknown=tuple(MissingPart(g[0].slot.past, open_size) for g in groups for open_size in g[0].open_sizes),
            notes=tuple(_write_notes(self.contract, load, self.measure, self.slots)),
        )

    def _sum_bytes(self) -> tuple[int | None, int | None, int | None]:
        """Bytes of one sequence, of the batch, and of the batch while a step runs."""
        each = [(one, count) for one, count in self.counted if not one.once_for_the_batch]
        once = [(one, count) for one, count in self.counted if one.once_for_the_batch]
        sequence = total(product([one.held, count]) for one, count in each)
        everything = total([product([sequence, self.batch]), *(product([one.held, count]) for one, count in once)])
        at_once = min(self.batch, fixed_batch(self.contract) or self.batch)  # sequences of one call
        added = product([total(product([one.added, count]) for one, count in each), at_once])
        in_step = total([everything, added, *(product([one.added, count]) for one, count in once)])
        return sequence, everything, in_step


def _without_names(one: SlotBytes) -> SlotBytes:
    """The same sizes without what distinguishes one layer from the next."""
    present = None if one.slot.present is None else ""
    names: dict[str, Any] = {"layer": None, "past": "", "present": present, "filled_by": None, "continues_as": None}
    names |= dict.fromkeys(("window", "used_as", "used_at", "takes_new", "takes_mask", "made_as", "made_at"))
    return replace(one, slot=replace(one.slot, **names))


def _describe_group(group: list[SlotBytes]) -> CachePart:
    first, slot = group[0], group[0].slot
    return CachePart(
        kind=slot.kind,
        growth=slot.growth,
        dtype=slot.dtype,
        parts=tuple(dict.fromkeys(one.slot.part for one in group)),
        layers=tuple(sorted({one.slot.layer for one in group if one.slot.layer is not None})),
        slots=len(group),
        subject=slot.past,
        factors=(Factor(len(group), "tensors"), *first.factors, Factor(first.item, "B")),
        counted=first.counted,
        positions=first.positions,
        bytes_per_position=total(one.position for one in group),
        bytes=total(one.held for one in group),
        bytes_in_step=total(one.in_step for one in group),
        window=first.window,
        once_for_the_batch=first.once_for_the_batch,
    )


def fixed_batch(contract: CacheContract) -> int | None:
    """The batch that the graph fixes; None where it is open."""
    sizes = {size for slot in contract.slots if (size := slot.size("batch")) is not None and size > 0}
    return next(iter(sizes)) if len(sizes) == 1 else None


def _write_notes(contract: CacheContract, load: Workload, measure: SizeValues, slots: list[SlotBytes]) -> Iterator[str]:
    yield from _note_batch(slots, load.batch, fixed_batch(contract))
    context, limit = measure.context, counted_or_none(contract.context_limit)
    if context and limit and context > limit:
        yield f"the requested context of {context} tokens exceeds the {limit} tokens that the config declares usable"
    new = [port.size("new") for port in contract.graph("decode").inputs]
    yield from _note_buffers(slots, context, max((size for size in new if size is not None), default=1))
    lengths = {one.positions for one in slots if one.slot.kind in OVER_ENCODER}
    if load.encoder_length and not lengths:
        yield "no part of this cache depends on the encoder length"
    for length in sorted(number for number in lengths if number is not None):
        if load.encoder_length and length != load.encoder_length:
            yield f"the graph fixes the encoder length at {length}"
    yield from _note_windows(slots)


def _note_batch(slots: list[SlotBytes], batch: int | None, fixed: int | None) -> Iterator[str]:
    if batch is None:
        return
    if fixed is not None and batch != fixed:
        unused = f", and {-batch % fixed} rows of the last are unused and not counted" if batch % fixed else ""
        yield f"the graph takes a batch of exactly {fixed}: {batch} sequences need {-(-batch // fixed)} calls{unused}"
    alone = [k for k in slots if not {"batch", "batch_heads", "blocks"} & set(k.slot.axes) and not k.once_for_the_batch]
    if alone and batch > 1:
        yield f"{len(alone)} tensors have no batch axis: each sequence needs its own, and its own calls"


def _note_buffers(slots: list[SlotBytes], context: int | None, new_tokens: int) -> Iterator[str]:
    """Buffers that are shorter than the context, and lengths that the loop or the engine chooses.

    `new_tokens` is the number of one step's tokens. A buffer into which the loop writes them afterwards need not hold
    them during the step.
    """
    short = {one.positions: one for one in slots if one.counted == "capacity" and one.slot.kind == "self-attention"}
    for capacity, one in short.items():
        written_later = new_tokens if one.slot.growth == "delta" else 0
        if capacity is None or context is None or capacity + written_later >= context:
            continue
        effect = "older tokens are dropped" if one.bounded else "no more tokens fit"
        yield f"the cache has a fixed length of {capacity} tokens, less than the context of {context}: {effect}"
    free = [one for one in slots if one.counted == "tokens" and "capacity" in one.slot.axes]
    if any(one.slot.carry != "extend" for one in free):
        yield "the loop chooses the length of the buffers; these figures assume the context"
    if any(one.slot.growth == "paged" and not one.slot.size("block") for one in slots):
        yield "the engine chooses the block size: these figures count tokens alone"


def _note_windows(slots: list[SlotBytes]) -> Iterator[str]:
    """Layers with an attention window whose cache keeps every token."""
    attended = [one for one in slots if one.slot.kind == "self-attention"]
    whole = [one for one in attended if one.window is not None and not one.bounded]
    for window in sorted({one.window for one in whole if one.window is not None}):
        mine = [one for one in whole if one.window == window]
        source = "the graph" if mine[0].slot.window is not None else "the config"
        yield (
            f"{len(mine)} of {len(attended)} self-attention tensors belong to layers with an attention window of "
            f"{window} tokens, by {source}; these figures count all tokens"
        )
