"""Moves what computes the cross-attention cache from the graph of the first step into the encoder.

Exporters read the batch size for it from the tokens. The encoder has none, so there it is read from its own states.
"""

from copy import deepcopy

from kvdoctor.addons.conversions.layouts.merging import unite_functions, unite_opsets
from kvdoctor.addons.conversions.layouts.naming import first_of
from kvdoctor.addons.conversions.layouts.registry import DoesNotFit
from kvdoctor.model.edit import fresh_name, keep_only, prune, rename_all, replace_all
from kvdoctor.model.operators import has, operator_of, operators_with
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from kvdoctor.model.traverse import (
    all_nodes,
    find_attribute,
    input_of,
    names_in,
    needed_for,
    output_of,
    own_names,
    producers,
    readers,
)
from kvdoctor.model.view import GraphView, integers

NARROWER = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
"""Element types whose values are the same after a cast to float32 and back."""
MOVING = operators_with("copy", "permute", "view", "repeat", "pick", "join")
KEEPING_TYPE = (MOVING | operators_with("add", "subtract", "scale", "product")) - operators_with("weights")
"""Operators whose inputs with content have the type of their output."""


def return_from_encoder(encoder: ModelProto, first: ModelProto, states: tuple[str, str], caches: list[str]) -> None:
    """Let an encoder return caches as well, which the graph of the first step computes from encoder states.

    `states` are their names in the encoder and in the first step, which is not changed.

    Raises:
        DoesNotFit: a cache is computed from more than the states.
        UsageError: the two graphs use different opsets, or functions of one name that differ.
    """
    made = deepcopy(first)
    graph = made.graph
    replace_all(graph.output, [value for value in graph.output if value.name in caches])
    _read_batch_from(states[1], made)
    prune(made)
    strange = [value.name for value in graph.input if value.name != states[1]]
    if strange:
        raise DoesNotFit(
            f"its cross-attention cache is computed from {first_of(strange)} and not from the encoder states alone"
        )
    known = names_in(encoder) | names_in(made)
    rename_all(encoder.graph, {name: fresh_name(name, known) for name in sorted(own_names(encoder.graph) & {*caches})})
    taken = names_in(encoder)
    clashing = sorted((own_names(graph) & taken) - {states[1]})
    rename_all(graph, {name: fresh_name(name, known) for name in clashing} | {states[1]: states[0]})
    for node in all_nodes(made):
        if node.name in taken:
            node.name = fresh_name(node.name, known)
    unite_opsets(encoder, made)
    unite_functions(encoder, made)
    encoder.ir_version = max(encoder.ir_version, made.ir_version)
    whole = encoder.graph
    for mine, theirs in (
        (whole.node, graph.node),
        (whole.initializer, graph.initializer),
        (whole.sparse_initializer, graph.sparse_initializer),
        (whole.quantization_annotation, graph.quantization_annotation),
        (whole.value_info, [value for value in graph.value_info if value.name != states[0]]),
        (whole.output, graph.output),
    ):
        mine.extend(theirs)


def _read_batch_from(states: str, model: ModelProto) -> None:
    """Let the sizes that caches take from other values than the states be the batch size of the states.

    Raises:
        DoesNotFit: another size than the first one is taken.
    """
    graph = model.graph
    sizes = {name for node in graph.node if has(node.op_type, "sizes") for name in node.output}
    behind = needed_for(graph, [value.name for value in graph.output], without=sizes)
    for node in graph.node:
        if not has(node.op_type, "sizes") or behind.isdisjoint(node.output):
            continue
        needed = needed_for(graph, [input_of(node, 0)])
        others = [value.name for value in graph.input if value.name in needed and value.name != states]
        if others and not _takes_batch(model, node):
            raise DoesNotFit(
                f"the node {node.name!r} reads a length from {first_of(others)} for the cross-attention cache, and the "
                "encoder does not take it"
            )
        if others:
            node.input[0] = states


