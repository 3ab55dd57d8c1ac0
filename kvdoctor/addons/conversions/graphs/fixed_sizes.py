"""Gives batch, new tokens, past and encoder states fixed sizes, with padding on the left of a past that is not full.

Requires: one graph for all steps, a cache that grows by concatenation, and a mask of the tokens in the cache; opset 10.
Ensures: the sizes are declared; each present is cut to its last rows and is as long as the past, so that it is fed back
as it is. Rows of zeros on the left stand for tokens that are not there yet, and the mask hides them. Declaring the
sizes alone, as the tools of ONNX Runtime do, would leave a present that is longer than the past.
"""

import re
from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.addons.conversions.graphs.conversion import Converted, GraphConversion, fix_sizes, name_reader
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.analysis.lm_head import describe_op
from kvdoctor.contract import Axis, CacheContract, Graph, Slot
from kvdoctor.errors import UsageError
from kvdoctor.model.edit import GraphWriter, fresh_name, rename_values, set_size, sort_nodes
from kvdoctor.model.operators import operators_with
from kvdoctor.model.proto import ModelProto, NodeProto
from kvdoctor.model.traverse import producer, readers
from kvdoctor.model.view import GraphView
from kvdoctor.records import record
from kvdoctor.repair.workspace import CannotRepair, RepairContext
from kvdoctor.report.repair_record import Change

SIZES = ("batch", "new", "past", "encoder")
SIZE = re.compile(r"(?P<name>[a-z]+)=(?P<number>[0-9]{1,9})")
END = (1 << 63) - 1
LEAST_OPSET = 10
"""The first in which the bounds of a Slice are inputs."""
LENGTH_OPERATORS = operators_with("counted")
"""Operators that count the entries of a cache from its start, and take no mask for padding there."""
REVEALED = ("batch-axis-frozen", "sequence-axis-frozen", "past-axis-frozen", "chunk-fails")


@record
class FixedSizes:
    """The sizes that are asked for; None leaves one open."""

    batch: int | None = None
    new: int | None = None
    past: int | None = None
    encoder: int | None = None

    @property
    def numbers(self) -> dict[Axis, int]:
        """The sizes of axes, in entries."""
        own: dict[Axis, int | None] = {"batch": self.batch, "new": self.new, "encoder": self.encoder}
        found = {axis: size for axis, size in own.items() if size is not None}
        if self.past is not None:
            found |= {"past": self.past, "total": self.past + (self.new or 1)}
        return found

    def describe(self) -> str:
        """As on the command line: `batch=1,new=1,past=64`."""
        return ",".join(f"{name}={value}" for name in SIZES if (value := getattr(self, name)) is not None)


def convert(context: RepairContext, sizes: FixedSizes) -> Converted:
    """Fix the sizes of a stack.

    Raises:
        CannotRepair: it cannot have them; the message names the node or the input.
    """
    contract = context.drivable
    file = context.file_of("decode")
    model, changes = context.model(file), list[Change]()
    axes = [port.axes for graph in contract.graphs.values() for port in (*graph.inputs, *graph.outputs)]
    if sizes.encoder is not None and not any("encoder" in own for own in (*axes, *(s.axes for s in contract.slots))):
        context.cannot(f"no input, output or cache has an axis of encoder states: leave out encoder={sizes.encoder}")
    if sizes.past is not None:
        _refuse_past(context, contract, model)
        changes += _cut_presents(context, model, sizes.past, file)
    numbers, ports = sizes.numbers, contract.graph("decode")
    if sizes.batch is not None:
        numbers["batch_codebooks"] = sizes.batch * contract.codebooks
        numbers |= {"batch_heads": sizes.batch * contract.heads} if contract.heads else {}
    changes += _declare_sizes(model, ports, {str(slot.present): slot.axes for slot in _growing(contract)}, numbers)
    if "encode" in contract.phases:
        encoder = contract.graph("encode")
        made = {str(slot.filled_by): slot.axes for slot in contract.slots if slot.filled_in == "encode"}
        changes += _declare_sizes(context.model(encoder.file), encoder, made, numbers)
    if not changes:
        context.cannot(f"it already has the sizes {sizes.describe()}")
    return Converted(tuple(changes), tuple(_list_rules(contract, sizes)), reveals=REVEALED)


def _refuse_past(context: RepairContext, contract: CacheContract, model: ModelProto) -> None:
    """The past must grow by concatenation, and a mask must be able to hide its first rows."""
    context.require_opset(context.file_of("decode"), LEAST_OPSET, "Slice")
    reading = readers(model.graph)
    kept = _growing(contract)
    for slot in kept:
        fused = next((node for node, _ in reading.get(slot.past, ()) if node.op_type in LENGTH_OPERATORS), None)
        if fused is not None:
            context.cannot(
                f"the node {describe_op(fused)} counts the entries of {slot.past!r} from its start, so that padding "
                "on the left cannot be hidden"
            )
        if slot.present is None or slot.carry != "feed-back" or slot.growth != "grow":
            context.cannot(f"the cache of {slot.past!r} does not grow by concatenation ({slot.growth}, {slot.carry})")
        if producer(model.graph, slot.present) is None:
            context.cannot(f"no node of the main graph makes {slot.present!r}")
    if not kept:
        context.cannot("no past has a variable length")
    mask = next((port for port in contract.graph("decode").inputs if "total" in port.axes), None)
    if mask is None or mask.role not in ("attention_mask", "additive_mask"):
        node, name = name_reader(context, kept[0].past) or f"the input {kept[0].past!r}", kept[0].past
        why = "and no input masks the entries of the cache, so that padding cannot be hidden"
        context.cannot(f"{node} reads {name!r}, {why}", "--cache static=N, with the other sizes")


