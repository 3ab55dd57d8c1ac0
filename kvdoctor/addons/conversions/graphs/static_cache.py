"""Makes a cache that grows a buffer of N tokens, which each call writes in place.

Requires: one graph for all steps whose pasts and new rows meet in a Concat (or in Attention of opset 23 under a mask),
and no use of the past's length but those that `length_uses` knows; opset 13. Ensures: past and present are N rows long;
`cache_position`, int64[new], says where the new rows are written, by TensorScatter from opset 24 on and by ScatterND
before; a mask has N columns, and rows after the tokens are hidden. GroupQueryAttention writes in place by itself where
its past is longer than the tokens in it: then N rows are declared, and nothing else changes.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvdoctor.addons.conversions.graphs.conversion import (
    Converted,
    GraphConversion,
    declare_sizes,
    fix_sizes,
    forget_trace,
    name_reader,
)
from kvdoctor.addons.conversions.graphs.growing_cache import (
    POSITION_RULE,
    buffer_rule,
    declare_length,
    is_fused,
    list_buffer_rules,
)
from kvdoctor.addons.conversions.graphs.length_uses import WRITTEN, LengthUses
from kvdoctor.addons.conversions.messages import Comparison
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.analysis.lm_head import describe_op
from kvdoctor.analysis.proof.types import symbol
from kvdoctor.contract import CacheContract, Graph, Role, Slot
from kvdoctor.diagnose.checks.side_cars.graph_sizes import positions
from kvdoctor.errors import UsageError
from kvdoctor.model.edit import GraphWriter, declare, fresh_name, sort_nodes
from kvdoctor.model.operators import has
from kvdoctor.model.proto import ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import (
    find_attribute,
    input_of,
    normalize_domain,
    opset_version,
    output_of,
    producer,
    readers,
)
from kvdoctor.records import record
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import Change

POSITION = "cache_position"
"""The input that says where new rows are written: the name of transformers, and of its exports for ExecuTorch."""
CHOICE = re.compile(r"static(=(?P<rows>[0-9]{1,9}))?")
LEAST_OPSET = 13
"""The first in which the axes of Unsqueeze are an input, as they are written here."""
TENSOR_SCATTER = 24
"""The first opset that has TensorScatter."""
LEAST_CAPACITY = 5
"""Tokens of a prompt of 3 and two steps, by which the loop of a copy is tested."""
LENGTHS: tuple[Role, ...] = ("past_length", "total_length", "last_index", "write_index", "token_and_position")
"""Inputs that give the length of the past: known as one number, not where there is one for each sequence."""


def convert(context: RepairContext, rows: int) -> Converted:
    """Make the growing caches of a stack buffers of so many tokens; 0: as long as the config's context.

    Raises:
        CannotRepair: a node stands in the way; the message names it.
    """
    contract = context.drivable
    for port in contract.graph("decode").inputs:
        if port.role in LENGTHS and (port.role == "token_and_position" or port.shape not in ((), (1,))):
            node = name_reader(context, port.name) or "no node"
            context.cannot(f"{node} reads {port.name!r}, which gives the length of the past in addition to its shape")
    capacity = _choose_capacity(context, contract, rows)
    file = context.file_of("decode")
    model, graph = context.model(file), contract.graph("decode")
    context.require_opset(file, LEAST_OPSET, "Unsqueeze")
    slots = _find_growing(context, contract, model)
    if is_fused(model, slots):
        changes = [*_count_written(context, model, slots[0]), *declare_length(model, slots, capacity, file)]
        changes += forget_trace(context, file)
        sort_nodes(model.graph)
        rules = list_buffer_rules(contract, capacity, any(value.name == POSITION for value in model.graph.input))
        return Converted(tuple(changes), tuple(rules), Comparison(capacity=capacity))
    joins = [_find_join(context, model, slot) for slot in slots]
    uses = LengthUses(model, graph, capacity)
    writing = _RowWriter(model, graph, prefix="static_cache")
    changes = uses.rewrite(writing.first)
    for join in joins:
        changes.append(writing.write(join, file))
    changes += _declare(model, contract, slots, capacity, file)
    changes += forget_trace(context, file)
    sort_nodes(model.graph)
    return Converted(tuple(changes), tuple(_list_rules(contract, capacity)), Comparison(capacity=capacity))


def _count_written(context: RepairContext, model: ModelProto, slot: Slot) -> list[Change]:
    """Read the tokens in the buffer off the mask or a new input, where the graph reads them off the shape of a past."""
    graph, writer = context.drivable.graph("decode"), GraphWriter(model, prefix="static_cache")
    if not any(has(node.op_type, "sizes") for node, _ in readers(model.graph).get(slot.past, ())):
        return []
    uses = LengthUses(model, graph)
    mask, tokens = graph.port("attention_mask"), graph.port("token_ids") or graph.port("embeddings")
    if mask is None or tokens is None or "total" not in mask.axes:
        first = writer.node("first", "Gather", [_find_position(writer, graph), writer.numbers([0])], axis=0)
        return uses.rewrite_alike(symbol(WRITTEN), first)
    sizes = [writer.size_of(mask.name, mask.axes.index("total")), writer.size_of(tokens.name, tokens.axes.index("new"))]
    return uses.rewrite_alike(symbol(WRITTEN), writer.node("written", "Sub", sizes))


def _find_position(writer: GraphWriter, graph: Graph) -> str:
    """The input that says where new rows are written, which is added where there is none."""
    tokens, given = graph.port("token_ids") or graph.port("embeddings"), graph.port("cache_position")
    if given is not None and given.axes == ("new",) and given.dtype == "int64":
        return given.name
    position = fresh_name(POSITION, writer.known)
    size = tokens.dim("new") if tokens is not None else None
    writer.model.graph.input.append(declare(position, TensorProto.INT64, (size,)))
    return position


def _choose_capacity(context: RepairContext, contract: CacheContract, asked: int) -> int:
    limit = contract.context_limit
    capacity, rows = asked or limit, positions(context.stack, contract)
    if capacity is None:
        most = f"static={rows}, as its table of positions has {rows} rows" if rows is not None else "static=512"
        context.cannot(f"no config says how many tokens it takes: give a number, as in --cache {most}")
    if limit is not None and capacity > limit:
        context.cannot(f"its config allows {limit} tokens, so a buffer of {capacity} cannot be compared with it")
    if rows is not None and capacity > rows:
        context.cannot(
            f"its table of positions has {rows} rows, so a sequence has {rows} tokens at most, and not {capacity}",
            f"convert it with --cache static={rows}",
        )
    return capacity


def _find_growing(context: RepairContext, contract: CacheContract, model: ModelProto) -> list[Slot]:
    slots = [slot for slot in contract.slots if "past" in slot.axes]
    if not slots:
        static = any(slot.growth == "static" for slot in contract.slots)
        context.cannot("its cache is a static buffer already" if static else "no past has a variable length")
    growths = ("shared", "grow") if is_fused(model, slots) else ("grow",)
    for slot in slots:
        moved = "is trimmed" * slot.trimmed or "new entries come first" * slot.prepended
        if slot.present is None or slot.carry != "feed-back" or slot.growth not in growths or moved:
            how = moved or f"{slot.growth}, {slot.carry}"
            node = producer(model.graph, slot.present or "")
            maker = f"the node {describe_op(node)}: " if node is not None else ""
            context.cannot(f"{maker}the cache of {slot.past!r} does not grow by concatenation ({how})")
        if slot.size("past") is not None:
            context.cannot(f"the past of {slot.past!r} is fixed at {slot.size('past')} rows")
    return slots


@record(slots=False)
class _Join:
    """Where the new rows meet a past: a Concat, or the port of a fused attention that takes it."""

    slot: Slot
    node: NodeProto
    at: int
    index: int = 0


def _find_join(context: RepairContext, model: ModelProto, slot: Slot) -> _Join:
    """The node that joins new rows to a past.

    Raises:
        CannotRepair: another node reads the past; the message names it.
    """
    at = slot.axes.index("past")
    found: _Join | None = None
    for node, index in readers(model.graph).get(slot.past, ()):
        if has(node.op_type, "sizes"):
            continue
        join = _read_join(context, slot, node, index, at)
        if found is not None:
            context.cannot(f"the node {describe_op(node)} is a second one that reads {slot.past!r}")
        found = join
    if found is None:
        context.cannot(f"no node joins new rows to {slot.past!r}")
    if not any(node is found.node for node in model.graph.node):
        context.cannot(f"the node {describe_op(found.node)} joins new rows to {slot.past!r} inside a subgraph")
    _refuse_other_present(context, model, slot, found)
    return found


def _read_join(context: RepairContext, slot: Slot, node: NodeProto, index: int, at: int) -> _Join:
    name = f"the node {describe_op(node)}"
    if has(node.op_type, "join") and not node.domain:
        axis = find_attribute(node, "axis")
        if index or len(node.input) != 2 or axis is None or axis.i % len(slot.axes) != at:
            context.cannot(f"{name} does not append new rows to {slot.past!r}")
        return _Join(slot, node, at)
    if node.op_type != "Attention" or normalize_domain(node.domain) or index not in (4, 5):
        context.cannot(f"{name} reads {slot.past!r}, where a Concat with the new rows is expected")
    if not input_of(node, 3):
        context.cannot(f"{name} has no mask that could hide the rows after the tokens")
    for attribute in ("is_causal", "q_num_heads"):
        found = find_attribute(node, attribute)
        if found is not None and found.i:
            context.cannot(f"{name} has {attribute} = {found.i}, which is not known over a buffer")
    return _Join(slot, node, at, index)


def _refuse_other_present(context: RepairContext, model: ModelProto, slot: Slot, join: _Join) -> None:
    """The present must be what the join makes, as it is."""
    made = output_of(join.node) if has(join.node.op_type, "join") else output_of(join.node, join.index - 3)
    name = str(slot.present)
    for _ in range(len(model.graph.node)):
        if name == made:
            return
        node = producer(model.graph, name)
        if node is None or not has(node.op_type, "copy"):
            words = (
                f"the node {describe_op(node)}" if node is not None else f"no node but an input or a weight, {name!r},"
            )
            context.cannot(f"{words} makes {slot.present!r} from what {describe_op(join.node)} joined")
        name = input_of(node, 0)
    context.cannot(f"no node makes {slot.present!r}")


@dataclass(eq=False)
class _RowWriter(GraphWriter):
    """New nodes that write rows into buffers; the places to write at are computed once for each form of buffer.

    ScatterND is given the place of each row, (sequence, head, token), rather than a cache with its tokens in front:
    transposing the buffer would copy it twice in every call.
    """

    graph: Graph

    def __post_init__(self) -> None:
        super().__post_init__()
        self.position = _find_position(self, self.graph)
        self.first = self.node("first", "Gather", [self.position, self.numbers([0])], axis=0)

    def write(self, join: _Join, file: str) -> Change:
        """Put the write in place of the join."""
        node, slot = join.node, join.slot
        before = f"joins new rows to {slot.past!r}"
        if has(node.op_type, "join"):
            made, new = node.output[0], node.input[1]
            self._turn(node, slot, join.at, new)
        else:
            made, new = node.output[join.index - 3], node.input[join.index - 3]
            written = NodeProto(name=fresh_name(f"{slot.past}.write", self.known), output=[made])
            self._turn(written, slot, join.at, new)
            node.input[join.index - 3] = made
            node.input[join.index] = ""
            node.output[join.index - 3] = ""
            for names in (node.input, node.output):
                while names and not names[-1]:
                    del names[-1]
            self.model.graph.node.append(written)
            node = written
        return Change(file, describe_op(node), before, f"writes them at {self.position} ({node.op_type})")

    def _turn(self, node: NodeProto, slot: Slot, at: int, new: str) -> None:
        del node.attribute[:]
        if opset_version(self.model.opset_import) >= TENSOR_SCATTER and slot.axes[0] == "batch" and at:
            node.op_type = "TensorScatter"
            starts = self.node("starts", "Expand", [self.first, self.size_of(slot.past, 0)])
            node.input[:] = [slot.past, new, starts]
            node.attribute.add(name="axis", i=at, type=2)
        else:
            node.op_type = "ScatterND"
            node.input[:] = [slot.past, self._places(slot, at), new]

    def _places(self, slot: Slot, at: int) -> str:
        """The place of each new row: int64[axes in front of the tokens, new, their number + 1]."""
        key = f"{slot.shape[:at]}"
        if key not in self.made:
            sizes = [self.size_of(slot.past, axis) for axis in range(at)]
            count = self.node("new", "Shape", [self.position])
            whole = self.node("places_shape", "Concat", [*sizes, count], axis=0)
            columns = []
            for axis in range(at + 1):
                values = self.position if axis == at else self._count(sizes[axis])
                form = [1] * (at + 1)
                form[axis] = -1
                shaped = self.node("along", "Reshape", [values, self.numbers(form)])
                filled = self.node("everywhere", "Expand", [shaped, whole])
                columns.append(self.node("column", "Unsqueeze", [filled, self.numbers([-1])]))
            self.made[key] = self.node("places", "Concat", columns, axis=-1)
        return self.made[key]

    def _count(self, size: str) -> str:
        """0, 1, ... up to a size int64[1]."""
        scalar = self.node("scalar", "Squeeze", [size, self.numbers([0])])
        return self.node("count", "Range", [self.numbers([0], []), scalar, self.numbers([1], [])])


def _declare(
    model: ModelProto, contract: CacheContract, slots: list[Slot], capacity: int, file: str
) -> Iterator[Change]:
    graph = contract.graph("decode")
    axes = {port.name: port.axes for port in (*graph.inputs, *graph.outputs)}
    axes |= {str(slot.present): slot.axes for slot in slots} | {slot.past: slot.axes for slot in slots}
    moving, other = set[str](), set[str]()
    for value in (*model.graph.input, *model.graph.output):
        for dim, axis in zip(value.type.tensor_type.shape.dim, axes.get(value.name, ()), strict=False):
            if dim.dim_param:
                (moving if axis in ("past", "total") else other).add(dim.dim_param)
    sizes: dict[str, dict[int, int | str]] = {
        name: {at: capacity for at, axis in enumerate(own) if axis in ("past", "total")} for name, own in axes.items()
    }
    yield from declare_sizes(model, sizes, file)
    fix_sizes((*model.graph.output, *model.graph.value_info), dict.fromkeys(moving - other, capacity))


def _list_rules(contract: CacheContract, capacity: int) -> Iterator[str]:
    graph = contract.graph("decode")
    masks = [port for port in graph.inputs if "total" in port.axes]
    yield buffer_rule(capacity)
    yield POSITION_RULE
    for port in masks:
        shown, hidden = ("1", "0") if port.role == "attention_mask" else ("open", "hidden")
        yield (
            f"{port.name} has {capacity} columns: {shown} for the tokens in the cache and the new ones, {hidden} for "
            "the rows after them."
        )
    yield (
        f"A sequence has {capacity} tokens at most: a call beyond that fails, because it would write past the "
        "buffer. To go back, feed a smaller n: later rows are hidden and written again."
    )


def _read(choices: ConvertChoices) -> int | None:
    if choices.cache in (None, "growing"):
        return None
    match = CHOICE.fullmatch(choices.cache)
    if match is None:
        raise UsageError(f"--cache {choices.cache}: it takes static, static=N for N tokens, or growing")
    if match["rows"] and int(match["rows"]) < LEAST_CAPACITY:
        raise UsageError(f"--cache {choices.cache}: a buffer has {LEAST_CAPACITY} tokens or more")
    if any(name.startswith("past=") and name != f"past={match['rows']}" for name in choices.sizes):
        raise UsageError(f"--cache {choices.cache}: --sizes past=N is another length of the cache; give one of them")
    return int(match["rows"] or 0)


CONVERSION = GraphConversion(
    "cache",
    order=25,
    read=_read,
    title=lambda rows: f"cache static={rows}" if rows else "cache static",
    convert=convert,
    one_graph=True,
)
