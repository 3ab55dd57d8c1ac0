"""One graph for all steps as two: the graph of the first step takes no past, the other one stays as it is.

Requires: a decoder that is one graph, whose first step is fed an empty past, or states of zeros.
Ensures: in the graph of the first step every past is computed: zeros of its type, as many rows as token ids have, of
length 0 where it grows. A Concat that would join such a past with the new entries passes these on. Both graphs refer to
the same weights, which lie once in a data file beside them.
"""

from collections.abc import Iterator

from kvdoctor.analysis.stacks import FileRole
from kvdoctor.contract import ITEM_BYTES, CacheContract, Port, Slot
from kvdoctor.model.edit import fresh_name, keep_only, prune, replace_all
from kvdoctor.model.external_data import external_tensors
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import find_attribute, names_in
from kvdoctor.model.view import ELEMENT_TYPES
from kvdoctor.repair.layouts.naming import FIRST, LATER, first_of
from kvdoctor.repair.layouts.registry import ConvertedModels, DoesNotFit, LayoutSource
from kvdoctor.repair.layouts.weights import LINE, FileSizeLimit, restore, span_of
from kvdoctor.report.repair_record import Change

BESIDE = FileSizeLimit(most=0)
"""The weights lie beside both graphs."""
TENSOR = AttributeProto.TENSOR
TYPES = {name: number for number, name in ELEMENT_TYPES.items()}


def refuse_split(contract: CacheContract) -> str | None:
    """Why one graph cannot become two; None if it can."""
    if contract.first_step != "empty-past":
        return "its first step is not fed an empty past"
    if contract.graph("prefill") != contract.graph("decode"):
        return "another graph serves its first step"
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
    made = ConvertedModels(dict(zip(names, (first, later), strict=True)), (name,), limit=BESIDE)
    joined = make_first(first, source.contract)
    for model in made.models.values():
        _declare_sizes(model.graph, source.contract)
        for tensor in [*external_tensors(model)]:
            if span_of(tensor).length < LINE:
                restore(tensor, source.root)
    pasts = first_of(slot.past for slot in source.contract.slots)
    made.changes.append(Change(names[0], "inputs", pasts, "left out, computed as empty"))
    if joined:
        made.changes.append(Change(names[0], f"{joined} Concat with an empty past", "joined", "the new entries alone"))
    made.notes.append(f"Keep {names[0]}_data beside both files: neither opens without it.")
    made.notes.append(f"Feed {names[0]} the prompt, and its presents to {names[1]} as the past.")
    return made


def _declare_sizes(graph: GraphProto, contract: CacheContract) -> None:
    """Declare the heads and widths of caches that only a config tells: it may name one decoder alone, and is gone."""
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
    made = [*_compute_pasts(names_in(model) | set(slots), contract)]
    replace_all(graph.node, [*made, *graph.node])
    graph.ClearField("value_info")  # its lengths are those of a step with a past
    _rename_lengths(graph, contract)
    prune(model)
    return joined


def _pass_joins(graph: GraphProto, slots: dict[str, Slot]) -> int:
    """Replace each join of an empty past with another value along its length by that value."""
    count = 0
    for node in graph.node:
        if node.op_type != "Concat" or len(node.input) != 2:
            continue
        for empty, other in (tuple(node.input), tuple(reversed(node.input))):
            slot, axis = slots.get(empty), find_attribute(node, "axis")
            if slot is None or axis is None or slot.first != "empty" or axis.i % len(slot.axes) != slot.length_axis:
                continue
            node.op_type, count = "Identity", count + 1
            node.input[:] = [other]
            del node.attribute[:]
            break
    return count


def _compute_pasts(known: set[str], contract: CacheContract) -> Iterator[NodeProto]:
    """The nodes that make every past: zeros of its type and shape."""
    port = _find_rows(contract)
    assert port is not None  # noqa: S101 - refused before
    shape, rows = (fresh_name(f"first_step.{word}", known) for word in ("ids_shape", "rows"))
    yield NodeProto(op_type="Shape", name=shape, input=[port.name], output=[shape])
    at = fresh_name("first_step.batch_axis", known)
    yield integer_constant(at, [port.axes.index("batch")])
    yield NodeProto(op_type="Gather", name=rows, input=[shape, at], output=[rows])
    for slot in contract.slots:
        parts = []
        for number, axis in enumerate(slot.axes):
            size = slot.shape[number]
            part = fresh_name(f"{slot.past}.size_{number}", known)
            if axis == "batch":
                parts.append(rows)
                continue
            if axis == "batch_heads":
                heads = fresh_name(f"{slot.past}.heads", known)
                yield integer_constant(heads, [contract.heads or 1])
                yield NodeProto(op_type="Mul", name=part, input=[rows, heads], output=[part])
            else:
                yield integer_constant(part, [0 if axis == "past" else int(size) if isinstance(size, int) else 1])
            parts.append(part)
        sizes = fresh_name(f"{slot.past}.sizes", known)
        yield _join(sizes, parts) if parts else integer_constant(sizes, [])
        yield _zeros(slot, sizes, fresh_name(f"{slot.past}.empty", known))


def _join(name: str, parts: list[str]) -> NodeProto:
    node = NodeProto(op_type="Concat", name=name, input=parts, output=[name])
    node.attribute.add(name="axis", type=AttributeProto.INT, i=0)
    return node


def _zeros(slot: Slot, sizes: str, name: str) -> NodeProto:
    """A tensor of zeros in sizes that are computed."""
    number = TYPES[slot.dtype]
    node = NodeProto(op_type="ConstantOfShape", name=name, input=[sizes], output=[slot.past])
    value = TensorProto(data_type=number, dims=[1], raw_data=b"\0" * ITEM_BYTES[slot.dtype])
    node.attribute.add(name="value", type=TENSOR, t=value)
    return node


def integer_constant(name: str, numbers: list[int]) -> NodeProto:
    """A node that gives int64[n]."""
    node = NodeProto(op_type="Constant", name=name, output=[name])
    data = b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)
    node.attribute.add(
        name="value", type=TENSOR, t=TensorProto(data_type=TensorProto.INT64, dims=[len(numbers)], raw_data=data)
    )
    return node


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
