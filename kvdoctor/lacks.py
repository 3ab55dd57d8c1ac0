"""What stands in the way of driving a stack, read off its contract."""

import math
from collections.abc import Iterable, Iterator

from kvdoctor.contract import CacheContract, Lack, Port, describe

MOST_FED = 2**27
"""Elements of the declared numbers of one input: half a gigabyte of floats, more than a decoder takes for a token."""


def lacks(contract: CacheContract) -> Iterator[Lack]:
    """Say what the roles of ports and the sizes of slots leave open.

    A past axis may be anything but the widths of a slot must be numbers, since placeholders are made of them.
    """
    decode = contract.graph("decode")
    if not contract.slots:
        yield Lack(decode.file, "no past input is named as a known exporter names it, and none is found by dataflow")
    if not any(decode.port(role) for role in ("token_ids", "token_and_position", "embeddings")):
        yield Lack(decode.file, "there is no token_ids")
    if decode.port("token_ids") and decode.port("embeddings"):
        yield Lack(decode.file, "there are both token_ids and embeddings, and nothing says which to feed")
    if not decode.port("logits") and not decode.port("next_token"):
        yield Lack(decode.file, "there is no logits")
    carried = {slot.continues_as for slot in contract.slots if slot.continues_as is not None}
    if (logits := decode.port("logits")) is not None and logits.name in carried:
        yield Lack(logits.name, "this output is named as the logits, and the graph carries a past on there")
    for role in ("token_ids", "logits", "position_ids"):
        rivals = [port.name for port in (*decode.inputs, *decode.outputs) if port.role == role]
        if len(rivals) > 1:
            yield Lack(rivals[1], f"{' and '.join(rivals[:3])} look like {role}, and nothing says which it is")
    yield from _unfeedable(port for graph in contract.graphs.values() for port in graph.inputs)
    yield from _unsized(contract)
    yield from unfilled(contract)


def unfilled(contract: CacheContract) -> Iterator[Lack]:
    """Slots that no output of any file fills, and that no caller is to give."""
    for slot in contract.slots:
        if slot.filled_by is None and not slot.is_given:
            yield Lack(slot.past, "no output of any file fills this past")


def in_all(contract: CacheContract, found: Iterable[Lack]) -> tuple[Lack, ...]:
    """What was found missing, and what the contract lacks, each once.

    A streaming encoder or a stage of a pipeline has states too, but no tokens: nothing of a decoder is missing there.
    """
    if contract.slots and not contract.takes_tokens:
        return ()
    return tuple(dict.fromkeys([*found, *lacks(contract)]))


def _unsized(contract: CacheContract) -> Iterator[Lack]:
    """Widths of slots that nothing says."""
    for slot in contract.slots:
        open_sizes = {a for d, a in zip(slot.shape, slot.axes, strict=True) if not isinstance(d, int)}
        if unknown := {"kv_heads", "head_dim", "channels", "state", "layers"} & open_sizes:
            yield Lack(slot.past, f"its {' and '.join(sorted(unknown))} is no number")
        if "batch_heads" in slot.axes and not contract.heads:
            yield Lack(slot.past, "an axis counts batch times heads, and no config says how many heads")


def _unfeedable(ports: Iterable[Port]) -> Iterator[Lack]:
    """Inputs that no feed can be made of. A past of length 0 has a check of its own."""
    for port in ports:
        if not port.dtype:
            yield Lack(port.name, "this input is no tensor, or declares no element type")
        elif port.shape is None:
            yield Lack(port.name, "this input has no declared shape")
        elif any(size == 0 and axis != "past" for size, axis in zip(port.shape, port.axes, strict=True)):
            yield Lack(port.name, f"an input of shape {describe(port.dtype, port.shape)} has no elements")
        elif math.prod(size for size in port.shape if isinstance(size, int)) > MOST_FED:
            yield Lack(port.name, f"{describe(port.dtype, port.shape)} are more elements than can be fed")
