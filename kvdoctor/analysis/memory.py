"""The memory plan: the bytes of a cache, slot by slot as graph and loop store it. Standard library only.

Pure arithmetic over a cache contract; all sizes in bytes. Weights and activations are not counted. Where the contract
leaves a size open, every figure that depends on it is None.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvdoctor.contract import ITEM_BYTES, Axis, CacheContract, Growth, MissingPart, Slot, SlotKind
from kvdoctor.records import record

NOT_A_WIDTH: tuple[Axis, ...] = ("batch", "past", "capacity", "encoder", "blocks", "block")

OVER_TOKENS: tuple[SlotKind, ...] = ("self-attention", "hidden-memory")
OVER_ENCODER: tuple[SlotKind, ...] = ("cross-attention", "encoder-states")

Counted = Literal["tokens", "capacity", "window", "encoder-states", "once"]
"""What the positions of a slot count: the tokens at the context, the length of a buffer, the layer's window where the
loop chooses the length of a ring, the encoder states, or 1 for a state that does not grow."""

Step = Literal["joined", "anew", "row", "place"]
"""What a step allocates besides the past: `joined`, a copy of the past plus one token; `anew`, a tensor of the same
size; `row`, one position; `place`, nothing."""


@record
class Factor:
    """One factor of a size, and what it counts; None where it is not known."""

    size: int | None
    of: str


@record
class Workload:
    """What to plan for: sequences, tokens per sequence, encoder states per sequence. None where the user gives none."""

    batch: int | None = None
    context: int | None = None
    encoder_length: int | None = None


@record
class SizeValues:
    """Values for sizes that slots leave open: tokens, encoder states, attention heads, and windows by layer."""

    context: int | None = None
    encoder_length: int | None = None
    heads: int | None = None
    windows: Mapping[int, int] = field(default_factory=dict)


@record
class SlotBytes:
    """A slot with its `positions`, each of `item` bytes times all `factors`, the axes other than batch and length."""

    slot: Slot
    factors: tuple[Factor, ...]
    item: int | None
    counted: Counted
    positions: int | None
    step: Step
    window: int | None = None

    @property
    def position(self) -> int | None:
        """Bytes of one position."""
        return product([*(factor.size for factor in self.factors), self.item])

    @property
    def held(self) -> int | None:
        """Bytes between two steps."""
        return product([self.position, self.positions])

    @property
    def in_step(self) -> int | None:
        """Bytes while a step of one new token runs."""
        if self.position is None or self.positions is None:
            return None
        alive = {"joined": 2 * self.positions - 1, "anew": 2 * self.positions, "row": self.positions + 1}
        return self.position * alive.get(self.step, self.positions)

    @property
    def added(self) -> int | None:
        """Bytes that a step needs in addition."""
        return self.in_step - self.held if self.in_step is not None and self.held is not None else None

    @property
    def once_for_the_batch(self) -> bool:
        """Whether all sequences share it: a counter without a batch axis."""
        return self.slot.kind == "counter" and "batch" not in self.slot.axes

    @property
    def bounded(self) -> bool:
        """Whether it holds the last tokens alone, and drops older ones."""
        return self.slot.growth == "ring" or self.slot.trimmed or self.slot.carry in ("shift", "drop-oldest")

    @property
    def open_sizes(self) -> tuple[str, ...]:
        """Descriptions of the sizes of a position that are not known."""
        found = []
        for factor in self.factors:
            if factor.size is None and factor.of == "heads":
                found.append("the number of heads in its axis of batch times heads")
            elif factor.size is None:  # declared by a name, or by a number below 1
                dims = [dim for dim, of in zip(self.slot.shape, self.slot.axes, strict=True) if of == factor.of]
                dim = next((dim for dim in dims if not isinstance(dim, int) or dim < 1), None)
                symbol = f", which the graph declares as {dim}" if dim is not None else ""
                found.append(f"its {factor.of}{symbol}")
        if self.item is None:
            found.append(f"the bytes of its element type {self.slot.dtype}")
        return tuple(found)


def measure_slot(slot: Slot, measure: SizeValues) -> SlotBytes:
    """Measure one slot as the graph and its loop store it."""
    window = counted_or_none(slot.window)
    if window is None and slot.kind == "self-attention" and slot.layer is not None:
        window = measure.windows.get(slot.layer)
    counted, positions = _positions(slot, window, measure)
    factors = _factors(slot, measure.heads)
    return SlotBytes(slot, factors, ITEM_BYTES.get(slot.dtype), counted, positions, _step(slot), window)


def counted_or_none(number: int | None) -> int | None:
    """A count of tokens or heads; None for a number below 1: a contract from a file may have any."""
    return number if number is not None and number > 0 else None


def product(numbers: Iterable[int | None]) -> int | None:
    """Multiply; None where a factor is not known."""
    known = list(numbers)
    return None if None in known else math.prod(number for number in known if number is not None)


def total(numbers: Iterable[int | None]) -> int | None:
    """Add up; None where a summand is not known."""
    known = list(numbers)
    return None if None in known else sum(number for number in known if number is not None)


def _factors(slot: Slot, heads: int | None) -> tuple[Factor, ...]:
    """The sizes whose product is one position of one sequence."""
    found = []
    for size, axis in zip(slot.shape, slot.axes, strict=True):
        if axis == "batch_heads":
            found.append(Factor(heads, "heads"))
        elif axis not in NOT_A_WIDTH:
            found.append(Factor(size if isinstance(size, int) and size > 0 else None, axis))
    return tuple(found)


def _positions(slot: Slot, window: int | None, measure: SizeValues) -> tuple[Counted, int | None]:
    """What the positions count, and how many there are."""
    context, at = measure.context, slot.length_axis
    if slot.growth == "paged":
        block = slot.size("block") or 0
        return "tokens", -(-context // block) * block if context and block > 0 else context  # whole blocks
    if at is None:
        return "once", 1
    size = slot.shape[at]
    fixed = size if isinstance(size, int) and size > 0 else None
    if slot.axes[at] == "encoder":
        return "encoder-states", fixed or measure.encoder_length
    if fixed is not None:
        return "capacity", fixed
    if slot.trimmed and window is None:
        return "window", None  # the graph trims the cache, and declares no length
    if (slot.growth == "ring" or slot.trimmed) and window is not None:
        return "window", window
    return "tokens", context


def _step(slot: Slot) -> Step:
    """What a step allocates while it runs, where the loop binds past and present to separate memory."""
    if slot.growth in ("grow", "shared"):
        return "joined"
    if slot.growth == "delta":
        return "anew" if slot.carry == "append" else "row"
    if slot.growth == "paged" or slot.present is None or (slot.growth == "constant" and slot.emptied):
        return "place"
    return "anew"


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
