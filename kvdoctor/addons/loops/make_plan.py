"""Makes the plan of a loop from a cache contract, or says why no loop can be written for it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvdoctor.addons.loops.plan import (
    FLOATS,
    INTEGERS,
    CallPlan,
    Count,
    Dim,
    EncoderSize,
    Fill,
    Input,
    LoopPlan,
    NoLoop,
    Rule,
    SlotPlan,
)
from kvdoctor.contract import DECODING, Axis, CacheContract, Carry, Graph, PhaseName, Port, Role, Slot
from kvdoctor.decode.embeddings import embedded_inputs
from kvdoctor.decode.inputs import fills_from_right

RULES: dict[Role, Rule] = {
    "token_ids": "tokens",
    "token_and_position": "token-and-position",
    "attention_mask": "attention-mask",
    "padding_mask": "padding-mask",
    "additive_mask": "causal-mask",
    "position_ids": "positions",
    "cache_position": "positions",
    "row_index": "rows",
    "encoder_input": "encoder-input",
    "encoder_mask": "encoder-mask",
    "encoder_states": "encoder-states",
}
COUNTS: dict[Role, Count] = {
    "write_index": "past",
    "past_length": "past",
    "total_length": "total",
    "last_index": "last",
    "new_length": "new",
    "last_new_index": "last-new",
    "batch_size": "batch",
    "encoder_length": "encoder_input",
}
MASKS: dict[Rule, tuple[float, float]] = {"attention-mask": (1, 0), "window-mask": (1, 0), "padding-mask": (0, 1)}
"""What a mask without rows shows and hides."""
CONSTANTS: dict[Role, float] = {"logits_to_keep": 0, "unused": 0, "scale": 1}
"""What is fed without a choice. Source: `decode/inputs.py`, by which every experiment runs."""

ORDER: tuple[Axis, ...] = ("batch", "new", "vocabulary")
"""The order of axes in which a program makes its inputs and reads the logits."""

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
    rows = [slot.axes for slot in contract.slots if slot.kind != "counter"]
    graphs = (contract.graph(phase) for phase in DECODING)
    masks = [graph.port("attention_mask") or graph.port("padding_mask") for graph in graphs]
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
        one_token=contract.new_tokens == 1,
        batch=contract.fixed_batch or (None if all({*axes} & {"batch", "batch_heads"} for axes in rows) else 1),
        capacity_is_chosen=any("capacity" in s.axes and s.size("capacity") is None for s in contract.slots),
        pads=all(mask is not None and "batch" in mask.axes for mask in masks),
        chunks=contract.new_tokens is None,
        placeholders=tuple(one.token for one in contract.features if one.token is not None),
    )


def _refuse_unknown(contract: CacheContract) -> None:
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
    sources = [port.name for port in _source_graph(contract).inputs if port.role == "encoder_input"]
    if len(sources) > 1:
        raise NoLoop(f"the encoder takes {' and '.join(map(repr, sources))}, for which there is no loop yet")
    for slot in contract.slots:
        if (reason := _refuse_slot(slot, contract)) is not None:
            raise NoLoop(f"the cache {slot.past!r} {reason}")


def _refuse_order(contract: CacheContract) -> None:
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
    logits, states = graph.port("logits"), _output(graph, "encoder_states")
    if phase in DECODING and logits is None:
        raise NoLoop(f"{graph.file} returns no logits, for which there is no loop yet")
    if logits is not None and logits.dtype in INTEGERS:
        raise NoLoop(f"{logits.name!r} has token ids in place of logits, for which there is no loop yet")
    fills = tuple(_fills(phase, slots))
    used = {logits.name if logits else None, states if phase == "encode" else None}
    if phase == "embed":
        used = {made for decoding in DECODING for made in embedded_inputs(contract, decoding).values()}
    used |= {fill.output for fill in fills}
    return CallPlan(
        file=graph.file,
        inputs=inputs,
        pasts=tuple(port.name for port in graph.inputs if port.name in taken),
        outputs=tuple(port.name for port in graph.outputs if port.name in used),
        logits=logits.name if logits else None,
        logits_type=logits.dtype if logits else "float",
        states=states if phase == "encode" else None,
        logits_dims=_declared(logits.name if logits else None, graph),
        states_dims=_declared(states, graph),
        fills=fills,
        encoder=_encoder_size(phase, contract) if any("encoder" in one.dims for one in inputs) else None,
    )


def _fills(phase: PhaseName, slots: tuple[SlotPlan, ...]) -> Iterator[Fill]:
    for number, slot in enumerate(slots):
        if phase == "decode" and slot.present is not None:
            yield Fill(number, slot.present, slot.carry)
        elif phase == ("encode" if slot.by_encoder else "prefill") and slot.made is not None:
            joined = slot.copies and not slot.by_encoder
            yield Fill(number, slot.made, slot.carry if joined else "feed-back")


def _encoder_size(phase: PhaseName, contract: CacheContract) -> EncoderSize:
    """Where a call finds the number of encoder states: in them, in the cache that they made, else in their source."""
    source = _source_graph(contract)
    if "encode" in contract.phases and (states := _output(source, "encoder_states")) is not None:
        return EncoderSize("encoded", states, 1)
    if "encode" not in contract.phases and any(port.role == "encoder_states" for port in source.inputs):
        return EncoderSize("source", None, 1)
    for one in contract.slots:
        made = one.filled_in == "encode" or phase == "decode"
        if "encoder" in one.axes and one.length_axis is not None and made:
            return EncoderSize("cache", one.past, one.length_axis)
    axes = next((port.axes for port in source.inputs if port.role == "encoder_input"), ())
    return EncoderSize("source", None, axes.index("encoder_input") if "encoder_input" in axes else len(axes) - 1)


def _dims(port: Port) -> tuple[Dim, ...]:
    return tuple(d if isinstance(d, int) else axis for d, axis in zip(port.shape or (), port.axes, strict=True))


def _declared(output: str | None, graph: Graph) -> tuple[Dim, ...]:
    return next((_dims(port) for port in graph.outputs if port.name == output and port.axes), ())


def _output(graph: Graph, role: Role) -> str | None:
    return next((port.name for port in graph.outputs if port.role == role), None)


def _input(port: Port, phase: PhaseName, contract: CacheContract) -> Input:
    if port.shape is None or port.dtype not in TYPES:
        declared = f"element type {port.dtype}" if port.dtype not in TYPES else "no declared shape"
        raise NoLoop(f"input {port.name!r} has {declared}, for which there is no loop yet")
    dims = _dims(port)
    batched = next((axis for axis, dim in enumerate(port.axes) if dim == "batch"), None)
    made = Input(port.name, port.dtype, dims, RULES.get(port.role, "number"), batch_axis=batched)
    if port.role == "embeddings":
        if port.name not in (makers := embedded_inputs(contract, phase)):
            why = "takes embeddings, and no graph next to it computes them from token ids"
            raise NoLoop(f"input {port.name!r} {why}")
        return replace(made, rule="embeddings", made=makers[port.name])
    if port.role in COUNTS:
        return replace(made, count=COUNTS[port.role])
    if made.rule == "number":
        return replace(made, **_constant(port, dims, phase, contract))
    if made.rule == "encoder-states" and "encode" in contract.phases:
        return replace(made, made=_output(contract.graph("encode"), "encoder_states"))
    if made.rule == "causal-mask":
        return _causal(made, port, contract)
    if port.role == "attention_mask" and fills_from_right(port, contract):
        made = replace(made, rule="window-mask", from_right=True)
    shown, hidden = MASKS.get(made.rule, (0, 0))
    return replace(made, shown=shown, hidden=hidden)


def _constant(port: Port, dims: tuple[Dim, ...], phase: PhaseName, contract: CacheContract) -> dict[str, Any]:
    """The number that an input is fed whatever the tokens are, and its shape."""
    value = CONSTANTS.get(port.role)
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
    return {"dims": dims, "value": value}


def _causal(made: Input, port: Port, contract: CacheContract) -> Input:
    """A mask with a row for each query: what it holds where a query may look, and where not."""
    if port.axes[-2] == "total" and "float" not in port.dtype:
        raise NoLoop(f"input {port.name!r} is a square mask of {port.dtype}, for which there is no loop yet")
    shown, hidden = (0.0, HIDDEN) if port.dtype in FLOATS else (1.0, 0.0)
    buffers = [slot for slot in contract.slots if slot.growth == "static" and slot.carry != "extend"]
    if buffers:  # the mask covers the whole of a buffer, whatever is in it
        extent: Dim = buffers[0].size("capacity") or "capacity"
        made = replace(made, dims=tuple(extent if dim == "total" else dim for dim in made.dims))
    carries = {slot.carry for slot in contract.slots}
    moving = "shift" in carries or any(slot.growth == "ring" for slot in contract.slots)
    return replace(
        made,
        shown=shown,
        hidden=hidden,
        from_right=moving and "drop-oldest" not in carries,
        rows_from="constant" if made.dims[-2] == "total" else "past",
    )


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
    stays = held or slot.growth == "constant" or (slot.growth == "static" and slot.carry in ("feed-back", "write"))
    cut = slot.growth in ("grow", "shared", "delta") and not (slot.trimmed or slot.prepended) and "past" in slot.axes
    cut = cut and slot.carry in ("feed-back", "append")
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
        rewinds="stays" if stays else "cut" if cut else "impossible",
        heads=(contract.heads or 1) if "batch_heads" in slot.axes else 1,
        zeros=tuple(_first_size(dim, first) for dim in dims) if zeros else None,
    )


def _first_size(dim: Dim, first: int) -> Dim:
    """The size of an axis before the first call: one that counts tokens or states has `first` entries."""
    if dim in ("past", "encoder"):
        return first
    return dim if isinstance(dim, int) or dim in ("batch", "batch_heads", "capacity") else 1