def _growing(contract: CacheContract) -> list[Slot]:
    return [slot for slot in contract.slots if "past" in slot.axes]


def _cut_presents(context: RepairContext, model: ModelProto, past: int, file: str) -> Iterator[Change]:
    graph, writer = model.graph, GraphWriter(model, prefix="fixed_past")
    starts, ends = writer.numbers([-past], hint="starts"), writer.numbers([END], hint="ends")
    for slot in _growing(context.drivable):
        at, present = slot.axes.index("past"), str(slot.present)
        whole = fresh_name(f"{present}.whole", writer.known)
        rename_values(graph, {present: whole})
        name = fresh_name(f"{present}.last", writer.known)
        graph.node.append(
            NodeProto(op_type="Slice", name=name, input=[whole, starts, ends, writer.numbers([at])], output=[present])
        )
        yield Change(file, f"output {present!r}", "the past and the new rows", f"the last {past} rows of them")
    sort_nodes(graph)


def _declare_sizes(
    model: ModelProto, ports: Graph, presents: dict[str, tuple[Axis, ...]], numbers: dict[Axis, int]
) -> Iterator[Change]:
    """Declare the sizes of one graph; `presents` are the axes of outputs that are caches."""
    graph, view = model.graph, GraphView(model)
    axes = {port.name: port.axes for port in (*ports.inputs, *ports.outputs)} | presents
    symbols: dict[str, set[int]] = {}
    for value in (*graph.input, *graph.output):
        found = axes.get(value.name, ())
        done = []
        for dim, axis in zip(value.type.tensor_type.shape.dim, found, strict=False):
            number = numbers.get(axis)
            if number is None or dim.dim_value == number:
                continue
            if dim.HasField("dim_value"):
                raise CannotRepair(f"the {axis} of {value.name!r} is fixed at {dim.dim_value}, not {number}")
            if dim.dim_param and (value.name not in presents or axis not in ("past", "total")):
                symbols.setdefault(dim.dim_param, set()).add(number)
            before = dim.dim_param or "?"
            set_size(dim, number)
            done.append(f"{before} = {number}")
        if done:
            kind = "input" if value.name in view.inputs else "output"
            yield Change(ports.file, f"{kind} {value.name!r}", "open sizes", ", ".join(done))
    single = {name: next(iter(found)) for name, found in symbols.items() if len(found) == 1}
    fix_sizes((*graph.input, *graph.output, *graph.value_info), single)


def _list_rules(contract: CacheContract, sizes: FixedSizes) -> Iterator[str]:
    if sizes.batch is not None:
        yield f"Every call has {sizes.batch} sequence{'s' * (sizes.batch > 1)}."
    if sizes.new is not None:
        count = f"{sizes.new} new token{'s' * (sizes.new > 1)}"
        yield f"Every call has {count}: feed a prompt in such pieces, and take the logits of the last call."
        if sizes.new > 1:
            yield f"The number of tokens of a prompt must be a multiple of {sizes.new}: shorter pieces are not proved."
    if sizes.encoder is not None:
        yield f"Every call has {sizes.encoder} encoder states: pad the input of the encoder, and mask the padding."
    if sizes.past is None:
        return
    yield f"The first call is fed a past of {sizes.past} rows of zeros; later ones the present, which is as long."
    width = sizes.past + (sizes.new or 1)
    mask = next((port for port in contract.graph("decode").inputs if "total" in port.axes), None)
    if mask is not None:
        hidden = "0" if mask.role == "attention_mask" else "hidden"
        yield (
            f"Tokens stand at the right end. With n tokens in the cache, {mask.name} of {width} columns is {hidden} "
            f"for the first {sizes.past} - n, which are padding."
        )
    positions = next((p for p in contract.graph("decode").inputs if p.role in ("position_ids", "cache_position")), None)
    if positions is not None:
        yield f"{positions.name} count the tokens of the sequence from 0, without the padding."
    yield f"After {sizes.past} tokens the oldest one leaves the cache at every step; stop before, or accept a window."


def read_sizes(names: tuple[str, ...]) -> FixedSizes | None:
    """The sizes among the values of --sizes: `batch=1`.

    Raises:
        UsageError: one of them is no size.
    """
    found: dict[str, int] = {}
    for name in names:
        match = SIZE.fullmatch(name)
        if match is None or match["name"] not in SIZES or int(match["number"]) < 1:
            raise UsageError(
                f"--sizes {name}: it takes batch=N, new=N, past=N and encoder=N, with whole numbers from 1 on"
            )
        if match["name"] in found:
            raise UsageError(f"--sizes {name}: {match['name']} is given twice")
        found[match["name"]] = int(match["number"])
    if "past" in found and "new" not in found:
        raise UsageError("--sizes past=N needs new=N as well: the mask has past + new columns, which must be a number")
    return FixedSizes(**found) if found else None


def _read(choices: ConvertChoices) -> FixedSizes | None:
    """The sizes that are asked for; a static cache has its length already."""
    sizes = read_sizes(choices.sizes)
    is_static = sizes is not None and (choices.cache or "").startswith("static")
    return replace(sizes, past=None) if sizes is not None and is_static else sizes


CONVERSION = GraphConversion(
    "sizes",
    order=30,
    read=_read,
    title=lambda sizes: f"sizes {sizes.describe()}",
    convert=convert,
    one_graph=True,
)
