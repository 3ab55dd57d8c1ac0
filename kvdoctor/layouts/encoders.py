"""The encoder of a pair as Optimum's encoder_model: the file beside it, or what stands inside its first step.

Which it is, is asked of the graph: a first step that makes its cross-attention cache of tokens or features, and not of
encoder states that it is fed, holds the encoder. It is cut off at the value that all of that cache is made of.
"""

from collections.abc import Iterator

from kvdoctor.contract import CacheContract, Graph, Port
from kvdoctor.graph import declared
from kvdoctor.layouts import Cut, DoesNotFit, Made, Source
from kvdoctor.layouts.graphs import keep_needed, rename_ports
from kvdoctor.layouts.joining import ENCODER
from kvdoctor.layouts.naming import ROLES, Names, name_axes
from kvdoctor.onnx_schema import AttributeProto, GraphProto, ModelProto, TensorProto, ValueInfoProto
from kvdoctor.report.document import Change
from kvdoctor.scoping import all_names, fresh, needed_for, producers, rename, replace_all

STATES, RESULT = "encoder_hidden_states", "last_hidden_state"
"""What the decoder calls the encoder's states, and what the encoder does."""

LAYING_OUT = {"Identity", "Cast", "Transpose", "Reshape", "Unsqueeze", "Squeeze", "Flatten"}
"""Operators that only lay out anew what an encoder gave: the cut is before them."""

MISSING = (
    "There is no encoder in this export: Optimum and transformers.js need encoder_model.onnx beside the decoder. "
    "Export it with OnnxExporter().export(model.get_encoder(), ...) as encoder.onnx into the same folder, and convert "
    "again."
)


def bring_encoder(source: Source, first: ModelProto | None, made: Made) -> Names | None:
    """Put the encoder among the new models, where there is one to be had.

    Where it is cut out of the graph of the first step, that graph is changed, and its new names are given.

    Raises:
        DoesNotFit: the first step holds an encoder that cannot be cut off.
    """
    cut = found_inside(first.graph, source.contract) if first is not None else None
    if first is not None and cut is not None:
        names, model = _names_after(source.contract, cut), ModelProto()
        model.CopyFrom(first)
        _end_at(model, cut)
        _begin_at(first, cut)
        where = f"{source.name('decoder')}, up to {cut.states!r}"
        made.encoder, made.cut = source.new_name(ENCODER), cut
        made.models[made.encoder] = model
        made.changes.append(Change(source.new_name(ENCODER), "main graph", where, "a graph of its own"))
        return names
    if "encoder" in source.stack.files:
        _take_over(source, made)
    elif source.contract.has_encoder_states:
        made.notes.append(MISSING)
    return None


def _take_over(source: Source, made: Made) -> None:
    """Give an encoder beside the decoders Optimum's names."""
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
    """What Optimum calls the inputs of an encoder, and the output that the decoder takes."""
    inputs = {value.name: value.name.removeprefix("input.") for value in graph.input}
    states = ports.port("encoder_states") if ports is not None else None
    chosen = states.name if states is not None else graph.output[0].name
    return inputs, {chosen: RESULT}


def found_inside(graph: GraphProto, contract: CacheContract) -> Cut | None:
    """The encoder inside the graph of a first step, None where it is fed encoder states.

    Raises:
        DoesNotFit: the cross-attention cache is made of tokens, and of no one value.
    """
    crossed = [slot.filled_by for slot in contract.of_kind("cross-attention") if slot.filled_by]
    ports = {port.name: port for port in contract.graph("prefill").inputs}
    behind = needed_for(graph, crossed)
    feeding = [value.name for value in graph.input if value.name in behind]
    if not crossed or any(_is_states(ports.get(name)) for name in feeding):
        return None
    given, outputs = {value.name for value in graph.input}, [value.name for value in graph.output]
    sizes = {name for node in graph.node if node.op_type == "Shape" and node.input[0] in given for name in node.output}
    for name in _last_first(graph, _shared(graph, crossed)):
        beyond = needed_for(graph, [other for other in outputs if other != name], without={name, *sizes}) & given
        inside = needed_for(graph, [name], without=sizes) & given
        if inside - beyond:
            return Cut(name, tuple(sorted(inside)), tuple(sorted(inside - beyond)))
    raise DoesNotFit(
        f"{contract.graph('prefill').file} makes the cross-attention cache of {', '.join(feeding)}, and no value was "
        "found at which its encoder ends; export the encoder as a graph of its own"
    )


def _is_states(port: Port | None) -> bool:
    return port is not None and port.role == "encoder_states"


def _shared(graph: GraphProto, crossed: list[str]) -> set[str]:
    """The values that every cross-attention key and value is made of, those that only lay out another left out."""
    shared = set.intersection(*(needed_for(graph, [name]) for name in crossed))
    made = producers(graph)
    return {name for name in shared - set(crossed) if name in made and made[name].op_type not in LAYING_OUT}


