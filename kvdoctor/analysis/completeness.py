"""The parts that a contract needs and lacks before a decode loop can run by it."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

from kvdoctor.contract import DECODING, CacheContract, MissingPart, Port, describe

NO_PAST = "no past input was found, neither by the names of known exporters nor by dataflow"
NO_LOGITS = "no output has the role logits; --logits-output NAME says which one has them"

MOST_FED = 2**27
"""Elements of one input by its declared numbers: half a gigabyte of floats, more than any decoder takes for a token."""


def find_missing_parts(contract: CacheContract) -> Iterator[MissingPart]:
    """Find what the roles of ports and the sizes of slots leave open.

    A past length may be open, but the widths of a slot must be numbers: an empty past is made with them.
    """
    decode = contract.graph("decode")
    if not contract.slots:
        yield MissingPart(decode.file, NO_PAST)
    if not any(decode.port(role) for role in ("token_ids", "token_and_position", "embeddings")):
        yield MissingPart(decode.file, "no input has the role token_ids")
    if not decode.port("logits") and not decode.port("next_token"):
        yield MissingPart(decode.file, NO_LOGITS)
    carried = {slot.continues_as for slot in contract.slots if slot.continues_as is not None}
    if (logits := decode.port("logits")) is not None and logits.name in carried:
        yield MissingPart(
            logits.name, "it is named as the logits, but the graph returns a past there", contradicts=True
        )
    for role in ("token_ids", "logits"):
        rivals = [port.name for port in (*decode.inputs, *decode.outputs) if port.role == role]
        if len(rivals) > 1:
            names = " and ".join(rivals[:3])
            yield MissingPart(rivals[1], f"{names} look like {role}, and nothing shows which one it is")
    yield from (
        MissingPart(port.name, "this input has no known role, and no rule says what to feed it")
        for phase in DECODING
        for port in contract.graph(phase).inputs
        if port.role == "auxiliary" and port.dtype
    )
    yield from _find_unfeedable(port for graph in contract.graphs.values() for port in graph.inputs)
    yield from _find_open_widths(contract)
    yield from find_unfilled(contract)


def find_unfilled(contract: CacheContract) -> Iterator[MissingPart]:
    """Find slots that no output of any file fills, and that the caller does not provide either."""
    for slot in contract.slots:
        if slot.filled_by is None and not slot.is_given:
            yield MissingPart(slot.past, "no output of any file fills this past")


def add_missing_parts(contract: CacheContract, found: Iterable[MissingPart]) -> CacheContract:
    """Add the missing parts that a reader found and those of the contract itself, each once.

    A paged cache lacks nothing that a contract could say: its tables are those of a serving engine.
    """
    if any(slot.growth == "paged" for slot in contract.slots):
        return contract
    parts = [*found, *find_missing_parts(contract)]
    first = {part.subject: part for part in reversed(parts)}
    return replace(contract, missing=tuple(first[name] for name in dict.fromkeys(part.subject for part in parts)))


def as_no_decoder(contract: CacheContract) -> CacheContract:
    """The contract of what is no decoder: it lacks none of a decoder's parts.

    What no output fills is no cache: keys and values that are new, or those of an encoder.
    """
    slots = tuple(slot for slot in contract.slots if slot.filled_by is not None)
    pasts = {slot.past for slot in slots}

    def as_input(port: Port) -> Port:
        return replace(port, role="auxiliary") if port.role == "past" and port.name not in pasts else port

    graphs = {name: replace(g, inputs=tuple(map(as_input, g.inputs))) for name, g in contract.graphs.items()}
    return replace(contract, graphs=graphs, slots=slots, missing=(), contradictions=())


def _find_open_widths(contract: CacheContract) -> Iterator[MissingPart]:
    """Widths of slots that are no numbers."""
    for slot in contract.slots:
        open_sizes = {a for d, a in zip(slot.shape, slot.axes, strict=True) if not isinstance(d, int)}
        if unknown := {"kv_heads", "head_dim", "channels", "state", "layers"} & open_sizes:
            yield MissingPart(slot.past, f"its {' and '.join(sorted(unknown))} is no number")
        if "batch_heads" in slot.axes and not contract.heads:
            reason = "neither a config nor the graph gives the number of heads"
            yield MissingPart(slot.past, f"an axis counts batch times heads, and {reason}")


def _find_unfeedable(ports: Iterable[Port]) -> Iterator[MissingPart]:
    """Inputs that cannot be fed. A past of length 0 has a check of its own."""
    for port in ports:
        if not port.dtype:
            reason = (
                "is not a tensor, or declares no element type; a sequence is read where constants say which element"
            )
            yield MissingPart(port.name, f"this input {reason}")
        elif port.shape is None:
            yield MissingPart(port.name, "this input has no declared shape")
        elif any(size == 0 and axis != "past" for size, axis in zip(port.shape, port.axes, strict=True)):
            yield MissingPart(port.name, f"an input of shape {describe(port.dtype, port.shape)} has no elements")
        elif math.prod(size for size in port.shape if isinstance(size, int)) > MOST_FED:
            yield MissingPart(port.name, f"{describe(port.dtype, port.shape)} has more elements than can be fed")
