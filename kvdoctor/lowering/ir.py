"""The oldest IR version that has a form for everything a model holds.

Source: the history of IR versions in onnx.proto. Metadata of nodes and graphs (IR 10) is no reason: a reader that does
not know it passes over it, and nothing is computed from it.
"""

from collections.abc import Iterator

from kvdoctor.graph import GraphView, bodies_of
from kvdoctor.onnx_schema import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, ValueInfoProto

OLDEST = 4
"""Before it an initializer had to be a graph input, which is another contract with the caller."""

SINCE = {
    9: ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"),
    10: ("UINT4", "INT4"),
    11: ("FLOAT4E2M1",),
    12: ("FLOAT8E8M0",),
    13: ("UINT2", "INT2"),
    14: ("FLOAT6E2M3", "FLOAT6E3M2"),
}
TYPES = dict(TensorProto.DataType.items())
NEEDS = {TYPES[name]: (version, name) for version, names in SINCE.items() for name in names if name in TYPES}

Need = tuple[int, str]


def floor(model: ModelProto) -> Need:
    """The oldest IR version, and what needs it."""
    needs = [(OLDEST, "a weight that is no input"), *_of_model(model)]
    return max(needs, key=lambda need: need[0])


def _of_model(model: ModelProto) -> Iterator[Need]:
    for scope in GraphView(model).scopes():
        yield from _of_graph(scope.graph)
    if model.functions:
        yield 8, f"the function {model.functions[0].name}"
    if len(model.training_info):
        yield 7, "its training information"
    for function in model.functions:
        if len(function.attribute_proto):
            yield 9, f"the default of an attribute of function {function.name}"
        if function.overload:
            yield 10, f"the overload {function.overload} of function {function.name}"
        for node in function.node:
            yield from _of_node(node)
    if _has(model, "configuration") and len(model.configuration):
        yield 11, "its configuration of devices"


def _of_graph(graph: GraphProto) -> Iterator[Need]:
    if len(graph.quantization_annotation):
        yield 5, "an annotation of quantisation"
    if len(graph.sparse_initializer):
        yield 6, "a sparse weight"
    for tensor in graph.initializer:
        yield from _of_type(tensor.data_type, f"weight {tensor.name}")
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield from _of_value(value)
    for node in graph.node:
        yield from _of_node(node)


def _of_value(value: ValueInfoProto) -> Iterator[Need]:
    kind = value.type.WhichOneof("value")
    if kind in ("optional_type", "sparse_tensor_type"):
        yield 8, f"{value.name}, which is optional or sparse,"
    if kind == "tensor_type":
        yield from _of_type(value.type.tensor_type.elem_type, value.name)


def _of_node(node: NodeProto) -> Iterator[Need]:
    if _has(node, "overload") and node.overload:
        yield 10, f"node {node.name} calls an overload, which"
    if _has(node, "device_configurations") and len(node.device_configurations):
        yield 11, f"node {node.name} is placed on a device, which"
    for attribute in node.attribute:
        yield from _of_attribute(node, attribute)


def _of_attribute(node: NodeProto, attribute: AttributeProto) -> Iterator[Need]:
    if attribute.HasField("t"):
        yield from _of_type(attribute.t.data_type, f"constant of node {node.name}")
    if attribute.name in ("to", "output_dtype", "dtype"):
        yield from _of_type(attribute.i, f"{node.op_type} {node.name}")
    for body in bodies_of(attribute):
        if body.sparse_initializer:
            yield 6, "a sparse weight"


def _of_type(number: int, who: str) -> Iterator[Need]:
    if number in NEEDS:
        version, name = NEEDS[number]
        yield version, f"{name} ({who})"


def _has(message: ModelProto | NodeProto, field: str) -> bool:
    """Whether the installed onnx knows a field of a message."""
    return field in message.DESCRIPTOR.fields_by_name
