"""Repairs of what belongs to a slot: which value its past and present are, and in which type."""

from collections.abc import Iterator, Mapping

from kvdoctor.analysis.processed_presents import find_processed
from kvdoctor.contract import CacheContract, Slot
from kvdoctor.model.edit import describe_graph, describe_maker, new_name, rename_reads, rename_values, return_values
from kvdoctor.model.operators import has
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto, NodeProto, ValueInfoProto
from kvdoctor.model.traverse import constant_tensor, input_of, nodes_in, producer
from kvdoctor.model.view import GraphView, Scope, declared
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext, describe_type, find_declared, forget_declaration

RENAME = "rename the outputs if only their names are exchanged, else export again"
Content = tuple[str, str, int]
"""The content of a slot: its kind, key or value, and the index of the attention among those of its kind."""


def order_slots(context: RepairContext) -> tuple[Change, ...]:
    """Gives keys, values and layers of the cache their own names again.

    Requires: the names tell which slot is which (key or value, layer), and the dataflow shows how each is used. Slots
    can be swapped in three places: the outputs of the first step, the inputs of a decode step and its outputs. The
    first two are corrected here; `joined-presents` corrects the outputs of the steps.
    Ensures: the same values under other names: swapped inputs are read swapped back, outputs of the first step exchange
    their names. The computation is unchanged.
    """
    contract = context.drivable
    if not (named := _content_by_name(contract)):
        context.cannot("the names do not tell which slot holds keys and which values", RENAME)
    used = {s.past: (s.kind, s.used_as, s.used_at) for s in contract.slots if s.used_as and s.used_at is not None}
    made = {s.past: (s.kind, s.made_as, s.made_at) for s in contract.slots if s.made_as and s.made_at is not None}
    crossed_in, crossed_out = (_find_swaps(named, found) for found in (used, made))
    if crossed_in and crossed_in == crossed_out:
        return ()  # all graphs have the same swap: the fault is in the outputs of the steps
    inputs = _swap_inputs(context, crossed_in) if crossed_in else []
    return (*inputs, *(_swap_outputs(context, contract, crossed_out) if crossed_out else []))


def _content_by_name(contract: CacheContract) -> dict[str, Content]:
    """The content of each slot by its name; layers are counted among those of their kind and part."""
    found: dict[str, Content] = {}
    groups: dict[tuple[str, str], list[Slot]] = {}
    for slot in contract.slots:
        if slot.part in ("key", "value") and slot.layer is not None and slot.used_as is not None:
            groups.setdefault((slot.kind, slot.part), []).append(slot)
    for (kind, part), slots in groups.items():
        for rank, slot in enumerate(sorted(slots, key=lambda slot: slot.layer or 0)):
            found[slot.past] = (kind, part, rank)
    return found


def _find_swaps(named: dict[str, Content], found: Mapping[str, Content]) -> dict[str, str]:
    """For each slot with the content of another one, that other one; empty if slots are not simply swapped."""
    owner = {content: past for past, content in named.items()}
    owners = {past: owner[content] for past, content in found.items() if past in named and content in owner}
    trade = {past: other for past, other in owners.items() if past != other}
    return trade if set(trade) == set(trade.values()) else {}


def _swap_inputs(context: RepairContext, trade: dict[str, str]) -> list[Change]:
    file = context.file_of("decode")
    view, changes = context.view(file), list[Change]()
    for graph in (body.graph for body in view.cached_bodies()):
        read = {name for node in nodes_in(graph.node) for name in node.input}
        rename_reads(graph, trade)
        place = describe_graph(view, graph)
        changes += [Change(file, f"{place}, readers of {past!r}", past, trade[past]) for past in trade if past in read]
    return changes


def _swap_outputs(context: RepairContext, contract: CacheContract, trade: dict[str, str]) -> list[Change]:
    """Swap the values of outputs of the first step that have one another's content."""
    file = context.file_of("prefill")
    view = context.view(file)
    outputs = {slot.past: slot.filled_by for slot in contract.slots if slot.filled_by is not None}
    if not set(trade) <= set(outputs):
        context.cannot("the encoder graph fills the swapped slots", RENAME)
    places = {past: view.behind(outputs[past], cached=False) for past in trade}
    graph = next(iter(places.values()))[0].graph
    if any(scope.graph is not graph or producer(graph, name) is None for scope, name in places.values()):
        context.cannot("the swapped outputs of the first step are not computed by nodes of one graph", RENAME)
    # The value under one name gets the other name.
    names = {places[past][1]: places[other][1] for past, other in trade.items()}
    if set(names) != set(names.values()):
        context.cannot("the swapped outputs of the first step share a value", RENAME)
    before = {past: describe_maker(graph, places[past][1]) for past in trade}
    rename_values(graph, names)
    place = describe_graph(view, graph)
    return [
        Change(file, f"{place}, output {outputs[past]!r}", before[past], describe_maker(graph, places[past][1]))
        for past in trade
    ]


