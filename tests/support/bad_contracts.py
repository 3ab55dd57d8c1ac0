"""Decoders whose contract is bad, or looks so: healthy models of fixtures/text with one thing changed.

What reads well as text stands in fixtures/text/bad-*.onnxtxt; here is what text cannot say, or says at length.
"""

from collections.abc import Callable
from functools import cache

import numpy as np
import onnx
from onnx import GraphProto, ModelProto, SparseTensorProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from support.bad_models import renamed
from support.text_fixtures import FOLDER, compile_text, read

Change = Callable[[GraphProto], object]
Edit = tuple[str, str]
Dims = list[int | str | None]

node = helper.make_node
PARTS = ("key", "value")
TOKENS: Dims = ["batch_size", "sequence_length"]
CACHE: Dims = ["batch_size", 2, "past_sequence_length", 4]


@cache
def text(fixture: str, file: str) -> str:
    """The ONNX text of one file of a fixture."""
    return read(FOLDER / f"{fixture}.onnxtxt").files[file]


def edited(fixture: str, *edits: Edit) -> ModelProto:
    """A healthy model after changes to its text, each of which must find something to change."""
    content = text(fixture, "model.onnx")
    for old, new in edits:
        assert old in content, old
        content = content.replace(old, new)
    return compile_text(content)


def decoder(*edits: Edit) -> ModelProto:
    """The decoder of two layers, named as Optimum names it, after changes to its text."""
    return edited("decoder-only-healthy", *edits)


def changed(*changes: Change, fixture: str = "decoder-only-healthy") -> ModelProto:
    """A healthy model after changes to its graph."""
    model = edited(fixture)
    for change in changes:
        change(model.graph)
    return model


