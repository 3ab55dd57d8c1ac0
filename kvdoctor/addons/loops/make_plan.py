"""Makes the plan of a loop from a cache contract, or says why no loop can be written for it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from kvdoctor.addons.loops.plan import (
    FLOATS,
    INTEGERS,
    MANY,
    SOURCE,
    CallPlan,
    Dim,
    Input,
    LoopPlan,
    NoLoop,
    SizeOf,
    SlotPlan,
    Take,
    Terms,
)
from kvdoctor.contract import DECODING, Axis, CacheContract, Carry, Graph, PhaseName, Port, Role, Slot
from kvdoctor.decode.embeddings import embedded_inputs
from kvdoctor.decode.inputs import fills_from_right

POSITIONS = {"begin": {"padding": 1, "past": -1}, "inside": {"past": 1, "padding": -1}, "step": 1}
"""Those of the new tokens: padding is not counted, and has 0."""
MADE: dict[Role, dict[str, Any]] = {
    "token_ids": {"copy": "tokens"},
    "token_and_position": {"copy": "tokens", "inside": {"past": 1}},
    "position_ids": POSITIONS,
    "cache_position": POSITIONS,
    "encoder_mask": {"copy": "mask", "inside": {"one": 1}},
    "encoder_input": {"value": SOURCE},
    "write_index": {"inside": {"past": 1}},
    "past_length": {"inside": {"past": 1}},
    "total_length": {"inside": {"total": 1}},
    "last_index": {"inside": {"total": 1, "one": -1}},
    "new_length": {"inside": {"new": 1}},
    "last_new_index": {"inside": {"new": 1, "one": -1}},
    "batch_size": {"inside": {"batch": 1}},
    "encoder_length": {"inside": {"encoder_input": 1}},
    "row_index": {"inside": {"sequence": 1}},
    "logits_to_keep": {},
    "unused": {},
    "scale": {"inside": {"one": 1}},
}
"""How an input is made, by its role; others need more of the contract. Source: `decode/inputs.py`, by which every
experiment runs."""

ORDER: tuple[Axis, ...] = ("batch", "new", "vocabulary")
"""The order of axes in which a program makes its inputs and reads the logits."""

FROM_RIGHT: Terms = {"columns": 1, "total": -1}
"""The column of the first token where the last token is in the last one."""

HIDDEN = -1e4
"""What a mask of floats adds to the scores of entries that must not be seen; within the range of float16."""

TYPES = (*FLOATS, *INTEGERS, "bool", "int8", "uint8")
"""The element types that every language here has a way to make."""


def make_plan(contract: CacheContract, model: str) -> LoopPlan:
    """The plan of a stack's loop.

    Raises:
        NoLoop: the contract is incomplete, or has an input for which no loop knows a value.
    """
    if contract.missing:
        first = contract.missing[0]
        raise NoLoop(f"{first.subject}: {first.reason}; `kvdoctor inspect` shows what the graph declares")
    _refuse_unknown(contract)
    slots = tuple(_slot(slot, contract) for slot in contract.slots)
    return LoopPlan(
        model=model,
        layout=contract.layout,
        encode=_call(contract, "encode", slots) if "encode" in contract.phases else None,
        embed=_call(contract, "embed", slots) if "embed" in contract.phases else None,
        prefill=_call(contract, "prefill", slots),
        decode=_call(contract, "decode", slots),
        slots=slots,
        vocabulary=contract.vocabulary,
        context_limit=contract.usable_length,
        longest=(contract.longest_sequence or MANY) if contract.ring else None,
        one_token=contract.new_tokens == 1,
        batch=contract.fixed_batch or _one_row(contract),
        capacity_is_chosen=any("capacity" in s.axes and s.size("capacity") is None for s in contract.slots),
        pads=_pads(contract),
        chunks=contract.new_tokens is None,
        placeholders=tuple(one.token for one in contract.features if one.token is not None),
    )


def _refuse_unknown(contract: CacheContract) -> None:
    """Raise for what no loop here can do."""
    if contract.no_decoder is not None:
        raise NoLoop(f"this is no decoder with a KV cache: {contract.no_decoder}")
    if stages := contract.graph("decode").stages:
        raise NoLoop(f"the decoder is a pipeline of {len(stages)} files, for which there is no loop yet")
    if contract.codebooks > 1:
        raise NoLoop(f"it takes {contract.codebooks} streams of tokens at once, for which there is no loop yet")
    if contract.new_tokens not in (None, 1):
        raise NoLoop(f"a call takes exactly {contract.new_tokens} new tokens: export it with a free sequence axis")
    if contract.frozen_past is not None:
        raise NoLoop(f"the past has the fixed length {contract.frozen_past}: export it with a free past axis")
    _refuse_order(contract)
    read = ("encoder_input", "encoder_states")
    sources = [repr(port.name) for port in _source_graph(contract).inputs if port.role in read]
    if len(sources) > 1:
        raise NoLoop(f"{' and '.join(sources)} take what two encoders read or return; there is no loop for that yet")
    for slot in contract.slots:
        if (reason := _refuse_slot(slot, contract)) is not None:
            raise NoLoop(f"the cache {slot.past!r} {reason}")


def _refuse_order(contract: CacheContract) -> None:
    """Raise for inputs and logits with tokens before sequences."""
    served = [contract.graph(phase) for phase in DECODING if phase in contract.phases]
    for port in (port for graph in served for port in (*graph.inputs, *graph.outputs)):
        order = [axis for axis in port.axes if axis in ORDER]
        if port.role not in ("past", "present") and order != sorted(order, key=ORDER.index):
            raise NoLoop(f"{port.name!r} has its axes in the order {', '.join(order)}, for which there is no loop yet")


def _refuse_slot(slot: Slot, contract: CacheContract) -> str | None:
    if slot.filled_in == "encode" and "encode" not in contract.phases:
        return "is made by an encoder that is not there; give the folder of the whole export"
    if slot.growth == "paged":
        return "is a pool of blocks, for which there is no loop yet"
    if slot.carry == "extend":
        return "is returned in another length than it is fed, for which there is no loop yet"
    if slot.is_given:
        return "is given by the caller and made by no graph, for which there is no loop yet"
    return None


def _source_graph(contract: CacheContract) -> Graph:
    """The graph that reads what is to be translated, transcribed or described."""
    return contract.graph("encode" if "encode" in contract.phases else "prefill")


def _call(contract: CacheContract, phase: PhaseName, slots: tuple[SlotPlan, ...]) -> CallPlan:
    graph = contract.graph(phase)
    taken = {slot.past for slot in slots}
    inputs = tuple(_input(port, phase, contract) for port in graph.inputs if port.name not in taken)
    logits = graph.port("logits")
    if phase in DECODING and logits is None:
        raise NoLoop(f"{graph.file} returns no logits, for which there is no loop yet")
    if logits is not None and logits.dtype in INTEGERS:
        raise NoLoop(f"{logits.name!r} has token ids in place of logits, for which there is no loop yet")
    takes = tuple(dict.fromkeys((*_takes(phase, slots), *_passes_on(phase, contract))))
    used = {logits.name if logits else None, *(take.output for take in takes)}
    return CallPlan(
        file=graph.file,
        inputs=inputs,
        pasts=tuple(port.name for port in graph.inputs if port.name in taken),
        outputs=tuple(port.name for port in graph.outputs if port.name in used),
        logits=logits.name if logits else None,
        logits_type=logits.dtype if logits else "float",
        logits_dims=next((_dims(port) for port in graph.outputs if logits is port and port.axes), None),
        takes=takes,
        sizes=dict(_sizes(inputs, phase, contract)),
    )


def _takes(phase: PhaseName, slots: tuple[SlotPlan, ...]) -> Iterator[Take]:
    """The outputs of a call that go into the cache."""
    for slot in slots:
        output, carry = slot.present, slot.carry
        if phase != "decode":
            output = slot.made if phase == ("encode" if slot.by_encoder else "prefill") else None
            carry = slot.carry if slot.copies and not slot.by_encoder else "feed-back"
        if output is not None:
            axis = None if carry == "feed-back" else slot.length_axis
            yield Take(output, slot.value, carry, axis, slot.dtype, _returned(slot, carry))


def _returned(slot: SlotPlan, carry: Carry) -> tuple[Dim, ...]:
    """The shape of an output that goes into a slot."""
    dims: list[Dim] = ["total" if dim == "past" else dim for dim in slot.dims]
    if slot.length_axis is not None and carry in ("append", "write", "shift"):
        dims[slot.length_axis] = "new"
    elif slot.length_axis is not None and carry == "drop-oldest" and isinstance(size := dims[slot.length_axis], int):
        dims[slot.length_axis] = size + 1
    return tuple(dims)


def _passes_on(phase: PhaseName, contract: CacheContract) -> Iterator[Take]:
    """The outputs of the encoder or of the embed graph that other calls are fed."""
    graph = contract.graph(phase)
    if phase == "encode" and (states := _output(graph, "encoder_states")) is not None:
        port = next(port for port in graph.outputs if port.name == states)
        taker = next((one for one in contract.graph("decode").inputs if one.role == "encoder_states"), port)
        yield Take(states, f"encoder {states}", "feed-back", None, port.dtype, _dims(taker) if taker.axes else None)
    for decoding in DECODING if phase == "embed" else ():
        for name, made in embedded_inputs(contract, decoding).items():
            port = next(port for port in contract.graph(decoding).inputs if port.name == name)
            yield Take(made, f"embed {made}", "feed-back", None, port.dtype, _dims(port))


def _sizes(inputs: tuple[Input, ...], phase: PhaseName, contract: CacheContract) -> Iterator[tuple[str, SizeOf]]:
    """Where a call finds sizes that neither its tokens nor the cache have."""
    read = ("encoder_input", "encoder_states")
    axes = next((port.axes for port in _source_graph(contract).inputs if port.role in read), ())
    length = next((at for at, axis in enumerate(axes) if axis in ("encoder_input", "encoder")), len(axes) - 1)
    if any("encoder_input" in (*one.dims, *one.inside) for one in inputs):
        yield "encoder_input", SizeOf(SOURCE, length)
    if any("encoder" in one.dims for one in inputs):
        yield "encoder", _encoder_size(phase, length, contract)


def _encoder_size(phase: PhaseName, length: int, contract: CacheContract) -> SizeOf:
    """The number of encoder states: in them, in the cache that they made, else in their source."""
    if "encode" in contract.phases and (states := _output(contract.graph("encode"), "encoder_states")) is not None:
        return SizeOf(f"encoder {states}", 1)
    for one in contract.slots:
        made = one.filled_in == "encode" or phase == "decode"
        if "encoder" in one.axes and one.length_axis is not None and made:
            return SizeOf(f"cache {one.past}", one.length_axis)
    return SizeOf(SOURCE, length)


def _dims(port: Port) -> tuple[Dim, ...]:
    """The sizes of a port: the declared numbers, else what the axes count."""
    return tuple(d if isinstance(d, int) else axis for d, axis in zip(port.shape or (), port.axes, strict=True))


def _output(graph: Graph, role: Role) -> str | None:
    return next((port.name for port in graph.outputs if port.role == role), None)


def _input(port: Port, phase: PhaseName, contract: CacheContract) -> Input:
    if port.shape is None or port.dtype not in TYPES:
        declared = f"element type {port.dtype}" if port.dtype not in TYPES else "no declared shape"
        raise NoLoop(f"input {port.name!r} has {declared}, for which there is no loop yet")
    batched = next((axis for axis, dim in enumerate(port.axes) if dim == "batch"), None)
    made = Input(port.name, port.dtype, _dims(port), batched)
    if port.role in MADE:
        return replace(made, **MADE[port.role])
    if port.role == "embeddings":
        return replace(made, value=_maker(port, phase, contract))
    if port.role == "encoder_states":
        states = _output(contract.graph("encode"), "encoder_states") if "encode" in contract.phases else None
        return replace(made, value=f"encoder {states}" if states else SOURCE)
    if port.role == "additive_mask":
        return _causal(made, port, contract)
    if port.role in ("attention_mask", "padding_mask"):
        seen, hidden = (0, 1) if port.role == "padding_mask" else (1, 0)
        made = replace(made, begin={"padding": 1}, end={"total": 1}, inside={"one": seen}, outside=hidden)
        if port.role == "attention_mask" and fills_from_right(port, contract):
            made = replace(made, begin={**made.begin, **FROM_RIGHT}, end={"columns": 1})
        return made
    return replace(made, **_constant(port, made.dims, phase, contract))


def _constant(port: Port, dims: tuple[Dim, ...], phase: PhaseName, contract: CacheContract) -> dict[str, Any]:
    """The number that an input is fed whatever the tokens are, and its shape."""
    value = None
    if port.role == "features":  # of images or audio, of which there are none
        dims, value = tuple(dim if isinstance(dim, int) else 0 for dim in dims), 0.0
    elif port.role == "adapter":  # none: zeros, of rank 1 where the rank is open
        dims, value = tuple(dim if isinstance(dim, int) else 1 for dim in dims), 0.0
    elif port.role == "branch_switch":
        value = float(bool(contract.phases[phase].switch))
    elif port.role in ("has_past", "first_call"):
        value = float((phase == "decode") == (port.role == "has_past"))
    elif port.role == "setting":
        value = port.value
    elif port.role == "beam_input":  # one beam: their number, and which of them an entry is from
        value = 1.0 if len(dims) < 2 else 0.0
    if value is None:
        raise NoLoop(f"input {port.name!r} is of the kind {port.role!r}, for which there is no loop yet")
    return {"dims": dims, "inside": {"one": value}}


def _maker(port: Port, phase: PhaseName, contract: CacheContract) -> str:
    """The value of the embed call that an input takes."""
    made = embedded_inputs(contract, phase).get(port.name)
    if made is None:
        raise NoLoop(f"input {port.name!r} takes embeddings, and no graph next to it computes them from token ids")
    return f"embed {made}"


def _causal(made: Input, port: Port, contract: CacheContract) -> Input:
    """A mask with a row for each query: what it holds where a query may look, and where not."""
    if port.axes[-2] == "total" and "float" not in port.dtype:
        raise NoLoop(f"input {port.name!r} is a square mask of {port.dtype}, for which there is no loop yet")
    shown, hidden = (0.0, HIDDEN) if port.dtype in FLOATS else (1.0, 0.0)
    buffers = [slot for slot in contract.slots if slot.growth == "static" and slot.carry != "extend"]
    if buffers:  # the mask covers the whole of a buffer, whatever is in it
        size: Dim | None = buffers[0].size("capacity")
        made = replace(made, dims=tuple((size or "capacity") if dim == "total" else dim for dim in made.dims))
    carries = {slot.carry for slot in contract.slots}
    moving = "shift" in carries or any(slot.growth == "ring" for slot in contract.slots)
    first = FROM_RIGHT if moving and "drop-oldest" not in carries else {}
    end = {"query": 1, "one": 1, **first} | ({} if made.dims[-2] == "total" else {"past": 1})
    return replace(made, begin=first, end=end, inside={"one": shown}, outside=hidden)


def _slot(slot: Slot, contract: CacheContract) -> SlotPlan:
    if slot.dtype not in TYPES:
        raise NoLoop(f"the cache {slot.past!r} has element type {slot.dtype}, for which there is no loop yet")
    dims = tuple(d if isinstance(d, int) else axis for d, axis in zip(slot.shape, slot.axes, strict=True))
    batched = next((i for i, axis in enumerate(slot.axes) if axis in ("batch", "batch_heads")), None)
    held = slot.carry == "hold" or slot.present is None
    carry: Carry = "hold" if held else slot.carry if slot.length_axis is not None else "feed-back"
    by_encoder = slot.filled_in == "encode"
    # The branch without a past does not look at it, and some bindings take no tensor without elements.
    first = 1 if contract.first_step == "no-past-branch" else 0
    taken = any(port.name == slot.past for port in contract.graph("prefill").inputs)
    zeros = not by_encoder and (taken or slot.filled_by is None or carry not in ("feed-back", "hold"))
    return SlotPlan(
        past=slot.past,
        present=None if held else slot.present,
        made=slot.filled_by,
        by_encoder=by_encoder,
        dtype=slot.dtype,
        dims=dims,
        carry=carry,
        batch_axis=batched,
        length_axis=slot.length_axis,
        rewinds=_rewinding(slot, held),
        heads=(contract.heads or 1) if "batch_heads" in slot.axes else 1,
        zeros=tuple(_first_size(dim, first) for dim in dims) if zeros else None,
    )


def _first_size(dim: Dim, first: int) -> Dim:
    """The size of an axis before the first call: one that counts tokens or states has `first` entries."""
    if dim in ("past", "encoder"):
        return first
    return dim if isinstance(dim, int) or dim in ("batch", "batch_heads", "capacity") else 1


def _rewinding(slot: Slot, held: bool) -> Literal["cut", "stays", "impossible"]:
    if held or slot.growth == "constant" or (slot.growth == "static" and slot.carry in ("feed-back", "write")):
        return "stays"
    cut = slot.growth in ("grow", "shared", "delta") and not (slot.trimmed or slot.prepended) and "past" in slot.axes
    return "cut" if cut and slot.carry in ("feed-back", "append") else "impossible"


def _one_row(contract: CacheContract) -> int | None:
    """1 where some state has no axis of sequences, else None."""
    axes = [slot.axes for slot in contract.slots if slot.kind != "counter"]
    return None if all("batch" in one or "batch_heads" in one for one in axes) else 1


def _pads(contract: CacheContract) -> bool:
    """Whether the graphs take a mask for each sequence; a run shows whether padding on the left is right with it."""
    masks = [graph.port("attention_mask") or graph.port("padding_mask") for graph in _decoding(contract)]
    return all(mask is not None and "batch" in mask.axes for mask in masks)


def _decoding(contract: CacheContract) -> tuple[Graph, ...]:
    """The graphs of the first and of the later calls."""
    return tuple(contract.graph(phase) for phase in DECODING)
