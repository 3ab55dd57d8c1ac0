"""One slot as it is kept in memory: bytes of a position, positions, copies while a step runs. Standard library only.

As the graph and its loop keep it, and in the other ways that a cache can be kept. A size that the contract leaves open
stays open: what hangs on it is None.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from kvdoctor.contract import ITEM_BYTES, Axis, Slot, SlotKind

NOT_A_WIDTH: tuple[Axis, ...] = ("batch", "past", "capacity", "encoder", "blocks", "block")

OVER_TOKENS: tuple[SlotKind, ...] = ("self-attention", "hidden-memory")
OVER_ENCODER: tuple[SlotKind, ...] = ("cross-attention", "encoder-states")
FLOATS = ("float", "float16", "bfloat16", "double")
REQUANTISED: tuple[SlotKind, ...] = ("self-attention", "cross-attention", "hidden-memory")
"""What other element types are computed for; states are few, and often kept in float on purpose."""

SCALE_BYTES = 2
"""A scale of a quantised cache is a float16: one for each head and position, of the keys and of the values."""

MOST_ROWS = 2**20
MOST_POSITIONS = 2**31 - 1
"""Bounds of what can be asked: sequences, and tokens or encoder states."""

Counted = Literal["tokens", "capacity", "window", "encoder-states", "once"]
"""What the positions of a slot are: the tokens at the context, the length of a buffer, the layer's window where the
length of a ring is left to the loop, the encoder states, or 1 for a state that does not grow."""

Step = Literal["joined", "anew", "row", "place"]
"""What a step adds to what is kept: `joined`, the past and behind it one token, in new memory; `anew`, a second one of
the same size; `row`, one position; `place`, nothing."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A number that a size is a product of, and what it counts; None where it is not known."""

    size: int | None
    of: str


@dataclass(frozen=True, slots=True)
class Load:
    """What to plan for: sequences, tokens of each, encoder states of each. None where the user does not say."""

    batch: int | None = None
    context: int | None = None
    encoder_length: int | None = None


