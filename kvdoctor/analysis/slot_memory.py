"""The memory of one slot: bytes of a position, positions, copies while a step runs. Standard library only.

As the graph and its loop store it. Where the contract leaves a size open, every figure that depends on it is None.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import field
from typing import Literal

from kvdoctor.contract import ITEM_BYTES, Axis, Slot, SlotKind
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
            elif factor.size is None:
                found.append(f"its {factor.of}{self._symbol(factor.of)}")
        if self.item is None:
            found.append(f"the bytes of its element type {self.slot.dtype}")
        return tuple(found)

    def _symbol(self, axis: str) -> str:
        """How the graph declares an axis without a usable size: by a name, or by a number below 1."""
        dims = [dim for dim, of in zip(self.slot.shape, self.slot.axes, strict=True) if of == axis]
        dim = next((dim for dim in dims if not isinstance(dim, int) or dim < 1), None)
        return f", which the graph declares as {dim}" if dim is not None else ""


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
