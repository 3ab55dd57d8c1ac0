"""The encoder of a pair as Optimum's encoder_model: the file next to the pair, or the encoder inside its first step.

The graph tells which: a first step that computes its cross-attention cache from tokens or features, not from encoder
states that it is fed, contains the encoder. It is cut off at the value from which all of that cache is computed.
"""

from collections.abc import Iterator
from copy import deepcopy

from kvdoctor.addons.conversions.layouts.naming import ENCODER, ROLES, PortNames, name_axes, rename_ports
from kvdoctor.addons.conversions.layouts.registry import ConvertedModels, Cut, DoesNotFit, LayoutSource
from kvdoctor.contract import CacheContract, Graph
from kvdoctor.model.edit import declare, fresh_name, prune, rename_all, replace_all
from kvdoctor.model.operators import has, operators_with
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto, TensorProto, ValueInfoProto
from kvdoctor.model.traverse import all_names, input_of, needed_for, producers
from kvdoctor.model.view import declared
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
        made.encoder, made.cut = source.new_name(ENCODER), cut
        made.models[made.encoder] = model
        made.changes.append(Change(source.new_name(ENCODER), "main graph", where, "a file of its own"))
        return names
    if "encoder" in source.stack.files:
        _convert_encoder_file(source, made)
    elif source.contract.has_encoder_states:
        made.notes.append(MISSING)
    return None


def _convert_encoder_file(source: LayoutSource, made: ConvertedModels) -> None:
    """Give an encoder file Optimum's names."""
    old, new = source.name("encoder"), source.new_name(ENCODER)
    graph = source.contract.graphs.get("encoder")
    model = source.model("encoder")
    inputs, outputs = encoder_names(graph, model.graph)
    if old == new and inputs.keys() == set(inputs.values()) and outputs.keys() == set(outputs.values()):
        return
    keep = [value for value in model.graph.output if value.name in outputs]
    replace_all(model.graph.output, keep)
    rename_ports(model.graph, inputs, outputs)
    _name_encoder_axes(model.graph)
    made.models[new], made.encoder = model, new
    made.replaces = (*made.replaces, *((old,) if old != new else ()))
    for before, after in (*inputs.items(), *outputs.items()):
        if before != after:
            made.changes.append(Change(old, "inputs and outputs", before, after))
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
    shared = _find_shared(graph, crossed)
    for name in [name for node in reversed(graph.node) for name in node.output if name in shared]:
        beyond = needed_for(graph, [other for other in outputs if other != name], without={name, *sizes}) & given
        inside = needed_for(graph, [name], without=sizes) & given
        if inside - beyond:
            return Cut(name, tuple(sorted(inside)), tuple(sorted(inside - beyond)))
    raise DoesNotFit(
        f"{contract.graph('prefill').file} computes the cross-attention cache from {', '.join(feeding)}, and no value "
        "was found at which its encoder ends; export the encoder as a graph of its own"
    )


def _find_shared(graph: GraphProto, crossed: list[str]) -> set[str]:
    """The values that all cross-attention keys and values depend on, without those that only rearrange another."""
    shared = set.intersection(*(needed_for(graph, [name]) for name in crossed))
    made = producers(graph)
    return {name for name in shared - set(crossed) if name in made and made[name].op_type not in LAYING_OUT}


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
    taken = fresh_name(STATES, known)
    if taken != STATES:
        rename_all(graph, {STATES: taken})
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
        place = next((p for p in _find_axes(own, dims[axes[0]].dim_param)), None) if len(axes) == 1 else None
        if place is None:
            raise DoesNotFit(
                f"the node {node.name!r} reads its sizes from {node.input[0]!r}, on the other side of the cut"
            )
        del node.attribute[:]
        node.input[0] = place[0]
        node.attribute.add(name="start", type=AttributeProto.INT, i=place[1])
        node.attribute.add(name="end", type=AttributeProto.INT, i=place[1] + 1)


def _find_axes(own: list[ValueInfoProto], symbol: str) -> Iterator[tuple[str, int]]:
    """The inputs and axes with a size of that name."""
    for value in own if symbol else ():
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param == symbol:
                yield value.name, axis


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
