"""Pair: the first step and later ones in files of their own, as Optimum's decoder and decoder_with_past.

Requires: an `If` that is controlled by an input; or one graph whose first step is fed an empty past, or states of
zeros.
Ensures: no switch, no placeholders, and no inputs that a half does not use. Each branch is inlined in place of its
`If`. The file with past does not return values that never change: constants without elements, which Optimum's merged
decoders return in place of the cross-attention cache, and pasts that are passed through. The caller keeps those of the
first step.

Of one graph for all steps, the graph of the later steps stays as it is. In that of the first step every past is
computed: zeros of its type, as many rows as token ids have, of length 0 where it grows. A Concat that would join such a
past with the new entries passes these on. Both graphs refer to the same weights, which lie once in a data file next to
them.
"""

from copy import deepcopy
from dataclasses import replace

from kvdoctor.addons.conversions.layouts.naming import FIRST, LATER, axis_names, first_of, name_axes, port_axes
from kvdoctor.addons.conversions.layouts.registry import (
    ConvertedModels,
    DoesNotFit,
    FileSizeLimit,
    Layout,
    LayoutSource,
    restore_small,
)
from kvdoctor.analysis.stacks import FileRole, StackFiles
from kvdoctor.contract import ITEM_BYTES, CacheContract, Port, Slot
from kvdoctor.errors import UsageError
from kvdoctor.model.edit import (
    GraphWriter,
    fresh_name,
    keep_only,
    make_node,
    prune,
    rename_all,
    rename_banned,
    replace_all,
    sort_nodes,
)
from kvdoctor.model.operators import has
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto, TensorProto, ValueInfoProto
from kvdoctor.model.traverse import all_names, captures, find_attribute, needed_for, own_names, subgraphs
from kvdoctor.model.view import ELEMENT_TYPES, Branches, GraphView
from kvdoctor.report.repair_record import Change

ALL_EXTERNAL = FileSizeLimit(most=0)
"""The weights lie in a file next to both graphs."""
TYPES = {name: number for number, name in ELEMENT_TYPES.items()}


def refuse_split(contract: CacheContract) -> str | None:
    """Why one graph cannot become two; None if it can."""
    if contract.first_step != "empty-past":
        return "its first step is not fed an empty past"
    if contract.graph("prefill") != contract.graph("decode"):
        return "another graph serves its first step"
    return _refuse_pasts(contract)


def _refuse_pasts(contract: CacheContract) -> str | None:
    """Why the first values of the slots cannot be computed in the graph."""
    if _find_rows(contract) is None:
        return "no input with a batch axis tells how many sequences there are"
    return next((reason for slot in contract.slots if (reason := _refuse_slot(slot, contract)) is not None), None)


def _refuse_slot(slot: Slot, contract: CacheContract) -> str | None:
    """Why the first value of a slot cannot be computed in the graph."""
    if "capacity" in slot.axes or slot.growth in ("static", "ring", "paged"):
        return f"{slot.past} is a buffer that the loop allocates and both graphs would write"
    if slot.first not in ("empty", "zeros") or slot.dtype not in TYPES:
        return f"the first step is not fed an empty {slot.past}"
    if slot.first == "empty" and "past" not in slot.axes:
        return f"{slot.past} has no axis for tokens"
    for axis, size in zip(slot.axes, slot.shape, strict=True):
        if axis == "batch_heads" and contract.heads is None:
            return f"the number of heads in {slot.past} is not known"
        if axis not in ("batch", "batch_heads", "past") and not isinstance(size, int):
            return f"the size of the axis {axis} of {slot.past} is no number"
    return None


def _find_rows(contract: CacheContract) -> Port | None:
    """An input of the first step that has as many rows as there are sequences."""
    wanted = ("token_ids", "embeddings", "attention_mask", "position_ids")
    ports = [port for role in wanted for port in contract.graph("decode").inputs if port.role == role]
    return next((port for port in ports if "batch" in port.axes), None)


