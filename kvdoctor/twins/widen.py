"""float16 and bfloat16 to float32: types, constants, Cast targets, subgraphs and functions.

Large weights stay as they are stored, under another name, and a Cast gives them back under theirs: the runtime folds it
when it opens the file. Small ones, such as those of shapes and scales, are widened in their place.
"""

import struct
from typing import Any

from kvdoctor.onnx_schema import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.scoping import graphs
from kvdoctor.twins.names import FLOAT, Names, NoTwin, bodies, cast

HALF, BRAIN = int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)
NARROW = {HALF, BRAIN}
SMALL = 64
"""Elements up to which a constant is widened in its place."""

TYPE_ATTRIBUTES = {"to", "dtype", "output_dtype", "output_datatype", "softmax_precision", "stash_type", "qk_dtype"}
"""Attributes that name an element type. Sources: the operator schemas of ONNX and of ONNX Runtime."""

BITS = {"BitCast"}
"""Operators that read the bits of a number: their meaning hangs on its width."""


def apply(model: ModelProto) -> None:
    """Change a model in place.

    Raises:
        NoTwin: it holds a 16-bit number whose bits are read, or that lies outside the file where it cannot be cast.
    """
    names = Names(model)
    for graph in graphs(model.graph):
        for value in (*graph.input, *graph.output, *graph.value_info):
            _widen_type(value.type)
        _widen_initializers(graph, names)
    referred = _referred(model)
    for function in model.functions:
        for value in getattr(function, "value_info", ()):
            _widen_type(value.type)
        for attribute in function.attribute_proto:
            _widen_attribute(attribute, attribute.name in referred)
    for nodes in bodies(model):
        for node in nodes:
            _widen_node(node, referred)


def _widen_type(kind: Any) -> None:
    """Tensors, and whatever holds them: sequences, optionals, maps."""
    for field, value in kind.ListFields():
        if field.name in ("tensor_type", "sparse_tensor_type"):
            value.elem_type = _wide(value.elem_type)
        elif field.name in ("sequence_type", "optional_type"):
            _widen_type(value.elem_type)
        elif field.name == "map_type":
            _widen_type(value.value_type)


def _widen_initializers(graph: GraphProto, names: Names) -> None:
    inputs = {value.name for value in graph.input}
    for sparse in graph.sparse_initializer:
        _widen_tensor(sparse.values)
    casts = []
    for tensor in graph.initializer:
        if tensor.data_type not in NARROW:
            continue
        outside = tensor.data_location == TensorProto.EXTERNAL
        if tensor.name in inputs or (not outside and _count(tensor) <= SMALL):
            _widen_tensor(tensor)
        else:
            stored = names.fresh(tensor.name)
            casts.append(cast(stored, tensor.name))
            tensor.name = stored
    _put_first(graph.node, casts)


def _put_first(nodes: Any, first: list[NodeProto]) -> None:
    if first:
        rest = list(nodes)
        del nodes[:]
        nodes.extend([*first, *rest])


def _widen_node(node: NodeProto, referred: set[str]) -> None:
    if node.op_type in BITS:
        raise NoTwin(f"the operator {node.op_type} reads the bits of numbers")
    for attribute in node.attribute:
        _widen_attribute(attribute, attribute.name in TYPE_ATTRIBUTES or attribute.name in referred)


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


def _referred(model: ModelProto) -> set[str]:
    """Names under which the callers of functions give an element type on."""
    found: set[str] = set()
    while True:
        attributes = (a for nodes in bodies(model) for node in nodes for a in node.attribute if a.ref_attr_name)
        more = {a.ref_attr_name for a in attributes if a.name in TYPE_ATTRIBUTES | found} - found
        if not more:
            return found
        found |= more


def _widen_tensor(tensor: TensorProto) -> None:
    """Turn the values of a tensor into float32, wherever in the message they stand."""
    if tensor.data_type not in NARROW:
        return
    if tensor.data_location == TensorProto.EXTERNAL:
        raise NoTwin(f"the value of {tensor.name!r} lies outside the file, where it cannot be cast")
    half, count = tensor.data_type == HALF, _count(tensor)
    stored = tensor.raw_data or struct.pack(f"<{len(tensor.int32_data)}H", *(n & 0xFFFF for n in tensor.int32_data))
    if len(stored) != 2 * count:
        raise NoTwin(f"the tensor {tensor.name!r} holds {len(stored)} bytes, its dims need {2 * count}")
    tensor.ClearField("int32_data")
    tensor.raw_data = _floats(stored, half)
    tensor.data_type = FLOAT


def _floats(stored: bytes, half: bool) -> bytes:
    """float16 or bfloat16 as float32, little endian."""
    import numpy as np  # only where there is something to widen: an inspection loads none

    if half:
        return np.frombuffer(stored, "<f2").astype("<f4").tobytes()
    return (np.frombuffer(stored, "<u2").astype("<u4") << 16).tobytes()


def _count(tensor: TensorProto) -> int:
    count = 1
    for dim in tensor.dims:
        count *= dim
    return count


def _wide(kind: int) -> int:
    return FLOAT if kind in NARROW else kind