FEED_ADVICE = ("Feed each present to the past that the graph uses it as, whatever its name is.",)


FLOATS = ("float", "float16", "bfloat16", "double")


def cast_presents(context: RepairContext) -> tuple[Change, ...]:
    """Returns the cache in the element type of its past.

    Requires: a present that is declared as another float type than its past.
    Ensures: the present is cast to the type of the past, or the Cast that gave it another type is bypassed; it is
    declared so.
    """
    changes: list[Change] = []
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in context.model(context.file_of("decode")).graph.input
        if declared(value).dtype in FLOATS
    }
    for phase, file in context.graphs():
        for slot in context.drivable.slots:
            output = slot.present if phase == "decode" else slot.filled_by
            view = context.view(file)
            if output in view.outputs and slot.past in types and view.outputs[output].dtype in FLOATS:
                changes += _repair_type(view, file, phase == "decode", output, types[slot.past])
    return tuple(changes)


def _repair_type(view: GraphView, file: str, cached: bool, output: str, wanted: int) -> Iterator[Change]:
    model = view.model
    value = next(value for value in model.graph.output if value.name == output)
    scope, name = view.behind(output, cached)
    graph = scope.graph
    inner = find_declared(graph.output, name) or value
    types = inner.type.tensor_type, value.type.tensor_type
    if all(one.elem_type == wanted for one in types):
        return
    before, place = f"{describe_maker(graph, name)} {describe_type(inner)}", describe_graph(view, graph)
    if types[0].elem_type != wanted:
        _cast_output(model, graph, name, wanted)
    for one in types:
        one.elem_type = wanted
    after = f"{describe_maker(graph, name)} {describe_type(inner)}"
    yield Change(file, f"{place}, output {output!r}", before, after)


def _cast_output(model: ModelProto, graph: GraphProto, name: str, wanted: int) -> None:
    """Cast a returned value; an earlier Cast of it is bypassed, so that nothing is rounded twice."""
    forget_declaration(graph, name)
    source = Scope(graph, "").through(name)
    maker = producer(graph, source)
    source = input_of(maker, 0) if maker is not None and has(maker.op_type, "cast") else name
    made = new_name(model, f"{name}.cast")
    return_values(model, graph, {name: source})
    last = graph.node[-1]
    last.op_type, last.name = "Cast", made
    last.attribute.add(name="to", type=AttributeProto.INT, i=wanted)


CAST_ADVICE = ("Cast each present to the element type of its past before you feed it.",)


AS_USED = "export again, so that each present is the value that the attention used"


def return_plain(context: RepairContext) -> tuple[Change, ...]:
    """Returns keys and values as the attention uses them, without post-processing that is applied only to the output.

    Requires: a present that elementwise operators (rounding, clipping, scaling, a cast to another type and back)
    compute from a value that the logits depend on too.
    Ensures: the present is that value; the logits of the same call stay as they are.
    """
    contract, changes = context.drivable, list[Change]()
    for phase, file in context.graphs():
        port = contract.graph(phase).port("logits")
        for slot in contract.slots if port is not None else ():
            output = slot.present if phase == "decode" else slot.filled_by
            view = context.view(file)
            if port is not None and output in view.outputs and slot.kind in ("self-attention", "cross-attention"):
                changes += _repair_processed(view, slot, output, (file, phase == "decode"), port.name)
    if not changes:
        context.cannot("no present is post-processed on its way to the output alone", AS_USED)
    return tuple(changes)


def _repair_processed(view: GraphView, slot: Slot, output: str, at: tuple[str, bool], logits: str) -> Iterator[Change]:
    file, cached = at
    found = find_processed(view, output, logits, cached=cached)
    if found is None or (slot.emptied and cached):
        return
    before = describe_maker(found.graph, found.name)
    return_values(view.model, found.graph, {found.name: found.used})
    where = f"{describe_graph(view, found.graph)}, output {output!r}"
    yield Change(file, where, before, f"Identity({found.used}), which the attention uses")