def split_single(source: LayoutSource) -> ConvertedModels:
    """Make the two graphs.

    Raises:
        DoesNotFit: the graph uses its past in a way that an empty one does not serve.
    """
    name = source.stack.main.name
    role: FileRole = next(role for role, file in source.stack.files.items() if file.name == name)
    first, later = source.model(role), source.model(role)
    names = source.new_name(FIRST), source.new_name(LATER)
    made = ConvertedModels(dict(zip(names, (first, later), strict=True)), (name,), limit=ALL_EXTERNAL)
    joined = make_first(first, source.contract)
    for model in made.models.values():
        _declare_sizes(model.graph, source.contract)
        restore_small(model, source.root)
    pasts = first_of(slot.past for slot in source.contract.slots)
    made.changes.append(Change(names[0], "inputs", pasts, "left out, computed as empty"))
    if joined:
        made.changes.append(Change(names[0], f"{joined} Concat with an empty past", "joined", "the new entries alone"))
    made.notes.append(f"Keep {names[0]}_data next to both files: neither opens without it.")
    made.notes.append(f"Feed {names[0]} the prompt, and its presents to {names[1]} as the past.")
    return made


def _declare_sizes(graph: GraphProto, contract: CacheContract) -> None:
    slots = {name: slot for slot in contract.slots for name in (slot.past, slot.present)}
    for value in (*graph.input, *graph.output):
        dims, slot = value.type.tensor_type.shape.dim, slots.get(value.name)
        for dim, axis, size in zip(dims, slot.axes, slot.shape, strict=False) if slot is not None else ():
            if axis in ("kv_heads", "head_dim", "state", "channels") and isinstance(size, int):
                dim.dim_value = size


def make_first(model: ModelProto, contract: CacheContract) -> int:
    """Make a graph that takes a past one of the first step; gives the number of joins that became unnecessary.

    Raises:
        DoesNotFit: an input of it is a past and a weight at once.
    """
    graph, slots = model.graph, {slot.past: slot for slot in contract.slots}
    if clash := [tensor.name for tensor in graph.initializer if tensor.name in slots]:
        raise DoesNotFit(f"{clash[0]} has a value of its own in the graph")
    keep_only(graph.input, lambda value: value.name not in slots)
    joined = _pass_joins(graph, slots)
    _compute_pasts(model, contract)
    sort_nodes(graph)
    graph.ClearField("value_info")  # its lengths are those of a step with a past
    _rename_lengths(graph, contract)
    prune(model)
    return joined


def _pass_joins(graph: GraphProto, slots: dict[str, Slot]) -> int:
    """Replace each join of an empty past with another value along its length by that value."""
    count = 0
    for node in graph.node:
        if not has(node.op_type, "join") or len(node.input) != 2:
            continue
        for empty, other in (tuple(node.input), tuple(reversed(node.input))):
            slot, axis = slots.get(empty), find_attribute(node, "axis")
            if slot is None or axis is None or slot.first != "empty" or axis.i % len(slot.axes) != slot.length_axis:
                continue
            node.op_type = "Identity"
            count += 1
            node.input[:] = [other]
            del node.attribute[:]
            break
    return count


def _compute_pasts(model: ModelProto, contract: CacheContract) -> None:
    """Add the nodes that make every past: zeros of its type and shape."""
    port, writer = _find_rows(contract), GraphWriter(model, prefix="first_step")
    assert port is not None  # noqa: S101 - refused before
    rows = writer.size_of(port.name, port.axes.index("batch"))
    for slot in contract.slots:
        parts = []
        for axis, size in zip(slot.axes, slot.shape, strict=True):
            if axis == "batch":
                parts.append(rows)
            elif axis == "batch_heads":
                parts.append(writer.node("heads", "Mul", [rows, writer.numbers([contract.heads or 1])]))
            else:
                parts.append(
                    writer.numbers([size if isinstance(size, int) and axis != "past" else int(axis != "past")])
                )
        sizes = writer.node("sizes", "Concat", parts, axis=0) if parts else writer.numbers([])
        zero = TensorProto(data_type=TYPES[slot.dtype], dims=[1], raw_data=b"\0" * ITEM_BYTES[slot.dtype])
        made = make_node("ConstantOfShape", [sizes], slot.past)
        made.attribute.add(name="value", type=AttributeProto.TENSOR, t=zero)
        model.graph.node.append(made)


