"""Makes a static cache, a buffer that each call writes in place, one that grows with the tokens.

Requires: one graph for all steps that writes each buffer by TensorScatter, ScatterND or ScatterElements, new
rows after those of the tokens before. Ensures: the past and the new rows are joined by a Concat, past and present are
as long as their tokens, and a mask has past + new columns. A growing cache is a buffer that has no rows after the new
ones: the buffer's length is past + new wherever the graph computes with it.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from kvdoctor.addons.conversions.graphs.conversion import Converted, GraphConversion, declare_sizes, forget_trace
from kvdoctor.addons.conversions.graphs.length_uses import PAST, LengthUses
from kvdoctor.analysis.lm_head import describe_op
from kvdoctor.analysis.proof.types import symbol
from kvdoctor.contract import CacheContract, Graph, Port, Slot
from kvdoctor.model.edit import drop_unused, keep_only, sort_nodes
from kvdoctor.model.operators import has, operator_of, operators_with
from kvdoctor.model.proto import ModelProto, NodeProto
from kvdoctor.model.traverse import find_attribute, input_of, needed_for, output_of, readers
from kvdoctor.records import record
from kvdoctor.repair.shapes.freeing import AxisFreeing, read_declared_sizes
from kvdoctor.repair.shapes.terms import CannotFree, ConflictingSizes, read_lengths
from kvdoctor.repair.workspace import RepairContext
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
    """Declare the rows of each past and present: a number for a buffer, None for a cache that grows.

    GroupQueryAttention writes in place if its past is longer than the tokens in it, and returns past + new rows
    otherwise: the mask or the lengths that are fed tell how many rows hold tokens. Source: onnxruntime,
    contrib_ops/cpu/bert/group_query_attention_helper.h, `present_sequence_length`.
    """
    sizes = dict[str, dict[int, int | str]]()
    for slot in slots:
        at = next(at for at, axis in enumerate(slot.axes) if axis in ("past", "capacity"))
        sizes[slot.past] = {at: PAST_SIZE if rows is None else rows}
        sizes[str(slot.present)] = {at: TOTAL_SIZE if rows is None else rows}
    return declare_sizes(model, sizes, file)


def buffer_rule(capacity: int) -> str:
    """How a loop holds a buffer of any kind."""
    return (
        f"Every past has {capacity} rows: allocate it once, filled with zeros, and feed each present as the next past. "
        "Both may be bound to the same memory."
    )


POSITION_RULE = "cache_position, int64[new], is n, n + 1, ... with n tokens in the cache: new rows are written there."


def list_buffer_rules(contract: CacheContract, capacity: int, has_position: bool) -> Iterator[str]:
    """What the loop must do with a buffer."""
    yield buffer_rule(capacity)
    if has_position:
        yield POSITION_RULE
    inputs = contract.graph("decode").inputs
    lengths = ", ".join(port.name for port in inputs if "total" in port.axes or port.role in TOLD_BY)
    counts = f" ({lengths})" if lengths else ""
    yield f"The other inputs are those of a growing cache{counts}, as long as the tokens so far and not {capacity}."
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


MOVING = operators_with("permute", "copy")
"""Operators between a past and the node that writes into it."""
MOST_STEPS = 8
NEW_SIZE = "sequence_length"


@record(slots=False)
class _Write:
    """The node that writes into a buffer, and the axis of its data that counts the tokens."""

    slot: Slot
    node: NodeProto
    axis: int


def convert(context: RepairContext, choice: str) -> Converted:  # noqa: ARG001 - there is one choice
    """Make the buffers of a stack caches that grow.

    Raises:
        CannotRepair: a node stands in the way; the message names it.
    """
    contract = context.drivable
    slots = _find_buffers(context, contract)
    file = context.file_of("decode")
    model = context.model(file)
    if is_fused(model, slots):
        grown = [*declare_length(model, slots, None, file), *forget_trace(context, file)]
        del model.graph.value_info[:]  # they hold the buffer's length
        return Converted(tuple(grown), tuple(list_growing_rules(contract)))
    graph = _with_buffer_lengths(contract.graph("decode"), slots)
    changes = list[Change](_free_length(context, model, graph))
    uses = LengthUses(model, graph, contract.capacity or 0)
    uses.lengths.where[PAST] = (slots[0].past, slots[0].axes.index("capacity"))  # a mask is not as long any more
    writes = [_find_write(context, model, slot, uses) for slot in slots]
    changes += uses.rewrite_alike(symbol(PAST) + symbol("new"))
    for write in writes:
        changes.append(_join(model, write, file))
    changes += _drop_unread_inputs(model, contract, file)
    changes += _declare(model, graph, slots, file)
    changes += forget_trace(context, file)
    sort_nodes(model.graph)
    return Converted(tuple(changes), tuple(_list_rules(contract, graph)))


def _find_buffers(context: RepairContext, contract: CacheContract) -> list[Slot]:
    slots = [slot for slot in contract.slots if "capacity" in slot.axes]
    if not slots:
        context.cannot("it has no static buffer")
    if contract.ring is not None:
        context.cannot(f"{slots[0].past!r} is a ring, where new rows replace the oldest: one that grows keeps them")
    for slot in slots:
        if slot.growth != "static" or slot.carry != "feed-back" or slot.present is None:
            context.cannot(
                f"the buffer {slot.past!r} is not written in place by the graph ({slot.growth}, {slot.carry})"
            )
    return slots


def _with_buffer_lengths(graph: Graph, slots: list[Slot]) -> Graph:
    """The graph whose buffers have the past's length; so have the masks with as many columns."""
    sizes = {slot.shape[slot.axes.index("capacity")] for slot in slots}
    pasts = {slot.past: slot for slot in slots}

    def renamed(port: Port) -> Port:
        if port.name in pasts:
            slot = pasts[port.name]
            return replace(port, axes=tuple("past" if axis == "capacity" else axis for axis in slot.axes))
        shape = port.shape or ()
        if len(shape) != len(port.axes):
            return port
        axes = ("past" if a == "total" and d in sizes else a for a, d in zip(port.axes, shape, strict=True))
        return replace(port, axes=tuple(axes))

    return replace(graph, inputs=tuple(map(renamed, graph.inputs)))


