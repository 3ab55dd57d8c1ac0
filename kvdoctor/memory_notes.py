"""What a reader of a memory plan should know besides the figures: assumptions, limits, and what they rest on."""

from collections.abc import Iterator
from typing import Literal

from kvdoctor.contract import CacheContract
from kvdoctor.kept import OVER_ENCODER, REQUANTISED, Kept, Load, Measure, counted_or_none

AlternativeName = Literal["float16", "int8", "int4", "window", "static-buffer", "shared-buffer", "all-heads"]
"""Other ways of keeping a cache."""


def assumed(old: Kept, new: Kept, tensors: int) -> dict[AlternativeName, str]:
    """What each way assumes, with the arithmetic of one slot before and after; `tensors` is how many are changed."""
    rows = old.rows or ()
    whole, halves = (" + ".join(f"{n} x ({-(-width // d)} + 2) B" for n, width in rows) for d in (1, 2))
    scaled = f"and a float16 scale for each head and token of keys and of values; {old.position} B become"
    return {
        "float16": f"2 B for each element instead of {old.item} B",
        "int8": f"1 B for each element {scaled} {whole} = {new.position} B",
        "int4": f"1 B for two elements {scaled} {halves} = {new.position} B",
        "window": f"{tensors} tensors keep the {new.positions} tokens that their layers look back over, in place",
        "static-buffer": f"{new.positions} tokens from the first step on; each step returns a second buffer",
        "shared-buffer": "the same memory is past and present from the first step on: nothing is copied",
        "all-heads": "a key and a value for each attention head, where heads share them today",
    }


def fixed_batch(contract: CacheContract) -> int | None:
    """The sequences that the graph takes at once, where that is one number."""
    sizes = {size for slot in contract.slots if (size := slot.size("batch")) is not None and size > 0}
    return next(iter(sizes)) if len(sizes) == 1 else None


def notes(contract: CacheContract, load: Load, measure: Measure, kept: list[Kept]) -> Iterator[str]:
    """The notes, from what is asked for to what is known of the layers."""
    yield from _batch(kept, load.batch, fixed_batch(contract))
    context, limit = measure.context, counted_or_none(contract.context_limit)
    if context and limit and context > limit:
        yield f"the config declares {limit} tokens usable, fewer than the context of {context}"
    yield from _buffers(kept, context, _new_tokens(contract))
    yield from _encoder(kept, load.encoder_length)
    yield from _windows(kept)
    narrow = {one.slot.dtype for one in kept if one.slot.kind in REQUANTISED and one.item == 1}
    if narrow:
        yield f"stored as {', '.join(sorted(narrow))} already: other element types are not computed"


def _new_tokens(contract: CacheContract) -> int:
    """The new tokens that a decode step takes, where the graph fixes them; else one."""
    ports = contract.graph("decode").inputs
    sizes = [s for p in ports for s, axis in zip(p.shape or (), p.axes, strict=False) if axis == "new"]
    return max((size for size in sizes if isinstance(size, int)), default=1)


def _batch(kept: list[Kept], batch: int | None, fixed: int | None) -> Iterator[str]:
    if batch is None:
        return
    if fixed is not None and batch != fixed:
        unused = f", with {-batch % fixed} rows unused, which are not counted" if batch % fixed else ""
        yield f"the graph takes a batch of exactly {fixed}: {batch} sequences take {-(-batch // fixed)} calls{unused}"
    alone = [k for k in kept if not {"batch", "batch_heads", "blocks"} & set(k.slot.axes) and not k.once_for_the_batch]
    if alone and batch > 1:
        yield f"{len(alone)} tensors have no batch axis: each sequence has its own, and calls of its own"


def _buffers(kept: list[Kept], context: int | None, beside: int) -> Iterator[str]:
    """Buffers that hold less than the context, and lengths that somebody else chooses.

    `beside` are the new tokens of a step, which a buffer that gets them from the loop afterwards need not hold.
    """
    short = {one.positions: one for one in kept if one.counted == "capacity" and one.slot.kind == "self-attention"}
    for capacity, one in short.items():
        if capacity is None or context is None or capacity + (beside if one.slot.growth == "delta" else 0) >= context:
            continue
        then = "older tokens are forgotten" if one.bounded else "no more tokens fit"
        yield f"the cache has a fixed length of {capacity}, less than the context of {context}: {then}"
    free = [one for one in kept if one.counted == "tokens" and "capacity" in one.slot.axes]
    if any(one.slot.carry != "extend" for one in free):
        yield "the loop chooses the length of the buffers; counted is the context"
    if any(one.slot.growth == "paged" and not one.slot.size("block") for one in kept):
        yield "the engine chooses the size of the blocks; counted are the tokens alone, the last block's waste below"


def _encoder(kept: list[Kept], asked: int | None) -> Iterator[str]:
    lengths = {one.positions for one in kept if one.slot.kind in OVER_ENCODER}
    if asked and not lengths:
        yield "nothing in this cache depends on the encoder length"
    for length in sorted(number for number in lengths if number is not None):
        if asked and length != asked:
            yield f"the graph fixes the encoder length at {length}"


def _windows(kept: list[Kept]) -> Iterator[str]:
    """Layers that look back over a window while the graph keeps every token."""
    attended = [one for one in kept if one.slot.kind == "self-attention"]
    whole = [one for one in attended if one.window is not None and not one.bounded]
    for window in sorted({one.window for one in whole if one.window is not None}):
        mine = [one for one in whole if one.window == window]
        told = "the graph" if mine[0].slot.window is not None else "the config"
        yield (
            f"{len(mine)} of {len(attended)} self-attention tensors serve layers that look back over {window} tokens, "
            f"as {told} says; counted are all tokens"
        )