def _rename_lengths(graph: GraphProto, contract: CacheContract) -> None:
    """Declare lengths of past and new tokens as those of the new ones, which is what they are without a past."""
    decode = contract.graph("decode")
    new = next((name for port in decode.inputs if isinstance(name := port.dim("new"), str)), None)
    axes = {port.name: port.axes for port in (*decode.inputs, *decode.outputs)}
    slots = {slot.present: slot.axes for slot in contract.slots}
    for value in (*graph.input, *graph.output):
        dims = value.type.tensor_type.shape.dim
        named = slots.get(value.name) or axes.get(value.name, ())
        for dim, axis in zip(dims, named, strict=False):
            if axis in ("total", "past") and not dim.HasField("dim_value"):
                dim.Clear()
                if new is not None:
                    dim.dim_param = new


def refuse(stack: StackFiles, contract: CacheContract) -> str | None:
    """Why a stack cannot be split."""
    if stack.kind == "pair":
        return "it is already a pair"
    if not contract.slots:
        return "its cache contract could not be read"
    return None if stack.kind == "merged" else refuse_split(contract)


def make(source: LayoutSource) -> ConvertedModels:
    """Split a merged decoder, or make a graph of the first step from the one for all steps."""
    if source.stack.kind != "merged":
        return split_single(source)
    merged = source.model("decoder-merged")
    first, later = split_halves(merged, source.contract)
    made = ConvertedModels(
        {source.new_name(FIRST): first, source.new_name(LATER): later}, (source.name("decoder-merged"),)
    )
    for file, half, branch in zip(made.models, (first, later), ("no-past branch", "cached branch"), strict=True):
        for part, mine, theirs in (
            ("inputs", half.graph.input, merged.graph.input),
            ("outputs", half.graph.output, merged.graph.output),
        ):
            kept = {value.name for value in mine}
            gone = [value.name for value in theirs if value.name not in kept]
            if gone:
                made.changes.append(Change(file, f"{branch}, {part}", first_of(gone), "left out"))
    if source.readable:
        axes = port_axes(source.contract, source.stack.main.name)
        for half in (first, later):
            name_axes(half.graph, axes, axis_names(source.contract))
    return made


def find_halves(source: LayoutSource) -> tuple[ModelProto, ModelProto]:
    """The graph of the first step and that of all later ones, of a pair or a merged decoder."""
    if source.stack.kind == "merged":
        return split_halves(source.model("decoder-merged"), source.contract)
    return source.model("decoder"), source.model("decoder-with-past")


def split_halves(merged: ModelProto, contract: CacheContract) -> tuple[ModelProto, ModelProto]:
    """The graph of the first step and that of all later ones, as copies without their weights.

    Raises:
        UsageError: no `If` of the graph is controlled by an input.
    """
    view = GraphView(merged)
    if view.branches is None:
        raise UsageError("this is not a merged decoder: no If of its graph is controlled by an input of type bool")
    switch, branches = view.branches
    dropped = set[str]()  # a decode step returns an empty tensor under that name, or the past that it was fed
    for output in filter(None, (slot.present for slot in contract.slots)):
        scope, name = view.behind(output)
        passed = scope is not view.main and scope.through(name) in view.inputs
        dropped |= {output} if passed or view.emptied(output) is not None else set()
    first = _make_half(merged, switch, branches, cached=False, dropped=set())
    read = {value.name for value in first.graph.input}
    held = replace(contract, slots=tuple(slot for slot in contract.slots if slot.past in read))
    if held.slots and _refuse_pasts(held) is None:  # read around the branches: the length that a switch then discards
        make_first(first, held)
    return first, _make_half(merged, switch, branches, cached=True, dropped=dropped)