def _last_first(graph: GraphProto, names: set[str]) -> list[str]:
    return [name for node in reversed(graph.node) for name in node.output if name in names]


def _names_after(contract: CacheContract, cut: Cut) -> Names:
    """The inputs of the first step without its encoder: what the later graph calls alike means the same."""
    names = Names(inputs={STATES: STATES}, axes={STATES: ("batch", "encoder", "hidden")})
    later = {port.name: port for port in contract.graph("decode").inputs}
    for port in contract.graph("prefill").inputs:
        known = later.get(port.name, port)
        if port.name not in cut.only and known.role in ROLES and known.role != "encoder_states":
            names.inputs[port.name] = ROLES[known.role]
            names.axes[ROLES[known.role]] = known.axes
    return names


def _end_at(model: ModelProto, cut: Cut) -> None:
    """Make a graph the encoder alone."""
    graph = model.graph
    value = _declaration(graph, cut.states)
    replace_all(graph.output, [value])
    keep_needed(model)
    _measure(graph, [value for value in graph.input if value.name in cut.inputs])
    keep_needed(model)
    rename_ports(graph, encoder_names(None, graph)[0], {value.name: RESULT})
    _name_encoder_axes(graph)


def _begin_at(first: ModelProto, cut: Cut) -> None:
    """Let a graph take the encoder's states as an input."""
    graph = first.graph
    value = _declaration(graph, cut.states)
    known = all_names(graph)
    outputs = [output for output in graph.output if output.name != cut.states]
    replace_all(graph.output, outputs)
    taken = fresh(STATES, known)
    if taken != STATES:
        rename(graph, {STATES: taken})
    rename(graph, {cut.states: STATES})
    node = producers(graph)[STATES]
    node.output[:] = [fresh("unused", known) if name == STATES else name for name in node.output]
    replace_all(graph.value_info, [info for info in graph.value_info if info.name != STATES])
    value.name = STATES
    graph.input.append(value)
    keep_needed(first)
    _measure(graph, [value for value in graph.input if value.name not in cut.only])


def _measure(graph: GraphProto, own: list[ValueInfoProto]) -> None:
    """Let sizes be taken from the inputs that a graph keeps: a trace takes the batch from whichever it likes.

    Raises:
        DoesNotFit: a size of another input is needed, and no input has one under the same name.
    """
    names = {value.name for value in own}
    declarations = {value.name: value for value in graph.input if value.name not in names}
    for node in graph.node:
        if node.op_type != "Shape" or node.input[0] not in declarations:
            continue
        dims = declarations[node.input[0]].type.tensor_type.shape.dim
        start, end = (next((a.i for a in node.attribute if a.name == key), None) for key in ("start", "end"))
        axes = range(len(dims))[start:end]
        place = next((p for p in _places(own, dims[axes[0]].dim_param)), None) if len(axes) == 1 else None
        if place is None:
            raise DoesNotFit(
                f"the node {node.name!r} takes its sizes from {node.input[0]!r}, on the other side of the cut"
            )
        del node.attribute[:]
        node.input[0] = place[0]
        node.attribute.add(name="start", type=AttributeProto.INT, i=place[1])
        node.attribute.add(name="end", type=AttributeProto.INT, i=place[1] + 1)


def _places(own: list[ValueInfoProto], symbol: str) -> Iterator[tuple[str, int]]:
    """The inputs and axes that have a size of that name."""
    for value in own if symbol else ():
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param == symbol:
                yield value.name, axis


def _declaration(graph: GraphProto, name: str) -> ValueInfoProto:
    """What the graph declares of a value; a tensor of floats where it says nothing."""
    found = ValueInfoProto()
    known = next((v for v in (*graph.output, *graph.value_info) if v.name == name), None)
    if known is not None and declared(known).shape is not None:
        found.CopyFrom(known)
        return found
    alike = [
        v
        for v in graph.output
        for n in graph.node
        if v.name in n.output and n.op_type == "Identity" and n.input[0] == name
    ]
    if alike:
        found.CopyFrom(alike[0])
    else:
        found.type.tensor_type.elem_type = TensorProto.FLOAT
        for axis in ("batch_size", "encoder_sequence_length", "hidden_size"):
            found.type.tensor_type.shape.dim.add(dim_param=axis)
    found.name = name
    return found


def _name_encoder_axes(graph: GraphProto) -> None:
    """Name the batch, and the length where what goes in and what comes out have one name for it."""
    result = next(value for value in graph.output if value.name == RESULT)
    lengths = {dim.dim_param for dim in list(result.type.tensor_type.shape.dim)[1:2] if dim.dim_param}
    axes: dict[str, tuple[str, ...]] = {RESULT: ("batch", "encoder", "hidden")}
    for value in graph.input:
        dims = list(value.type.tensor_type.shape.dim)
        axes[value.name] = ("batch", *("encoder" if dim.dim_param in lengths else "fixed" for dim in dims[1:]))
    name_axes(graph, axes, {"batch": "batch_size", "encoder": "encoder_sequence_length"})  # type: ignore[arg-type]
