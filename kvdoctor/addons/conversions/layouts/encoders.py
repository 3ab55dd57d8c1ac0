"""The encoder of a pair as Optimum's encoder_model: the file next to the pair, or the encoder inside its first step.

The graph tells which: a first step that computes its cross-attention cache from tokens or features, not from encoder
states that it is fed, contains the encoder. It is cut off at the value from which all of that cache is computed.

What computes the cross-attention cache can move from the graph of the first step into the encoder. Exporters read the
batch size for it from the tokens. The encoder has none, so there it is read from its own states.
"""

from copy import deepcopy

from kvdoctor.addons.conversions.graphs.conversion import find_element
from kvdoctor.addons.conversions.layouts.merging import unite_functions, unite_opsets
from kvdoctor.addons.conversions.layouts.naming import (
    ENCODER,
    ROLES,
    PortNames,
    first_of,
    list_renamings,
    name_axes,
    rename_ports,
)
from kvdoctor.addons.conversions.layouts.registry import ConvertedModels, DoesNotFit, LayoutSource
from kvdoctor.contract import CacheContract, Graph
from kvdoctor.model.edit import declare, fresh_name, keep_only, prune, rename_all, replace_all
from kvdoctor.model.operators import has, operators_with
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto
from kvdoctor.model.traverse import (
    all_names,
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
from kvdoctor.model.view import GraphView, declared, integers
from kvdoctor.records import record
from kvdoctor.report.repair_record import Change

STATES, RESULT = "encoder_hidden_states", "last_hidden_state"
"""The names of the encoder states in the decoder and in the encoder."""

LAYING_OUT = operators_with("copy", "cast", "permute", "view")
"""Operators that only rearrange the encoder's output: the cut is before them."""

MISSING = (
    "There is no encoder in this export: Optimum and transformers.js need encoder_model.onnx next to the decoder. "
    "Export it with OnnxExporter().export(model.get_encoder(), ...) as encoder.onnx into the same folder, and convert "
    "again."
)


@record(slots=False)
class Cut:
    """The end of the encoder inside a first step: its output, all of its inputs, and those that nothing else takes."""

    states: str
    inputs: tuple[str, ...]
    only: tuple[str, ...]


def bring_encoder(source: LayoutSource, first: ModelProto | None, made: ConvertedModels) -> PortNames | None:
    """Add the encoder to the new models, if there is one.

    If it is cut out of the graph of the first step, that graph is changed, and its new names are returned.

    Raises:
        DoesNotFit: the first step holds an encoder that cannot be cut off.
    """
    cut = find_inside(first.graph, source.contract) if first is not None else None
    if first is not None and cut is not None:
        names, model = _names_without_encoder(source.contract, cut), ModelProto()
        model.CopyFrom(first)
        _keep_encoder(model, cut)
        _remove_encoder(first, cut)
        where = f"{source.name('decoder')}, up to {cut.states!r}"
        made.encoder = source.new_name(ENCODER)
        made.models[made.encoder] = model
        made.changes.append(Change(source.new_name(ENCODER), "main graph", where, "a file of its own"))
        return names
    if "encoder" in source.stack.files:
        _convert_encoder_file(source, made)
    elif source.contract.has_encoder_states:
        made.notes.append(MISSING)
    return None


def _convert_encoder_file(source: LayoutSource, made: ConvertedModels) -> None:
    old, new = source.name("encoder"), source.new_name(ENCODER)
    graph = source.contract.graphs.get("encoder")
    model = source.model("encoder")
    inputs, outputs = encoder_names(graph, model.graph)
    if old == new and inputs.keys() == set(inputs.values()) and outputs.keys() == set(outputs.values()):
        return
    made.changes += list_renamings(old, model.graph, PortNames(inputs, outputs))
    keep_only(model.graph.output, lambda value: value.name in outputs)
    rename_ports(model.graph, inputs, outputs)
    _name_encoder_axes(model.graph)
    made.models[new], made.encoder = model, new
    made.replaces = (*made.replaces, old)
    made.changes.append(Change(old, "file", old, new))


def encoder_names(ports: Graph | None, graph: GraphProto) -> tuple[dict[str, str], dict[str, str]]:
    """Optimum's names of the inputs of an encoder, and of the output that the decoder takes."""
    inputs = {value.name: value.name.removeprefix("input.") for value in graph.input}
    states = ports.port("encoder_states") if ports is not None else None
    chosen = states.name if states is not None else graph.output[0].name
    return inputs, {chosen: RESULT}


def find_inside(graph: GraphProto, contract: CacheContract) -> Cut | None:
    """The encoder inside the graph of a first step, None if that is fed encoder states.

    Raises:
        DoesNotFit: the cross-attention cache is computed from tokens, but not from a single value.
    """
    crossed = [slot.filled_by for slot in contract.of_kind("cross-attention") if slot.filled_by]
    ports = {port.name: port for port in contract.graph("prefill").inputs}
    behind = needed_for(graph, crossed)
    feeding = [value.name for value in graph.input if value.name in behind]
    if not crossed or any(name in ports and ports[name].role == "encoder_states" for name in feeding):
        return None
    given, outputs = {value.name for value in graph.input}, [value.name for value in graph.output]
    sizes = {
        name for node in graph.node if has(node.op_type, "sizes") and input_of(node, 0) in given for name in node.output
    }
    shared = set.intersection(*(needed_for(graph, [name]) for name in crossed)) - set(crossed)
    made = producers(graph)
    shared = {name for name in shared if name in made and made[name].op_type not in LAYING_OUT}
    for name in [name for node in reversed(graph.node) for name in node.output if name in shared]:
        beyond = needed_for(graph, [other for other in outputs if other != name], without={name, *sizes}) & given
        inside = needed_for(graph, [name], without=sizes) & given
        if inside - beyond:
            return Cut(name, tuple(sorted(inside)), tuple(sorted(inside - beyond)))
    raise DoesNotFit(
        f"{contract.graph('prefill').file} computes the cross-attention cache from {', '.join(feeding)}, and no value "
        "was found at which its encoder ends; export the encoder as a graph of its own"
    )


def _names_without_encoder(contract: CacheContract, cut: Cut) -> PortNames:
    """The inputs of the first step without its encoder; equal names in the later graph have equal meaning."""
    names = PortNames(inputs={STATES: STATES}, axes={STATES: ("batch", "encoder", "hidden")})
    later = {port.name: port for port in contract.graph("decode").inputs}
    for port in contract.graph("prefill").inputs:
        known = later.get(port.name, port)
        if port.name not in cut.only and known.role in ROLES and known.role != "encoder_states":
            names.inputs[port.name] = ROLES[known.role]
            names.axes[ROLES[known.role]] = known.axes
    return names


def _keep_encoder(model: ModelProto, cut: Cut) -> None:
    """Make a graph the encoder alone."""
    graph = model.graph
    value = _declaration(graph, cut.states)
    replace_all(graph.output, [value])
    prune(model)
    _read_sizes_elsewhere(graph, [value for value in graph.input if value.name in cut.inputs])
    prune(model)
    rename_ports(graph, encoder_names(None, graph)[0], {value.name: RESULT})
    _name_encoder_axes(graph)


def _remove_encoder(first: ModelProto, cut: Cut) -> None:
    """Let a graph take the encoder's states as an input."""
    graph = first.graph
    value = _declaration(graph, cut.states)
    known = all_names(graph)
    outputs = [output for output in graph.output if output.name != cut.states]
    replace_all(graph.output, outputs)
    if cut.states != STATES:
        if STATES in known:
            rename_all(graph, {STATES: fresh_name(STATES, known)})
        rename_all(graph, {cut.states: STATES})
    node = producers(graph)[STATES]
    node.output[:] = [fresh_name("unused", known) if name == STATES else name for name in node.output]
    replace_all(graph.value_info, [info for info in graph.value_info if info.name != STATES])
    value.name = STATES
    graph.input.append(value)
    prune(first)
    _read_sizes_elsewhere(graph, [value for value in graph.input if value.name not in cut.only])


def _read_sizes_elsewhere(graph: GraphProto, own: list[ValueInfoProto]) -> None:
    """Read sizes from the inputs that a graph keeps: a trace may read the batch size from any input.

    Raises:
        DoesNotFit: a size of another input is needed, and no input has one under the same name.
    """
    names = {value.name for value in own}
    declarations = {value.name: value for value in graph.input if value.name not in names}
    for node in graph.node:
        if not has(node.op_type, "sizes") or input_of(node, 0) not in declarations:
            continue
        dims = declarations[node.input[0]].type.tensor_type.shape.dim
        start, end = (next((a.i for a in node.attribute if a.name == key), None) for key in ("start", "end"))
        axes = range(len(dims))[start:end]
        symbol = dims[axes[0]].dim_param if len(axes) == 1 else ""
        named = ((value, at) for value in own for at in range(len(value.type.tensor_type.shape.dim)))
        same = ((v.name, at) for v, at in named if symbol and v.type.tensor_type.shape.dim[at].dim_param == symbol)
        place = next(same, None)
        if place is None:
            raise DoesNotFit(
                f"the node {node.name!r} reads its sizes from {node.input[0]!r}, on the other side of the cut"
            )
        del node.attribute[:]
        node.input[0] = place[0]
        node.attribute.add(name="start", type=AttributeProto.INT, i=place[1])
        node.attribute.add(name="end", type=AttributeProto.INT, i=place[1] + 1)


def _declaration(graph: GraphProto, name: str) -> ValueInfoProto:
    """The declaration of a value; a tensor of floats if the graph has none."""
    known = [v for v in (*graph.output, *graph.value_info) if v.name == name][:1]
    known = [v for v in known if declared(v).shape is not None] or [
        v
        for v in graph.output
        for n in graph.node
        if v.name in n.output and has(n.op_type, "copy") and input_of(n, 0) == name
    ]
    if not known:
        return declare(name, TensorProto.FLOAT, ("batch_size", "encoder_sequence_length", "hidden_size"))
    found: ValueInfoProto = deepcopy(known[0])
    found.name = name
    return found


def _name_encoder_axes(graph: GraphProto) -> None:
    """Name the batch axis, and the length if input and output have the same name for it."""
    result = next(value for value in graph.output if value.name == RESULT)
    lengths = {dim.dim_param for dim in list(result.type.tensor_type.shape.dim)[1:2] if dim.dim_param}
    axes: dict[str, tuple[str, ...]] = {RESULT: ("batch", "encoder", "hidden")}
    for value in graph.input:
        dims = list(value.type.tensor_type.shape.dim)
        axes[value.name] = ("batch", *("encoder" if dim.dim_param in lengths else "fixed" for dim in dims[1:]))
    name_axes(graph, axes, {"batch": "batch_size", "encoder": "encoder_sequence_length"})  # type: ignore[arg-type]


NARROWER = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
"""Element types whose values are the same after a cast to float32 and back."""


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
        narrow = find_element((graph,), input_of(node, 0))
        if narrow in NARROWER:
            back.attribute.add(name="to", type=to.type, i=narrow)
            return back
    return None