def value(name: str, shape: Dims | None, kind: int = TensorProto.FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


# --- names that promise one layout, and a dataflow that is another ---


def grown(layer: int, part: str) -> str:
    """The line of the text in which new entries join a past."""
    return f'"present.{layer}.{part}" = Concat <axis = 2> ("past_key_values.{layer}.{part}", {part[0]}{layer})'


def passed_on(*layers: int) -> list[Edit]:
    """Pasts come back as they went in, and the attention looks at the new entries alone."""
    edits = []
    for layer, part in ((layer, part) for layer in layers for part in PARTS):
        new, same = f"new_{part}{layer} = Identity ({part[0]}{layer})", f'Identity ("past_key_values.{layer}.{part}")'
        edits.append((f', "present.{layer}.{part}")', f", new_{part}{layer})"))
        edits.append((grown(layer, part), f'{new}\n  "present.{layer}.{part}" = {same}'))
    return edits


def attended_as_it_is(layer: int) -> list[Edit]:
    """The attention looks at the past alone, which comes back as it went in: what a cross-attention does."""
    return [
        (grown(layer, part), f'"present.{layer}.{part}" = Identity ("past_key_values.{layer}.{part}")')
        for part in PARTS
    ]


def named_layer(layer: int, past: str, present: str) -> list[Edit]:
    """Other names for the slots of one layer, with PART for the part."""
    return [
        edit
        for part in PARTS
        for edit in (
            (f'"past_key_values.{layer}.{part}"', f'"{past.replace("PART", part)}"'),
            (f'"present.{layer}.{part}"', f'"{present.replace("PART", part)}"'),
        )
    ]


def numbered(*layers: int) -> list[Edit]:
    """Other numbers for the layers; what is renamed first must not be renamed again."""
    edits = []
    for old, new in reversed(list(enumerate(layers))):
        edits += named_layer(old, f"past_key_values.{new}.PART", f"present.{new}.PART")
    return edits


# --- slots that are not there ---


def without(*names: str) -> Change:
    """Take inputs and outputs away; their values stay, if a node makes them."""

    def change(graph: GraphProto) -> None:
        for side in (graph.input, graph.output):
            kept = [port for port in side if port.name not in names]
            del side[:]
            side.extend(kept)

    return change


def one_for_both(kept: str, other: str) -> ModelProto:
    """A decoder whose second layer uses one slot as key and as value."""
    model = decoder((grown(1, other), f'"present.1.{other}" = Identity ("present.1.{kept}")'))
    without(f"past_key_values.1.{other}", f"present.1.{other}")(model.graph)
    if kept == "value":
        reversed_nodes(model.graph)  # the nodes need no order, and the copy comes before what it copies
    return model


# --- ports ---


def with_inputs(*ports: ValueInfoProto) -> Change:
    return lambda graph: graph.input.extend(ports)


def with_output(port: ValueInfoProto, *nodes: onnx.NodeProto) -> Change:
    def change(graph: GraphProto) -> None:
        graph.node.extend(nodes)
        graph.output.append(port)

    return change


def sized(axis: int, size: int, *names: str) -> Change:
    """A number for one axis of the named inputs and outputs; without names of all pasts."""

    def change(graph: GraphProto) -> None:
        for port in (*graph.input, *graph.output):
            if port.name in names or (not names and port.name.startswith("past_key_values")):
                port.type.tensor_type.shape.dim[axis].dim_value = size

    return change


def ranked(name: str, rank: int) -> Change:
    """An input of another rank."""

    def change(graph: GraphProto) -> None:
        shape = next(port for port in graph.input if port.name == name).type.tensor_type.shape
        del shape.dim[rank:]
        while len(shape.dim) < rank:
            shape.dim.add(dim_param="more")

    return change


def without_type(side: str, *names: str) -> Change:
    """Take the type from the inputs or outputs of these names, or from all."""

    def change(graph: GraphProto) -> None:
        for port in getattr(graph, side):
            if port.name in names or not names:
                port.ClearField("type")

    return change


def without_shape(side: str, *names: str) -> Change:
    """Take the shape from the inputs or outputs of these names, or from all."""

    def change(graph: GraphProto) -> None:
        for port in getattr(graph, side):
            if port.name in names or not names:
                port.type.tensor_type.ClearField("shape")

    return change


def retyped(name: str, wrap: Callable[[TypeProto], TypeProto]) -> Change:
    """Another type around that of one input."""

    def change(graph: GraphProto) -> None:
        port = next(port for port in graph.input if port.name == name)
        inner = TypeProto()
        inner.CopyFrom(port.type)
        port.type.CopyFrom(wrap(inner))

    return change


def as_map(kind: TypeProto) -> TypeProto:
    return helper.make_map_type_proto(TensorProto.INT64, kind)


as_sequence, as_optional = helper.make_sequence_type_proto, helper.make_optional_type_proto


def emptied(*sides: str) -> Change:
    """Take all nodes, inputs or outputs away."""

    def change(graph: GraphProto) -> None:
        for side in sides:
            graph.ClearField(side)

    return change


def twice(side: str, name: str) -> Change:
    """An input or output that is declared twice."""

    def change(graph: GraphProto) -> None:
        ports = getattr(graph, side)
        ports.append(next(port for port in ports if port.name == name))

    return change


def returned_directly(graph: GraphProto) -> None:
    """A second layer whose presents are its pasts themselves: outputs that are inputs."""
    for port in graph.output:
        port.name = port.name.replace("present.1", "past_key_values.1")


def named_axes(name: str) -> Change:
    """One name for every axis that has one."""

    def change(graph: GraphProto) -> None:
        for port in (*graph.input, *graph.output):
            for dim in port.type.tensor_type.shape.dim:
                if dim.dim_param:
                    dim.dim_param = name

    return change


# --- many ---


def many_inputs(count: int, name: str, shape: Dims, kind: int = TensorProto.FLOAT) -> Change:
    """Inputs that nothing uses; NUMBER in the name is their number."""
    return with_inputs(*(value(name.replace("NUMBER", str(number)), shape, kind) for number in range(2, count)))


def many_layers(count: int) -> ModelProto:
    """A decoder of so many layers, of which only the first two have a part in the logits."""
    model = decoder()
    for layer in range(2, count):
        past, present = ([f"{side}.{layer}.{part}" for part in PARTS] for side in ("past_key_values", "present"))
        for one, other, new in zip(past, present, ("k1", "v1"), strict=True):
            model.graph.input.append(value(one, CACHE))
            model.graph.output.append(value(other, ["batch_size", 2, "past_sequence_length + sequence_length", 4]))
            model.graph.node.append(node("Concat", [one, new], [other], axis=2))
        scores, shares = f"scores.{layer}", f"shares.{layer}"
        model.graph.node.extend(
            [
                node("Einsum", ["q1", present[0]], [scores], equation="bnqd,bnkd->bnqk"),
                node("Softmax", [scores], [shares]),
                node("MatMul", [shares, present[1]], [f"mixed.{layer}"]),
            ]
        )
    return model


def one_chain(count: int, length: int, name: str) -> Change:
    """Inputs that meet in one Concat, behind which stands a long chain."""

    def change(graph: GraphProto) -> None:
        names = [name.replace("NUMBER", str(number)) for number in range(count)]
        graph.input.extend(value(one, CACHE) for one in names)
        graph.node.append(node("Concat", names, ["link.0"], axis=2))
        graph.node.extend(node("Identity", [f"link.{at}"], [f"link.{at + 1}"]) for at in range(length))

    return change


# --- functions ---


def chained(depth: int, calls: int = 1) -> ModelProto:
    """Local functions of which each calls the next, `calls` times: so many to the power of `depth` nodes in the end."""
    model = decoder(("logits = MatMul (x2, w_logits)", "raw = MatMul (x2, w_logits)"))
    model.graph.node.append(node("f0", ["raw"], ["logits"], domain="local"))
    opsets = [helper.make_opsetid("local", 1), helper.make_opsetid("", 17)]
    for level in range(depth):
        name, domain = (f"f{level + 1}", "local") if level + 1 < depth else ("Identity", "")
        values = ["x", *(f"t{call}" for call in range(1, calls)), "y"]
        body = [node(name, [values[at]], [values[at + 1]], domain=domain) for at in range(calls)]
        model.functions.append(helper.make_function("local", f"f{level}", ["x"], ["y"], body, opsets))
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model


# --- nodes ---


def reversed_nodes(graph: GraphProto) -> None:
    nodes = list(reversed(graph.node))
    del graph.node[:]
    graph.node.extend(nodes)


def made_twice(graph: GraphProto) -> None:
    """Two nodes that make the logits."""
    graph.node.append(node("Identity", ["x2"], ["logits"]))


def kept_inside(graph: GraphProto) -> None:
    """Caches that an export made constants of: no past enters, and no present leaves."""
    for port in [port for port in graph.input if port.name.startswith("past_key_values")]:
        graph.input.remove(port)
        graph.initializer.append(helper.make_tensor(port.name, TensorProto.FLOAT, [1, 2, 1, 4], [0.5] * 8))
    del graph.output[1:]


def cut_short(op: str, inputs: int | None = None, outputs: int | None = None) -> Change:
    """The last node of an operator keeps so many of its inputs and outputs."""

    def change(graph: GraphProto) -> None:
        *_, last = (each for each in graph.node if each.op_type == op)
        last.input[:], last.output[:] = last.input[:inputs], last.output[:outputs]

    return change


# --- sparse initializers ---


def sparse(name: str) -> Change:
    """A sparse initializer with the elements of the dense one of that name; or a value for an input: a past."""

    def change(graph: GraphProto) -> None:
        dense = next((tensor for tensor in graph.initializer if tensor.name == name), None)
        array = numpy_helper.to_array(dense) if dense is not None else np.ones((1, 2, 3, 4), np.float32)
        if dense is not None:
            graph.initializer.remove(dense)
        values = helper.make_tensor(name, TensorProto.FLOAT, [array.size], array.ravel())
        places = helper.make_tensor("", TensorProto.INT64, [array.size], range(array.size))
        graph.sparse_initializer.append(SparseTensorProto(values=values, indices=places, dims=array.shape))

    return change


def unnamed(model: ModelProto, *kept: str) -> ModelProto:
    """Call all inputs and outputs by numbers, but for some."""
    ports = [port.name for port in (*model.graph.input, *model.graph.output)]
    return renamed(model, {name: f"t{number}" for number, name in enumerate(ports) if name not in kept})