def _make_half(merged: ModelProto, switch: str, branches: Branches, cached: bool, dropped: set[str]) -> ModelProto:
    model = deepcopy(merged)
    bodies = {id(node): body.graph for node, body in branches.bodies(cached)}
    for at in reversed(range(len(merged.graph.node))):  # what is inlined moves the nodes after it
        if (body := bodies.get(id(merged.graph.node[at]))) is not None:
            _inline_branch(model.graph, at, body)
    replace_all(model.graph.output, [value for value in model.graph.output if value.name not in dropped])
    _fix_switch(model.graph, switch, cached == branches.on)
    prune(model)
    if not branches.others:
        model.graph.name = bodies[id(branches.node)].name or model.graph.name
    return model


def _inline_branch(graph: GraphProto, at: int, branch: GraphProto) -> None:
    body, targets = GraphProto(), list(graph.node[at].output)
    body.CopyFrom(branch)
    before, after = list(graph.node[:at]), list(graph.node[at + 1 :])
    outside = own_names(graph) | {
        n for node in (*before, *after) for inner in subgraphs(node) for n in all_names(inner)
    }
    known = outside | all_names(body) | {*captures(body)}
    returned = {value.name: target for value, target in reversed([*zip(body.output, targets, strict=False)]) if target}
    inside = own_names(body)
    # A value keeps a name that is meant for it; other names that collide with the enclosing graph are changed.
    meant = {name: target for name, target in returned.items() if name in inside}
    aside = {name: fresh_name(name, known) for name in sorted(inside & outside) if name not in meant}
    for node in body.node:
        for nested in subgraphs(node):
            rename_banned(nested, outside, known)
    declared = {target: value for value, target in zip(body.output, targets, strict=False)}
    types = {target: _merge_types(graph, target, value) for target, value in declared.items() if target}
    ends = [value.name for value in body.output]
    rename_all(body, {**aside, **meant})
    named = []  # outputs that are values of the enclosing graph, or are returned twice
    for end, target in zip(ends, targets, strict=False):
        if target and meant.get(end) != target:
            named.append(make_node("Identity", [meant.get(end) or aside.get(end, end)], target))
    replace_all(graph.node, [*before, *body.node, *named, *after])
    graph.initializer.extend(body.initializer)
    graph.sparse_initializer.extend(body.sparse_initializer)
    graph.quantization_annotation.extend(body.quantization_annotation)
    graph.value_info.extend(value for value in body.value_info if value.name not in targets)
    for value in graph.output:
        if value.name in types:
            value.type.CopyFrom(types[value.name].type)


def _merge_types(graph: GraphProto, target: str, value: ValueInfoProto) -> ValueInfoProto:
    outer = next((other for other in graph.output if other.name == target), None)
    merged = deepcopy(outer if outer is not None else value)
    if outer is None or not value.type.tensor_type.HasField("shape"):
        return merged
    known, dims = value.type.tensor_type.shape.dim, merged.type.tensor_type.shape.dim
    if len(known) == len(dims):
        for dim, own in zip(dims, known, strict=True):
            if own.HasField("dim_value"):
                dim.CopyFrom(own)
    return merged


def _fix_switch(graph: GraphProto, switch: str, value: bool) -> None:
    if switch not in needed_for(graph, (value.name for value in graph.output)):
        return
    declared = next(value for value in graph.input if value.name == switch)
    dims = [1] * len(declared.type.tensor_type.shape.dim)
    replace_all(graph.input, [value for value in graph.input if value.name != switch])
    graph.initializer.append(TensorProto(name=switch, dims=dims, data_type=TensorProto.BOOL, raw_data=bytes([value])))


LAYOUT = Layout("pair", "decoder_model.onnx and decoder_with_past_model.onnx", refuse, make)
