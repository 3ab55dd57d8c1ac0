"""The types of the values of a model, as far as they can be told, without its weights."""

import onnx
from onnx import helper, shape_inference

from kvdoctor.graph import bodies_of

Types = dict[tuple[int, str], onnx.TypeProto]
"""By the identity of the graph and the name; under 0 the values of the main graph, which its bodies see."""
MOST_BYTES = 1024
"""A constant of more bytes is no shape."""


def value_types(model: onnx.ModelProto) -> Types:
    """The types of all values. Where the inference gives up, those that are declared."""
    bare = onnx.ModelProto(ir_version=model.ir_version)
    bare.opset_import.extend(model.opset_import)
    bare.functions.extend(model.functions)
    bare.graph.CopyFrom(_without_weights(model.graph))
    try:
        inferred = shape_inference.infer_shapes(bare, data_prop=False)
    except Exception:  # an operator that onnx cannot infer: what the file declares must do
        inferred = bare
    types: Types = {}
    _collect(model.graph, inferred.graph, types, outermost=True)
    return types


def _collect(graph: onnx.GraphProto, known: onnx.GraphProto, types: Types, outermost: bool = False) -> None:
    """Note the types of a graph and its bodies; `known` is the same graph with inferred types."""
    found = {value.name: value.type for value in (*known.input, *known.output, *known.value_info)}
    for tensor in known.initializer:
        found.setdefault(tensor.name, helper.make_tensor_type_proto(tensor.data_type, tensor.dims))
    for name, kind in found.items():
        if kind.WhichOneof("value") is not None:
            types[id(graph), name] = kind
            if outermost:
                types[0, name] = kind
    for mine, theirs in zip(graph.node, known.node, strict=True):
        for attribute, other in zip(mine.attribute, theirs.attribute, strict=True):
            for body, inner in zip(bodies_of(attribute), bodies_of(other), strict=True):
                _collect(body, inner, types)


def _without_weights(graph: onnx.GraphProto) -> onnx.GraphProto:
    """A copy in which inputs stand for the large initializers, and large constants have lost their values."""
    bare = onnx.GraphProto(name=graph.name)
    bare.input.extend(graph.input)
    bare.output.extend(graph.output)
    bare.value_info.extend(graph.value_info)
    for tensor in graph.initializer:
        if tensor.ByteSize() <= MOST_BYTES and tensor.data_location != onnx.TensorProto.EXTERNAL:
            bare.initializer.append(tensor)
        else:
            bare.value_info.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    for node in graph.node:
        copy = bare.node.add()
        copy.op_type, copy.domain, copy.name = node.op_type, node.domain, node.name
        copy.input.extend(node.input)
        copy.output.extend(node.output)
        for attribute in node.attribute:
            _add_attribute(copy, attribute)
    return bare


def _add_attribute(node: onnx.NodeProto, attribute: onnx.AttributeProto) -> None:
    mine = node.attribute.add()
    if attribute.HasField("g"):
        mine.name, mine.type = attribute.name, attribute.type
        mine.g.CopyFrom(_without_weights(attribute.g))
    elif attribute.HasField("t") and attribute.t.ByteSize() > MOST_BYTES:
        mine.name, mine.type = attribute.name, attribute.type
        mine.t.data_type = attribute.t.data_type
        mine.t.dims.extend(attribute.t.dims)
    else:
        mine.CopyFrom(attribute)