def _takes_batch(model: ModelProto, node: NodeProto) -> bool:
    """Whether nothing but the first size is taken of a Shape."""
    start, end = (find_attribute(node, name) for name in ("start", "end"))
    if end is not None:
        return end.i == 1 and (start is None or start.i == 0)
    view = GraphView(model)

    def takes_first(reader: NodeProto) -> bool:
        if reader.op_type == "Slice":
            numbers = [view.main.constant(name) for name in reader.input[1:4] if name]
            return [integers(one) if one is not None else None for one in numbers] in ([(0,), (1,)], [(0,), (1,), (0,)])
        index = view.main.constant(input_of(reader, 1)) if reader.op_type == "Gather" else None
        return index is not None and integers(index) == (0,)

    return (start is None or start.i == 0) and all(
        takes_first(reader) for reader, _ in readers(model.graph).get(output_of(node), ())
    )


def take_as_inputs(first: ModelProto, states: str, caches: dict[str, ValueInfoProto]) -> None:
    """Let the graph of the first step take its cross-attention cache; `caches` are the inputs by the present's name.

    The attention often reads what the present is a transposition of, or has before a cast: that is computed back.

    Raises:
        DoesNotFit: the graph needs the encoder states for more.
    """
    graph, known = first.graph, names_in(first)
    keep_only(graph.output, lambda value: value.name not in caches)
    for present, given in caches.items():
        graph.input.append(given)
        _replace(graph, present, given.name, known)
    prune(first)
    graph.ClearField("value_info")  # the lengths of some are those of the states
    if any(value.name == states for value in graph.input):
        reading = [node.name or node.op_type for node in graph.node if states in node.input]
        raise DoesNotFit(
            f"the first step takes more of the encoder states than the cross-attention cache, in {first_of(reading)}"
        )


def _replace(graph: GraphProto, present: str, given: str, known: set[str]) -> None:
    """Let a value be another one, and what it is a transposition or a wider type of be made from that one."""
    made, name = producers(graph), present
    added = [NodeProto(op_type="Identity", name=fresh_name(f"{present}.given", known), input=[given], output=[present])]
    while True:
        node = made[name]
        back = _undo(graph, node, fresh_name(f"{name}.back", known))
        node.output[:] = [fresh_name("unused", known) if output == name else output for output in node.output]
        if back is None or back.output[0] not in made:
            break
        added.append(back)
        name = back.output[0]
    replace_all(graph.node, [*added, *graph.node])


def _undo(graph: GraphProto, node: NodeProto, name: str) -> NodeProto | None:
    """A node that makes the input of another one from its output, the same to the bit; None if there is none."""
    back = NodeProto(op_type=node.op_type, name=name, input=node.output, output=node.input[:1])
    if has(node.op_type, "copy"):
        return back
    if has(node.op_type, "permute") and (order := find_attribute(node, "perm")) is not None:
        back.attribute.add(
            name="perm", type=order.type, ints=sorted(range(len(order.ints)), key=order.ints.__getitem__)
        )
        return back
    if has(node.op_type, "cast") and (to := find_attribute(node, "to")) is not None and to.i == TensorProto.FLOAT:
        narrow = _find_type(graph, input_of(node, 0))
        if narrow in NARROWER:
            back.attribute.add(name="to", type=to.type, i=narrow)
            return back
    return None


def _find_type(graph: GraphProto, name: str) -> int | None:
    """The element type of a value, read off a weight or a Cast from which it is computed without a change of type."""
    weights, made = {tensor.name: tensor.data_type for tensor in graph.initializer}, producers(graph)
    waiting, seen = [name], set[str]()
    while waiting:
        name = waiting.pop()
        node = made.get(name)
        if name in weights:
            return int(weights[name])
        if node is None or name in seen:
            continue
        seen.add(name)
        if has(node.op_type, "cast") and (to := find_attribute(node, "to")) is not None:
            return int(to.i)
        if node.op_type in KEEPING_TYPE:
            takes = operator_of(node.op_type).takes_content
            waiting += [name for at, name in enumerate(node.input) if takes(at)]
    return None
