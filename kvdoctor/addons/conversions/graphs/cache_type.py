"""Carries the cache in a narrower type: float16, int8, or int4 packed two in a byte.

Requires: new rows that meet each past in a Concat, ScatterND or TensorScatter, or that a graph without a past returns
as they are; opset 11. Ensures: pasts and presents have the type; with int8 and int4, the scale of each row (one token
and head) is a further past and present, `NAME_scale`, that grows with the values. A row is rounded once, when it is
new, and the attention of its own step reads what is stored, so that no split of a sequence changes the logits.
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field

from kvdoctor.addons.conversions.graphs.conversion import Converted, GraphConversion, forget_trace
from kvdoctor.addons.conversions.graphs.row_codec import FLOAT16, STORED, Row, RowCodec, slice_shape
from kvdoctor.addons.conversions.messages import Comparison
from kvdoctor.addons.conversions.options import ConvertChoices
from kvdoctor.analysis.lm_head import Scopes, describe_op, find_maker
from kvdoctor.choices import CacheType
from kvdoctor.contract import SCALE_SUFFIX, CacheContract, Slot
from kvdoctor.decode.stored_cache import STORABLE, StoredSlot
from kvdoctor.errors import UsageError
from kvdoctor.model.edit import fresh_name, rename_reads, replace_all, set_size, sort_nodes
from kvdoctor.model.operators import has
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, ValueInfoProto
from kvdoctor.model.traverse import (
    constant_tensor,
    find_attribute,
    graphs_in,
    input_of,
    needed_for,
    normalize_domain,
    output_of,
    producer,
    readers,
    subgraphs,
)
from kvdoctor.model.view import integers
from kvdoctor.records import record
from kvdoctor.repair.workspace import CannotRepair, RepairContext, describe_type, find_declared
from kvdoctor.report.repair_record import Change

LEAST_OPSET = 11
"""The first in which the bounds of a Clip are inputs."""
JOINS = {"Concat": 1, "ScatterND": 2, "TensorScatter": 1}
"""Operators that join new rows to a past, their first input, and at which input the new rows are."""
JOINED = 2
"""What a Concat joins: the past and the new rows."""
SCALES = "float16, the scale of each row"
ELEM_TYPES = {"float": 1, "float16": 10}
FLOATS = ("float", "float16")
FUSED = {"GroupQueryAttention": "it takes a quantized cache itself (k_scale, v_scale, kv_cache_bit_width)"}
"""What to do instead, by operator."""


@record
class TypeChoice:
    """The type, and the layers whose cache stays as it is."""

    kind: CacheType
    exact_layers: tuple[int, ...] = ()

    def __str__(self) -> str:
        """As it is written on the command line, without the dashes in front."""
        layers = ",".join(map(str, self.exact_layers))
        return f"cache-type {self.kind}" + (f" --exact-layers {layers}" if layers else "")


def convert(context: RepairContext, choice: TypeChoice) -> Converted:
    """Store the caches of a stack in another type.

    Raises:
        CannotRepair: a node stands in the way; the message names it.
    """
    contract = context.drivable
    slots = _choose_slots(context, contract, choice)
    changes = list[Change]()
    scales: dict[str, dict[str, str]] = {slot.past: {} for slot in slots}
    for file in dict.fromkeys(name for _, name in context.graphs()):
        model = context.model(file)
        context.require_opset(file, LEAST_OPSET, "Clip")
        writing = _Writer(model, file, RowCodec(model, choice.kind, prefix="cache_type"))
        outputs = {value.name for value in model.graph.output}
        for slot in slots:
            for name in dict.fromkeys(filter(None, (slot.present, slot.filled_by))):
                if name in outputs:
                    scales[slot.past] |= writing.return_stored(slot, name)
            writing.read_stored(slot)
        changes += writing.changes
        for graph in list(graphs_in(model.graph)):
            replace_all(graph.value_info, [value for value in graph.value_info if value.name not in writing.stale])
            sort_nodes(graph)
        changes += forget_trace(context, file)
    stored = tuple(StoredSlot(s.past, choice.kind, s.axes.index("head_dim"), scales[s.past]) for s in slots)
    return Converted(tuple(changes), tuple(_list_rules(slots, choice)), Comparison(stored=stored))


def _choose_slots(context: RepairContext, contract: CacheContract, choice: TypeChoice) -> tuple[Slot, ...]:
    known = tuple(slot for slot in contract.slots if slot.kind in STORABLE)
    if not known:
        context.cannot("it has no cache of keys and values")
    layers = {slot.layer for slot in known if slot.layer is not None}
    if unknown := [layer for layer in choice.exact_layers if layer not in layers]:
        context.cannot(f"it has no layer {unknown[0]}; its cache has layers {', '.join(map(str, sorted(layers)))}")
    slots = tuple(slot for slot in known if slot.layer not in choice.exact_layers)
    if not slots:
        context.cannot("--exact-layers leaves no layer to convert")
    for slot in slots:
        _refuse_impossible(context, slot, choice.kind)
    return slots


def _refuse_impossible(context: RepairContext, slot: Slot, kind: CacheType) -> None:
    """Refuse a slot that cannot be stored in a type.

    Raises:
        CannotRepair: with the reason.
    """
    if slot.dtype not in FLOATS:
        context.cannot(f"the cache of {slot.past!r} is stored as {slot.dtype} already")
    if kind == "float16" and slot.dtype == "float16":
        context.cannot(f"the cache of {slot.past!r} is stored as float16 already")
    if "head_dim" not in slot.axes:
        context.cannot(f"which axis of {slot.past!r} is head_dim is not known")
    if slot.filled_in == "encode":
        context.cannot(f"the cache of {slot.past!r} is made by the encoder graph ({slot.filled_by!r})")
    if slot.is_given:
        context.cannot(f"no graph makes {slot.past!r}: the caller gives it once")
    if slot.present is not None and slot.carry not in ("feed-back", "hold"):
        context.cannot(f"the loop changes the cache of {slot.past!r} itself ({slot.carry})")
    size = slot.size("head_dim")
    if kind == "int4" and (size is None or size % 2):
        context.cannot(f"int4 stores two numbers in a byte, and head_dim of {slot.past!r} is {size or 'not known'}")


@dataclass
class _Writer:
    """Changes one model.

    `made` has the scales of values that are stored already, by graph and name; `stale` are names of values whose type
    changed; `own` values whose makers handle stored rows. `kept` holds the graphs, since `made` uses their ids.
    """

    model: ModelProto
    file: str
    codec: RowCodec
    changes: list[Change] = field(default_factory=list)
    made: dict[tuple[int, str], str] = field(default_factory=dict)
    stale: set[str] = field(default_factory=set)
    own: set[str] = field(default_factory=set)
    kept: list[GraphProto] = field(default_factory=list)

    def return_stored(self, slot: Slot, output: str) -> dict[str, str]:
        """Return a present as it is stored, and its scales; gives the name of the output of the scales."""
        scale = self._visit(slot, (self.model.graph,), output)
        declared = next(value for value in self.model.graph.output if value.name == output)
        before = describe_type(declared)
        named: dict[str, str] = {}
        if scale:
            named[output] = f"{output}{SCALE_SUFFIX}"
            if scale != named[output]:
                self._refuse_taken(named[output])
                self.codec.pass_on(self.model.graph, scale, named[output])
            # After its present, as the input of the scales follows its past: loops may go by their order.
            outputs = list(self.model.graph.output)
            at = outputs.index(declared) + 1
            added = _declare_scale(declared, slot, named[output])
            replace_all(self.model.graph.output, [*outputs[:at], added, *outputs[at:]])
            declared = next(value for value in self.model.graph.output if value.name == output)
        self._declare_values(declared, slot)
        self.changes.append(Change(self.file, f"output {output!r}", before, describe_type(declared)))
        self.changes += [Change(self.file, f"output {name!r}", "", SCALES) for name in named.values()]
        return named

    def read_stored(self, slot: Slot) -> None:
        """Read a past where the graph computes with it, and declare it as it is stored."""
        declared = find_declared(self.model.graph.input, slot.past)
        if declared is None:
            return
        before, scale = describe_type(declared), self._past_scale(slot)
        for graph in list(graphs_in(self.model.graph)):
            if any(slot.past in node.input and self._computes_with(node) for node in graph.node):
                read = fresh_name(f"{slot.past}.read", self.codec.known)
                for node in filter(self._computes_with, graph.node):
                    node.input[:] = [read if name == slot.past else name for name in node.input]
                self.codec.decode(graph, (slot.past, scale), _row(slot), read)
            if self.codec.kind == "int4":
                self._correct_shapes(graph, slot)
        added = _declare_scale(declared, slot, scale) if scale else None
        self._declare_values(declared, slot)
        self.changes.append(Change(self.file, f"input {slot.past!r}", before, describe_type(declared)))
        if added is not None:
            at = next(i for i, value in enumerate(self.model.graph.input) if value.name == slot.past)
            inputs = list(self.model.graph.input)
            replace_all(self.model.graph.input, [*inputs[: at + 1], added, *inputs[at + 1 :]])
            self.changes.append(Change(self.file, f"input {scale!r}", "", SCALES))

    def _computes_with(self, node: NodeProto) -> bool:
        """Whether a node computes with the values of a past, and does not only join, return or measure them."""
        return not has(node.op_type, "sizes") and self.own.isdisjoint(node.output)

    def _correct_shapes(self, graph: GraphProto, slot: Slot) -> None:
        """Let a graph that asks a packed past for its width have that of the rows: twice as many."""
        rank, axis = len(slot.axes), _width_axis(slot)
        for node in [one for one in graph.node if has(one.op_type, "sizes") and input_of(one, 0) == slot.past]:
            factors = slice_shape([2 if at == axis else 1 for at in range(rank)], node)
            others = {at for at, factor in enumerate(factors) if factor == 1}
            reading = [
                (one, self._picked(graph, one, len(factors))) for one, _ in readers(graph).get(output_of(node), ())
            ]
            if not all(picked is not None and picked in others for _, picked in reading):
                self.codec.scale_shape(graph, node, factors)

    def _picked(self, graph: GraphProto, node: NodeProto, count: int) -> int | None:
        """The number that a Gather picks of a shape; None where it is not known."""
        if node.op_type != "Gather" or normalize_domain(node.domain):
            return None
        for around in (graph, self.model.graph):
            maker = producer(around, input_of(node, 1))
            tensor = constant_tensor(maker) if maker is not None and has(maker.op_type, "constant") else None
            tensor = tensor or next((one for one in around.initializer if one.name == input_of(node, 1)), None)
            numbers = integers(tensor) if tensor is not None else None
            if maker is not None or tensor is not None:
                return numbers[0] % count if numbers is not None and len(numbers) == 1 else None
        return None

    def _visit(self, slot: Slot, scopes: Scopes, name: str) -> str:
        """Store the value that is returned under a name, in every branch; gives the name of its scales."""
        around, node = find_maker(scopes, name)
        while node is not None and has(node.op_type, "copy") and len(around) == len(scopes):
            self.own.add(name)
            self.stale.add(name)
            name = input_of(node, 0)
            around, node = find_maker(scopes, name)
        graph = scopes[-1]
        key = (id(graph), name)
        if key not in self.made:
            self.kept.append(graph)
            self.stale.add(name)
            if node is not None and has(node.op_type, "branch") and not normalize_domain(node.domain):
                self.made[key] = self._visit_branches(slot, around, node, name)
            else:
                self.made[key] = self._store(slot, scopes, name, node)
        return self.made[key]

    def _visit_branches(self, slot: Slot, scopes: Scopes, node: NodeProto, name: str) -> str:
        reading = (other for other, _ in readers(scopes[-1]).get(name, ()) if self._computes_with(other))
        if (reader := next(reading, None)) is not None:
            raise CannotRepair(f"the node {describe_op(reader)} reads {name!r}, which both branches return")
        index = list(node.output).index(name)
        for body in subgraphs(node):
            scale = self._visit(slot, (*scopes, body), body.output[index].name)
            if scale:
                returned = fresh_name(f"{body.output[index].name}.scale", self.codec.known)
                self.codec.pass_on(body, scale, returned)
                body.output.append(_declare_scale(body.output[index], slot, returned))
            self._declare_values(body.output[index], slot)
        if not self.codec.is_scaled:
            return ""
        node.output.append(self._name_scale(scopes, name))
        return str(node.output[-1])

    def _store(self, slot: Slot, scopes: Scopes, name: str, node: NodeProto | None) -> str:
        """Store the new rows of a value of one graph; gives the name of the scales of all its rows."""
        graph = scopes[-1]
        if name == slot.past:
            return self._past_scale(slot)
        if node is None or producer(graph, name) is None:
            raise CannotRepair(f"no node of its own graph makes {name!r}")
        if slot.past in node.input:
            return self._store_joined(slot, scopes, name, node)
        if slot.past in needed_for(graph, [name]):
            raise CannotRepair(
                f"the node {describe_op(node)} makes {name!r} of {slot.past!r}: new rows do not meet that past in a "
                "Concat, ScatterND or TensorScatter"
            )
        exact = fresh_name(f"{name}.exact", self.codec.known)
        read = self._move_readers(graph, name)
        back = self._move_readers(graph, node.input[0], node) if has(node.op_type, "permute") else ""
        node.output[:] = [exact if one == name else one for one in node.output]
        _, scale = self.codec.encode(graph, exact, _row(slot), name)
        if back:
            # Exporters transpose keys for the product and for the present apart: both must see what is stored.
            read = read or fresh_name(f"{name}.read", self.codec.known)
            self.codec.transpose_back(graph, read, node, back)
        if read:
            self.codec.decode(graph, (name, scale), _row(slot), read)
        return scale

    def _store_joined(self, slot: Slot, scopes: Scopes, name: str, node: NodeProto) -> str:
        graph, described, kind = scopes[-1], describe_op(node), str(node.op_type)
        if normalize_domain(node.domain) or kind not in JOINS:
            raise CannotRepair(f"the node {described} takes {slot.past!r} itself", FUSED.get(kind, ""))
        if input_of(node, 0) != slot.past or (has(kind, "join") and len(node.input) != JOINED):
            raise CannotRepair(f"the node {described} does more than append new rows to {slot.past!r}")
        along = find_attribute(node, "axis")
        if kind != "ScatterND" and (along.i if along is not None else -2) % len(slot.axes) == _width_axis(slot):
            raise CannotRepair(f"the node {described} joins along head_dim")
        place = JOINS[kind]
        read = self._move_readers(graph, name)
        stored, scale = self.codec.encode(graph, node.input[place], _row(slot))
        node.input[place] = stored
        self.own.add(name)
        joined = ""
        if self.codec.is_scaled:
            twin = graph.node.add()
            twin.CopyFrom(node)
            twin.input[0], twin.input[place] = self._past_scale(slot), scale
            twin.name = twin.output[0] = joined = self._name_scale(scopes, name)
        if read:
            self.codec.decode(graph, (name, joined), _row(slot), read)
        return joined

    def _move_readers(self, graph: GraphProto, name: str, but: NodeProto | None = None) -> str:
        """Let all that computes with a value read another one, which is still to be made; empty if nothing does."""

        def moves(node: NodeProto) -> bool:
            return self.own.isdisjoint(node.output) and (but is None or node.output != but.output)

        if not any(moves(node) for node, _ in readers(graph).get(name, ())):
            return ""
        read = fresh_name(f"{name}.read", self.codec.known)
        rename_reads(graph, {name: read}, moves)
        return read

    def _past_scale(self, slot: Slot) -> str:
        """The name of the input with the scales of a past; empty without scales."""
        if not self.codec.is_scaled:
            return ""
        name = f"{slot.past}{SCALE_SUFFIX}"
        if name not in self.own:
            self._refuse_taken(name)
            self.own.add(name)
        return name

    def _name_scale(self, scopes: Scopes, name: str) -> str:
        """A name for joined scales; that of an output is reserved for the main graph."""
        return fresh_name(f"{name}{SCALE_SUFFIX}" if len(scopes) == 1 else f"{name}.scale", self.codec.known)

    def _refuse_taken(self, name: str) -> None:
        if name in self.codec.known:
            raise CannotRepair(f"{self.file} already has a value {name!r}")
        self.codec.known.add(name)

    def _declare_values(self, value: ValueInfoProto, slot: Slot) -> None:
        value.type.tensor_type.elem_type = STORED[self.codec.kind]
        dims = value.type.tensor_type.shape.dim
        if self.codec.kind == "int4" and len(dims) == len(slot.axes):
            set_size(dims[_width_axis(slot)], (slot.size("head_dim") or 0) // 2)


def _declare_scale(values: ValueInfoProto, slot: Slot, name: str) -> ValueInfoProto:
    declared = deepcopy(values)
    declared.name, declared.type.tensor_type.elem_type = name, FLOAT16
    dims = declared.type.tensor_type.shape.dim
    if len(dims) == len(slot.axes):
        set_size(dims[_width_axis(slot)], 1)
    return declared


def _row(slot: Slot) -> Row:
    return Row(_width_axis(slot), slot.size("head_dim"), ELEM_TYPES[slot.dtype])


def _width_axis(slot: Slot) -> int:
    return slot.axes.index("head_dim")


def _list_rules(slots: tuple[Slot, ...], choice: TypeChoice) -> Iterator[str]:
    stored = {"float16": "float16", "int8": "int8", "int4": "uint8, two numbers of 4 bits in each,"}[choice.kind]
    but = f", but for layer {', '.join(map(str, choice.exact_layers))}" if choice.exact_layers else ""
    yield (
        f"Pasts and presents are {stored} tensors{but}: make the first past of that type, and feed each present "
        "unchanged."
    )
    if choice.kind != "float16":
        past, present = f"{slots[0].past}{SCALE_SUFFIX}", f"{slots[0].present or slots[0].filled_by}{SCALE_SUFFIX}"
        yield (
            f"Each comes with a scale, float16, with one number for each row: feed {present!r} as {past!r}, and "
            "reorder, cut, hold and empty it together with its values."
        )


def _read(choices: ConvertChoices) -> TypeChoice | None:
    """The choice of the options.

    Raises:
        UsageError: layers without a type.
    """
    if choices.cache_type is None:
        if choices.exact_layers:
            raise UsageError("--exact-layers says which layers --cache-type leaves as they are; give --cache-type too")
        return None
    return TypeChoice(choices.cache_type, tuple(sorted(set(choices.exact_layers))))


CONVERSION = GraphConversion("cache-type", order=27, read=_read, title=str, convert=convert)
