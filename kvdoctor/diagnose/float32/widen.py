"""float16 and bfloat16 to float32: types, constants, Cast targets, subgraphs and functions.

Large weights stay as they are stored, under another name, and a Cast restores the old one: the runtime folds it when it
opens the file. Small ones, such as those of shapes and scales, are widened in place.
"""

import math
import struct
from typing import Any

from kvdoctor.errors import CannotCheck
from kvdoctor.model.edit import fresh_name, replace_all
from kvdoctor.model.operators import has
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import graphs_in, names_in, node_lists

FLOAT = int(TensorProto.FLOAT)
HALF, BRAIN = int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)
NARROW = {HALF, BRAIN}
SMALL = 64
"""Elements up to which a constant is widened in place."""
TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "output_datatype", "softmax_precision", "stash_type", "qk_dtype"}
"""Attributes that name an element type. Sources: the operator schemas of ONNX and of ONNX Runtime."""


def unrounded_name(name: str, known: set[str]) -> str:
    """A fresh name for the unrounded counterpart of a value; it is added to the known ones."""
    return fresh_name(f"{name}_unrounded", known)


def cast(source: str, target: str) -> NodeProto:
    """A Cast to float32."""
    attribute = AttributeProto(name="to", type=AttributeProto.INT, i=FLOAT)
    return NodeProto(op_type="Cast", input=[source], output=[target], attribute=[attribute])


def widen(model: ModelProto) -> None:
    """Change a model in place; raises `CannotCheck` where bits are read, or a 16-bit value outside cannot be cast."""
    known = names_in(model)
    for graph in graphs_in(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _widen_type(value.type)
        _widen_initializers(graph, known)
    parameters = _type_parameters(model)
    for function in model.functions:
        for value in getattr(function, "value_info", ()):
            _widen_type(value.type)
        for attribute in function.attribute_proto:
            _widen_attribute(attribute, attribute.name in parameters)
    for node in (node for nodes in node_lists(model) for node in nodes):
        if has(node.op_type, "reinterpret"):  # its meaning depends on the width of a number
            raise CannotCheck(f"the operator {node.op_type} reads the bits of numbers")
        for attribute in node.attribute:
            _widen_attribute(attribute, attribute.name in TYPE_ATTRIBUTES or attribute.name in parameters)


def _widen_type(kind: Any) -> None:
    """Tensors, and whatever holds them: sequences, optionals, maps."""
    for field, value in kind.ListFields():
        if field.name in ("tensor_type", "sparse_tensor_type"):
            value.elem_type = _wide(value.elem_type)
        elif field.name in ("sequence_type", "optional_type"):
            _widen_type(value.elem_type)
        elif field.name == "map_type":
            _widen_type(value.value_type)


def _widen_initializers(graph: GraphProto, known: set[str]) -> None:
    inputs = {value.name for value in graph.input}
    for sparse in graph.sparse_initializer:
        _widen_tensor(sparse.values)
    casts = []
    for tensor in graph.initializer:
        if tensor.data_type not in NARROW:
            continue
        outside = tensor.data_location == TensorProto.EXTERNAL
        if tensor.name in inputs or (not outside and math.prod(tensor.dims) <= SMALL):
            _widen_tensor(tensor)
        else:
            stored = unrounded_name(tensor.name, known)
            casts.append(cast(stored, tensor.name))
            tensor.name = stored
    if casts:
        replace_all(graph.node, [*casts, *graph.node])


def _widen_attribute(attribute: AttributeProto, names_type: bool) -> None:
    if names_type and attribute.type == AttributeProto.INT:
        attribute.i = _wide(attribute.i)
    if attribute.HasField("t"):
        _widen_tensor(attribute.t)
    for tensor in attribute.tensors:
        _widen_tensor(tensor)
    if attribute.HasField("sparse_tensor"):
        _widen_tensor(attribute.sparse_tensor.values)
    if attribute.HasField("tp"):
        _widen_type(attribute.tp)


def _type_parameters(model: ModelProto) -> set[str]:
    """Names of function attributes that pass on an element type."""
    found: set[str] = set()
    while True:
        attributes = (a for nodes in node_lists(model) for node in nodes for a in node.attribute if a.ref_attr_name)
        more = {a.ref_attr_name for a in attributes if a.name in TYPE_ATTRIBUTES | found} - found
        if not more:
            return found
        found |= more


def _widen_tensor(tensor: TensorProto) -> None:
    """Turn the values of a tensor into float32, wherever in the message they stand."""
    if tensor.data_type not in NARROW:
        return
    if tensor.data_location == TensorProto.EXTERNAL:
        raise CannotCheck(f"the value of {tensor.name!r} is stored outside the file, where it cannot be cast")
    import numpy as np  # only where there is something to widen: an inspection loads none

    half, count = tensor.data_type == HALF, math.prod(tensor.dims)
    stored = tensor.raw_data or struct.pack(f"<{len(tensor.int32_data)}H", *(n & 0xFFFF for n in tensor.int32_data))
    if len(stored) != 2 * count:
        raise CannotCheck(f"the tensor {tensor.name!r} holds {len(stored)} bytes, its dims need {2 * count}")
    tensor.ClearField("int32_data")
    whole = np.frombuffer(stored, "<f2").astype("<f4") if half else np.frombuffer(stored, "<u2").astype("<u4") << 16
    tensor.raw_data = whole.tobytes()
    tensor.data_type = FLOAT


def _wide(kind: int) -> int:
    return FLOAT if kind in NARROW else kind