@dataclass(frozen=True, slots=True)
class Measure:
    """The sizes that slots leave open: tokens, encoder states, attention heads, and the windows of layers."""

    context: int | None = None
    encoder_length: int | None = None
    heads: int | None = None
    windows: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Kept:
    """A slot with its `positions`, each of `item` bytes times all of `factors`, the axes that are not batch or length.

    `tokens` is how many tokens it holds at the context, None for what holds none. `packed` overrules the bytes of a
    position, for a quantised cache with its scales.
    """

    slot: Slot
    factors: tuple[Factor, ...]
    item: int | None
    counted: Counted
    positions: int | None
    tokens: int | None
    step: Step
    window: int | None = None
    packed: int | None = None

    @property
    def position(self) -> int | None:
        """Bytes of one position."""
        return (
            self.packed if self.packed is not None else product([*(factor.size for factor in self.factors), self.item])
        )

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
        """Bytes that a step needs besides."""
        return self.in_step - self.held if self.in_step is not None and self.held is not None else None

    @property
    def once_for_the_batch(self) -> bool:
        """Whether all sequences have one of it: a counter without a batch axis."""
        return self.slot.kind == "counter" and "batch" not in self.slot.axes

    @property
    def rows(self) -> tuple[tuple[int, int], ...] | None:
        """The rows of a position, (how many, how many elements): one for each head, of the key and of the value."""
        sizes = [factor.size for factor in self.factors if factor.size is not None]
        if len(sizes) != len(self.factors) or not sizes:
            return None
        names = [factor.of for factor in self.factors]
        at = next((names.index(name) for name in ("head_dim", "hidden") if name in names), len(names) - 1)
        width = sizes.pop(at)
        if self.slot.part == "key-value" and not {"parts", "layers"} & set(self.slot.axes):
            return (math.prod(sizes), width // 2), (math.prod(sizes), width - width // 2)
        return ((math.prod(sizes), width),)

    @property
    def bounded(self) -> bool:
        """Whether it keeps the last tokens alone, and forgets older ones."""
        return self.slot.growth == "ring" or self.slot.trimmed or self.slot.carry in ("shift", "drop-oldest")

    @property
    def open_sizes(self) -> tuple[str, ...]:
        """What is not known of a position, in words."""
        found = []
        for factor in self.factors:
            if factor.size is None and factor.of == "heads":
                found.append("how many heads its axis of batch times heads counts")
            elif factor.size is None:
                found.append(f"its {factor.of}{self._called(factor.of)}")
        if self.item is None:
            found.append(f"the bytes of its element type {self.slot.dtype}")
        return tuple(found)

    def _called(self, axis: str) -> str:
        """How the graph declares an axis that is no size: by a name, or by a number that cannot be one."""
        dims = [dim for dim, of in zip(self.slot.shape, self.slot.axes, strict=True) if of == axis]
        dim = next((dim for dim in dims if not isinstance(dim, int) or dim < 1), None)
        return f", which the graph calls {dim}" if dim is not None else ""


def keep(slot: Slot, measure: Measure) -> Kept:
    """Measure one slot as the graph and its loop keep it."""
    window = counted_or_none(slot.window)
    if window is None and slot.kind == "self-attention" and slot.layer is not None:
        window = measure.windows.get(slot.layer)
    counted, positions, tokens = _positions(slot, window, measure)
    factors = _factors(slot, measure.heads)
    return Kept(slot, factors, ITEM_BYTES.get(slot.dtype), counted, positions, tokens, _step(slot), window)


def in_float16(kept: Kept) -> Kept:
    """The same with elements of 2 bytes, where they are wider floats."""
    return replace(kept, item=2) if _requantised(kept) and (kept.item or 0) > 2 else kept


def quantised(kept: Kept, elements_per_byte: int) -> Kept:
    """The same in integers of 8 or 4 bits, each row padded to whole bytes and followed by its scale."""
    if not _requantised(kept) or kept.rows is None:
        return kept
    return replace(
        kept, packed=sum(count * (-(-width // elements_per_byte) + SCALE_BYTES) for count, width in kept.rows)
    )


def in_window(kept: Kept) -> Kept:
    """The same in a buffer that keeps the tokens of the layer's window alone, written in place."""
    if kept.window is None or kept.bounded or kept.positions is None or kept.positions <= kept.window:
        return kept
    return replace(kept, positions=kept.window, step="place")


def in_buffer(kept: Kept) -> Kept:
    """What grows in a buffer of its final length; each step returns the whole buffer."""
    return replace(kept, step="anew") if kept.step == "joined" and kept.positions is not None else kept


def in_place(kept: Kept) -> Kept:
    """What holds tokens in a buffer of its final length that is past and present at once."""
    return replace(kept, step="place") if kept.tokens is not None and kept.step in ("joined", "anew") else kept


def in_pages(kept: Kept, block_size: int) -> Kept:
    """What holds all tokens in whole blocks of a pool, written in place; the rest as it is."""
    if kept.tokens is None or kept.bounded:
        return kept
    return replace(kept, positions=in_blocks(kept.tokens, block_size), step="place")


def with_all_heads(kept: Kept, heads: int | None) -> Kept:
    """The same with a key and a value for each attention head, where heads share them."""
    shared = next((factor.size for factor in kept.factors if factor.of == "kv_heads"), None)
    if heads is None or shared is None or heads <= shared or heads % shared:
        return kept
    return replace(kept, factors=tuple(Factor(heads, f.of) if f.of == "kv_heads" else f for f in kept.factors))


def _requantised(kept: Kept) -> bool:
    return kept.slot.kind in REQUANTISED and kept.slot.dtype in FLOATS


def counted_or_none(number: int | None) -> int | None:
    """A number that can be one of tokens or heads: a contract may come from a file, and hold anything."""
    return number if number is not None and number > 0 else None


def product(numbers: Iterable[int | None]) -> int | None:
    """The product; None where a factor is not known."""
    known = list(numbers)
    return None if None in known else math.prod(number for number in known if number is not None)


def total(numbers: Iterable[int | None]) -> int | None:
    """The sum; None where a summand is not known."""
    known = list(numbers)
    return None if None in known else sum(number for number in known if number is not None)


def in_blocks(tokens: int, block_size: int) -> int:
    """Tokens that whole blocks hold, enough for these."""
    return -(-tokens // block_size) * block_size


def _factors(slot: Slot, heads: int | None) -> tuple[Factor, ...]:
    """The sizes that make one position of one sequence."""
    found = []
    for size, axis in zip(slot.shape, slot.axes, strict=True):
        if axis == "batch_heads":
            found.append(Factor(heads, "heads"))
        elif axis not in NOT_A_WIDTH:
            found.append(Factor(size if isinstance(size, int) and size > 0 else None, axis))
    return tuple(found)


def _positions(slot: Slot, window: int | None, measure: Measure) -> tuple[Counted, int | None, int | None]:
    """What the positions are, how many are kept, and how many tokens that holds."""
    context, at = measure.context, slot.length_axis
    if slot.growth == "paged":
        block = slot.size("block") or 0
        return "tokens", in_blocks(context, block) if context and block > 0 else context, context
    if at is None:
        return "once", 1, None
    size = slot.shape[at]
    fixed = size if isinstance(size, int) and size > 0 else None
    if slot.axes[at] == "encoder":
        return "encoder-states", fixed or measure.encoder_length, None
    if fixed is not None:
        return "capacity", fixed, min(fixed, context or fixed)
    if slot.trimmed and window is None:
        return "window", None, None  # the graph cuts old entries off, and does not declare how many it keeps
    if (slot.growth == "ring" or slot.trimmed) and window is not None:
        return "window", window, min(window, context or window)
    return "tokens", context, context


def _step(slot: Slot) -> Step:
    """What a step adds while it runs, where the loop binds past and present to memory of their own."""
    if slot.growth in ("grow", "shared"):
        return "joined"
    if slot.growth == "delta":
        return "anew" if slot.carry == "append" else "row"
    if slot.growth == "paged" or slot.present is None or (slot.growth == "constant" and slot.emptied):
        return "place"
    return "anew"
