"""The memory plan: what a cache takes, and what other ways of keeping it would take. Standard library only.

Pure arithmetic over a cache contract; all sizes in bytes. Weights and activations are not counted.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvdoctor.contract import CacheContract, Growth, Lack, SlotKind
from kvdoctor.kept import (
    OVER_ENCODER,
    OVER_TOKENS,
    Counted,
    Factor,
    Kept,
    Load,
    Measure,
    counted_or_none,
    in_blocks,
    in_buffer,
    in_float16,
    in_pages,
    in_place,
    in_window,
    keep,
    product,
    quantised,
    total,
    with_all_heads,
)
from kvdoctor.memory_notes import AlternativeName, assumed, fixed_batch, notes

BLOCK_SIZES = (16, 32, 64, 128, 256)
Source = Literal["option", "config", "graph"]


@dataclass(frozen=True, slots=True)
class CachePart:
    """Slots that are counted alike; the bytes are those of all of them together, for one sequence.

    `factors` make the bytes of one position, the number of tensors first, the bytes of an element last.
    `bytes_in_step` is alive while a step runs. `subject` is the past input of the first of the slots; those with
    `once_for_the_batch` are not multiplied by it.
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


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another way of keeping the cache; `bytes_total` and `bytes_in_step` are for the whole batch."""

    name: AlternativeName
    explained: str
    bytes_per_token: int | None
    bytes_per_sequence: int | None
    bytes_total: int | None
    bytes_in_step: int | None


@dataclass(frozen=True, slots=True)
class Paged:
    """The tokens of the cache in blocks of a pool; the waste is what a sequence leaves unused in its last block.

    `average_wasted_bytes` is that of (block_size - 1) / 2 tokens, the mean over all lengths, rounded down.
    """

    block_size: int
    blocks_per_sequence: int
    bytes_per_sequence: int | None
    bytes_total: int | None
    wasted_bytes: int
    average_wasted_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes the cache takes for one sequence: per decoded token, per encoder state, and at the context length.

    `bytes_at_context` is what holds tokens; `bytes_per_sequence` adds the cross-attention cache and the states;
    `bytes_total` is for the batch, and `bytes_in_step` for the batch while a step runs, past and present alive. A size
    is None where something is not known: a width, which `unknown` names, the context or the encoder length.
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
    alternatives: tuple[Alternative, ...]
    paged: tuple[Paged, ...]
    unknown: tuple[Lack, ...]
    notes: tuple[str, ...]


def plan(
    contract: CacheContract,
    load: Load | None = None,
    encoder_length: int | None = None,
    windows: Mapping[int, int] | None = None,
) -> MemoryPlan:
    """Plan the cache of a contract for a load.

    `encoder_length`, in encoder states, and `windows`, in tokens by layer, are what a config says where neither the
    load nor the graph does.
    """
    load = load or Load()
    measure = Measure(
        context=load.context or counted_or_none(contract.context_limit),
        encoder_length=load.encoder_length or encoder_length,
        heads=counted_or_none(contract.heads),
        windows=windows or {},
    )
    return _Planner(contract, load, measure).plan()


@dataclass
class _Planner:
    contract: CacheContract
    load: Load
    measure: Measure
    kept: list[Kept] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = [keep(slot, self.measure) for slot in self.contract.slots]
        self.batch = self.load.batch or fixed_batch(self.contract) or 1

    def plan(self) -> MemoryPlan:
        context, load = self.measure.context, self.load
        over_tokens = [kept for kept in self.kept if kept.slot.kind in OVER_TOKENS]
        over_encoder = [kept for kept in self.kept if kept.slot.kind in OVER_ENCODER]
        lengths = {kept.positions for kept in over_encoder}
        encoder = next(iter(lengths)) if len(lengths) == 1 else None
        asked: Source = "option" if load.encoder_length else "config"
        sequence, everything, in_step = self._sums(self.kept)
        return MemoryPlan(
            bytes_per_token=total(kept.position for kept in over_tokens),
            bytes_per_encoder_state=total(kept.position for kept in over_encoder),
            context=context,
            bytes_at_context=total(kept.held for kept in over_tokens) if context else None,
            batch=self.batch,
            encoder_length=encoder,
            context_from=None if context is None else "option" if load.context else "config",
            encoder_length_from=None if encoder is None else asked if self._open_encoder() else "graph",
            bytes_per_sequence=sequence,
            bytes_total=everything,
            bytes_in_step=in_step,
            parts=tuple(_part(group) for group in _alike(self.kept)),
            alternatives=tuple(self._alternatives()),
            paged=tuple(self._paged()),
            unknown=tuple(Lack(g[0].slot.past, open_size) for g in _alike(self.kept) for open_size in g[0].open_sizes),
            notes=tuple(notes(self.contract, load, self.measure, self.kept)),
        )

    def _sums(self, kept: list[Kept]) -> tuple[int | None, int | None, int | None]:
        """Bytes of one sequence, of the batch, and of the batch while a step runs."""
        each = [k for k in kept if not k.once_for_the_batch]
        once = [k for k in kept if k.once_for_the_batch]
        sequence = total(k.held for k in each)
        everything = total([product([sequence, self.batch]), *(k.held for k in once)])
        at_once = min(self.batch, fixed_batch(self.contract) or self.batch)  # sequences of one call
        in_step = total([everything, product([total(k.added for k in each), at_once]), *(k.added for k in once)])
        return sequence, everything, in_step

    def _alternatives(self) -> Iterator[Alternative]:
        """The other ways of keeping this cache, each where it changes anything."""
        ways: dict[AlternativeName, list[Kept]] = {
            "float16": [in_float16(kept) for kept in self.kept],
            "int8": [quantised(kept, 1) for kept in self.kept],
            "int4": [quantised(kept, 2) for kept in self.kept],
            "window": [in_window(kept) for kept in self.kept],
            "static-buffer": [in_buffer(kept) for kept in self.kept],
            "shared-buffer": [in_place(kept) for kept in self.kept],
            "all-heads": [with_all_heads(kept, self.measure.heads) for kept in self.kept],
        }
        for name, changed in ways.items():
            pairs = [(old, new) for old, new in zip(self.kept, changed, strict=True) if old != new]
            if pairs:
                sequence, everything, in_step = self._sums(changed)
                per_token = total(kept.position for kept in changed if kept.slot.kind in OVER_TOKENS)
                explained = assumed(*pairs[0], len(pairs))[name]
                yield Alternative(name, explained, per_token, sequence, everything, in_step)

    def _paged(self) -> Iterator[Paged]:
        """The tokens in blocks; what keeps a window or no tokens stays as it is."""
        held = [(k.tokens, k.position) for k in self.kept if k.tokens is not None and not k.bounded]
        per_token = total(position for _, position in held)
        if not held or per_token is None:
            return
        for size in BLOCK_SIZES:
            sequence, everything, _ = self._sums([in_pages(kept, size) for kept in self.kept])
            yield Paged(
                block_size=size,
                blocks_per_sequence=max(in_blocks(tokens, size) for tokens, _ in held) // size,
                bytes_per_sequence=sequence,
                bytes_total=everything,
                wasted_bytes=sum((in_blocks(tokens, size) - tokens) * (position or 0) for tokens, position in held),
                average_wasted_bytes=per_token * (size - 1) // 2,
            )

    def _open_encoder(self) -> bool:
        """Whether the graph leaves the encoder length open."""
        slots = [kept.slot for kept in self.kept if kept.counted == "encoder-states"]
        return any(slot.size("encoder") is None for slot in slots)


def _alike(kept: Iterable[Kept]) -> list[list[Kept]]:
    """Slots that differ in their layer, or in being key or value, alone."""
    groups: dict[tuple[object, ...], list[Kept]] = {}
    for one in kept:
        slot = one.slot
        key = (slot.kind, slot.growth, slot.carry, slot.dtype, one.factors, one.counted, one.positions, one.window)
        groups.setdefault((*key, one.step), []).append(one)
    return list(groups.values())


def _part(group: list[Kept]) -> CachePart:
    kept, slot = group[0], group[0].slot
    return CachePart(
        kind=slot.kind,
        growth=slot.growth,
        dtype=slot.dtype,
        parts=tuple(dict.fromkeys(one.slot.part for one in group)),
        layers=tuple(sorted({one.slot.layer for one in group if one.slot.layer is not None})),
        slots=len(group),
        subject=slot.past,
        factors=(Factor(len(group), "tensors"), *kept.factors, Factor(kept.item, "B")),
        counted=kept.counted,
        positions=kept.positions,
        bytes_per_position=total(one.position for one in group),
        bytes=total(one.held for one in group),
        bytes_in_step=total(one.in_step for one in group),
        window=kept.window,
        once_for_the_batch=kept.once_for_the_batch,
    )
