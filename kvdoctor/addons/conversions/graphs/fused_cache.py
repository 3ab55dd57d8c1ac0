"""Caches that GroupQueryAttention holds: a buffer, or one that grows, by the past that the loop feeds.

The operator writes in place if its past is longer than the tokens in it, and returns past + new rows otherwise. So
only the declared length is changed: the mask or the lengths that are fed tell how many rows hold tokens. Source:
onnxruntime, contrib_ops/cpu/bert/group_query_attention_helper.h, `present_sequence_length`.
"""

from collections.abc import Iterator

from kvdoctor.contract import CacheContract, Slot
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.traverse import readers
from kvdoctor.report.repair_record import Change

OPERATOR, DOMAIN = "GroupQueryAttention", "com.microsoft"
TOLD_BY = ("past_length", "total_length", "last_index")
"""Roles of inputs that tell how many tokens there are."""
PAST_SIZE, TOTAL_SIZE = "past_sequence_length", "total_sequence_length"


def is_fused(model: ModelProto, slots: list[Slot]) -> bool:
    """Whether every one of some caches is held by the operator."""
    reading = readers(model.graph)
    return bool(slots) and all(
        any((node.op_type, node.domain) == (OPERATOR, DOMAIN) for node, _ in reading.get(slot.past, ()))
        for slot in slots
    )


def declare_length(model: ModelProto, slots: list[Slot], rows: int | None, file: str) -> Iterator[Change]:
    """Declare the rows of each past and present: a number for a buffer, None for a cache that grows."""
    at = {name: _find_length(slot) for slot in slots for name in (slot.past, str(slot.present))}
    pasts = {slot.past for slot in slots}
    for value in (*model.graph.input, *model.graph.output):
        dims = value.type.tensor_type.shape.dim
        if value.name not in at or at[value.name] >= len(dims):
            continue
        dim, is_past = dims[at[value.name]], value.name in pasts
        before = dim.dim_param or str(dim.dim_value)
        dim.Clear()
        if rows is None:
            dim.dim_param = PAST_SIZE if is_past else TOTAL_SIZE
        else:
            dim.dim_value = rows
        after = dim.dim_param or f"{rows} entries"
        yield Change(file, f"{'input' if is_past else 'output'} {value.name!r}", before, after)


def _find_length(slot: Slot) -> int:
    return next(at for at, axis in enumerate(slot.axes) if axis in ("past", "capacity"))


def buffer_rule(capacity: int) -> str:
    """How a loop holds a buffer of any kind."""
    return (
        f"Every past has {capacity} rows: allocate it once, filled with zeros, and feed each present as the next past. "
        "Both may be bound to the same memory."
    )


def list_buffer_rules(contract: CacheContract, capacity: int) -> Iterator[str]:
    """What the loop must do with a buffer."""
    yield buffer_rule(capacity)
    inputs = contract.graph("decode").inputs
    lengths = ", ".join(port.name for port in inputs if "total" in port.axes or port.role in TOLD_BY)
    counts = f" ({lengths})" if lengths else ""
    yield f"The other inputs are those of a growing cache{counts}: they say which of the {capacity} rows hold tokens."
    yield (
        f"A sequence has {capacity} tokens at most: a call beyond that returns longer presents, and fails where they "
        "are bound to the buffer. To go back, feed a shorter total length: later rows are written again."
    )


def list_growing_rules(contract: CacheContract) -> Iterator[str]:
    """What the loop must do with a cache that grows."""
    yield "The first call is fed a past of length 0, later ones the present, which is past + new rows long."
    if contract.capacity is not None:
        yield (
            f"The original stops after {contract.capacity} tokens, so that longer sequences are compared with a call "
            "without a cache alone."
        )