PROCESSED = ("cached-differs", "cache-misread", "new-entries-wrong", "present-rewrites-past")


def pass_through(context: RepairContext) -> tuple[Change, ...]:
    """Makes a decode step return the cross-attention cache that it was fed.

    Requires: a decode graph, or a cached branch, that returns an empty tensor under the name of a present whose past is
    an input, or another value than the keys and values of the encoder that it was fed.
    Ensures: that output is an `Identity` of the past and is declared with the type of the past; all other nodes, names,
    initializers and declarations stay as they are.

    An `Identity` is needed because a branch may not return a value of the enclosing graph directly (ONNX, operator
    `If`).
    """
    contract, file = context.drivable, context.file_of("decode")
    model, view = context.model(file), context.view(file)
    # Read before the graph is changed.
    returned = {slot.past: view.behind(slot.present or "") for slot in contract.slots if slot.emptied}
    if context.found("present-rewrites-past"):
        held = (slot for slot in contract.slots if slot.kind == "cross-attention" and slot.carry == "hold")
        origins = {slot.past: view.behind(slot.present) for slot in held if slot.present in view.outputs}
        returned |= {past: (scope, name) for past, (scope, name) in origins.items() if scope.through(name) != past}
    changes: list[Change] = []
    for slot in contract.slots:
        scope, name = returned.get(slot.past, (None, ""))
        if scope is not None and (view.branches is None or scope is not view.main):  # the first step runs that too
            changes += _pass_slot(model, scope.graph, slot, name, (file, describe_graph(view, scope.graph)))
    return tuple(changes)


def _pass_slot(model: ModelProto, graph: GraphProto, slot: Slot, name: str, at: tuple[str, str]) -> list[Change]:
    file, place = at
    past, output = find_declared(model.graph.input, slot.past), find_declared(graph.output, name)
    if past is None or output is None:
        return []
    before, index = _remove(graph, name)
    if sum(value.name == name for value in graph.output) > 1:
        # Several outputs shared one constant; the names of a branch's outputs are not visible outside.
        output.name = f"{name}.{slot.past}"
    node = NodeProto(op_type="Identity", name=f"{slot.present}.pass_through", input=[slot.past], output=[output.name])
    graph.node.insert(index, node)
    changes = [Change(file, f"{place}, output {output.name!r}", before, f"Identity({slot.past})")]
    changes += _declare(graph, output, past, f"{place}, declared output {output.name!r}", file)
    if (outer := find_declared(model.graph.output, slot.present)) is not None:
        changes += _declare(model.graph, outer, past, f"declared output {slot.present!r}", file)
    return changes


def _remove(graph: GraphProto, name: str) -> tuple[str, int]:
    """Remove the node or weight that makes a value unless other outputs need it; gives its description and index."""
    shared = sum(value.name == name for value in graph.output) > 1
    for index, node in enumerate(graph.node):
        if name in node.output:
            value = constant_tensor(node)
            text = node.op_type if value is None else f"{node.op_type} {list(value.dims)}"
            if not shared:
                del graph.node[index]
            return text, index
    for index, tensor in enumerate(graph.initializer):
        if tensor.name == name:
            text = f"initializer {list(tensor.dims)}"
            if not shared:
                del graph.initializer[index]
            return text, 0
    return "value of the enclosing graph", 0


def _declare(graph: GraphProto, output: ValueInfoProto, past: ValueInfoProto, where: str, file: str) -> list[Change]:
    """Declare an output like the past, and drop other declarations of it."""
    forget_declaration(graph, output.name)
    old, new = describe_type(output), describe_type(past)
    if old == new:
        return []
    output.type.CopyFrom(past.type)
    return [Change(file, where, old, new)]


CROSS_CACHE_ADVICE = (
    "Keep the cross-attention outputs (present.*.encoder.*) of the first step, and feed those values at every "
    "later step.",
    "Feed back: only the self-attention outputs (present.*.decoder.*); never a tensor whose shape contains a zero.",
)


REPAIRS = (
    Repair("slot-order", ("key-value-swapped", "layers-swapped"), "ports", "first-step", order_slots, FEED_ADVICE),
    Repair("cache-casts", ("cache-dtype-mismatch",), "slots", "first-step", cast_presents, CAST_ADVICE),
    Repair("plain-presents", PROCESSED, "slots", "first-step", return_plain),
    Repair(
        "pass-through",
        ("cross-cache-emptied", "present-rewrites-past"),
        "slots",
        "bits",
        pass_through,
        CROSS_CACHE_ADVICE,
    ),
)