def _free_length(context: RepairContext, model: ModelProto, graph: Graph) -> tuple[Change, ...]:
    try:
        lengths = read_lengths(graph, read_declared_sizes(model), ("past",))
        return AxisFreeing(model, lengths, partial(context.values, graph.file)).run() if lengths.freed else ()
    except (CannotFree, ConflictingSizes) as reason:
        context.cannot(f"the length of the buffers is a number that cannot be computed: {reason}")


def _find_write(context: RepairContext, model: ModelProto, slot: Slot, uses: LengthUses) -> _Write:
    """The node that writes new rows into a buffer.

    Raises:
        CannotRepair: another node reads it; the message names it.
    """
    reading, name = readers(model.graph), slot.past
    found: list[tuple[NodeProto, int]] = []
    for _ in range(MOST_STEPS):
        found = [(node, index) for node, index in reading.get(name, ()) if not has(node.op_type, "sizes")]
        if len(found) != 1 or found[0][0].op_type not in MOVING:
            break
        name = output_of(found[0][0])
    axes = [_read_axis(node, index, uses) for node, index in found]
    if len(found) == 1 and axes[0] is not None:
        return _Write(slot, found[0][0], axes[0])
    other = next((node for (node, _), axis in zip(found, axes, strict=True) if axis is None), None)
    words = f"the node {describe_op(other)} reads" if other is not None else "not one node alone reads"
    return context.cannot(f"{words} {slot.past!r}, where a write of new rows is expected")


def _read_axis(node: NodeProto, index: int, uses: LengthUses) -> int | None:
    """The axis of the data along which whole rows are written; None for another operator or form."""
    if index or node.domain or not has(node.op_type, "write"):
        return None
    if any(
        attribute.name in ("mode", "reduction") and attribute.s not in (b"linear", b"none")
        for attribute in node.attribute
    ):
        return None
    data = uses.shape_of(input_of(node, 0))
    if data is None:
        return None
    default = operator_of(node.op_type).axis
    if default is None:
        places = uses.shape_of(input_of(node, 1))
        count = places[-1].number if places and places[-1] is not None else None
        # One index for each row, counted in as many axes as the index has in front: then the rows are a tensor like it.
        axis = count - 1 if places and count == len(places) - 1 else None
    else:
        found = find_attribute(node, "axis")
        axis = int(found.i) if found is not None else default
    if axis is None or not -len(data) <= axis < len(data):
        return None
    axis %= len(data)
    return axis if data[axis] == symbol(PAST) else None


def _join(model: ModelProto, write: _Write, file: str) -> Change:
    node, before = write.node, f"writes rows into {write.slot.past!r} ({write.node.op_type})"
    index = operator_of(node.op_type).new
    given = [name for at, name in enumerate(node.input) if at not in (0, index)]
    node.input[:] = [node.input[0], input_of(node, index)]
    node.op_type = "Concat"
    del node.attribute[:]
    node.attribute.add(name="axis", i=write.axis, type=2)
    for name in given:
        drop_unused(model.graph, name)
    return Change(file, describe_op(node), before, "joins them to it")


def _drop_unread_inputs(model: ModelProto, contract: CacheContract, file: str) -> Iterator[Change]:
    needed = needed_for(model.graph, [value.name for value in model.graph.output])
    ports, roles = contract.graph("decode").inputs, ("write_index", "cache_position", "past_length")
    gone = [port.name for port in ports if port.role in roles and port.name not in needed]
    keep_only(model.graph.input, lambda value: value.name not in gone)
    for name in gone:
        yield Change(file, f"input {name!r}", "the place to write at", "removed: nothing reads it")


def _declare(model: ModelProto, graph: Graph, slots: list[Slot], file: str) -> Iterator[Change]:
    new = graph.declared_new_tokens
    total = f"{PAST_SIZE} + {new if new is not None else NEW_SIZE}"
    pasts, sizes = {slot.past for slot in slots}, dict[str, dict[int, int | str]]()
    for port in graph.inputs:
        size = PAST_SIZE if port.name in pasts else total
        sizes[port.name] = {at: size for at, axis in enumerate(port.axes) if axis == "past"}
    sizes |= {str(slot.present): {slot.axes.index("capacity"): total} for slot in slots}
    yield from declare_sizes(model, sizes, file)
    del model.graph.value_info[:]  # they hold the buffer's length


def _list_rules(contract: CacheContract, graph: Graph) -> Iterator[str]:
    first, *rest = list_growing_rules(contract)
    yield first
    masks = [port.name for port in graph.inputs if port.role != "past" and "past" in port.axes]
    if masks:
        yield f"{' and '.join(masks)} ha{'s' if len(masks) == 1 else 've'} past + new columns."
    yield from rest


CONVERSION = GraphConversion(
    "cache growing",
    order=25,
    read=lambda choices: "growing" if choices.cache == "growing" else None,
    title=lambda choice: f"cache {choice}",
    convert=convert,
    one_graph=True,
)
