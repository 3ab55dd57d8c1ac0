"""Static quantisation without its rounding: QuantizeLinear and DequantizeLinear on an activation become a clip.

What is cut off at the ends of the scale belongs to the mathematics of the graph and stays; what is rounded goes.
"""

from collections.abc import Iterator

from kvdoctor.exactness import activations_rounded
from kvdoctor.graph import GraphView, Scope
from kvdoctor.onnx_schema import ModelProto, NodeProto, TensorProto
from kvdoctor.scoping import graphs
from kvdoctor.twins.names import FLOAT, Names, bodies, cast, scalar

RANGES: dict[int, tuple[int, int]] = {
    int(TensorProto.UINT8): (0, 255),
    int(TensorProto.INT8): (-128, 127),
    int(TensorProto.UINT16): (0, 65535),
    int(TensorProto.INT16): (-32768, 32767),
}
"""The ends of the integer types that activations are quantised to."""


def apply(model: ModelProto) -> None:
    """Change a model in place: every pair whose scale and zero point are one constant number each."""
    chosen = _pairs(model)
    if not chosen:
        return
    names = Names(model)
    for nodes in bodies(model):
        changed: list[NodeProto] = []
        for node in nodes:
            if node.op_type == "QuantizeLinear" and node.output[0] in chosen:
                changed += _clipped(node, chosen[node.output[0]], names)
            elif node.op_type == "DequantizeLinear" and node.input[0] in chosen:
                changed.append(NodeProto(op_type="Identity", input=[node.input[0]], output=list(node.output)))
            else:
                changed.append(node)
        del nodes[:]
        nodes.extend(changed)
    for graph in graphs(model.graph):
        del graph.value_info[:]  # they may speak of integers


def _pairs(model: ModelProto) -> dict[str, int]:
    """The values that are quantised and straight dequantised by the same scale, with their integer type."""
    kinds: dict[str, int | None] = {}
    for scope, node in activations_rounded(GraphView(model)):
        name, kind = node.output[0], _kind(scope, node)
        # The branches of an `If` may give one name to two values.
        kinds[name] = kind if kinds.get(name, kind) == kind else None
    for graph in graphs(model.graph):
        for value in graph.output:
            kinds.pop(value.name, None)
    scales = {node.output[0]: list(node.input[1:3]) for node in _nodes(model) if node.op_type == "QuantizeLinear"}
    for node in _nodes(model):
        for name in kinds.keys() & set(node.input):
            if node.op_type != "DequantizeLinear" or list(node.input) != [name, *scales[name]]:
                kinds[name] = None
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _nodes(model: ModelProto) -> Iterator[NodeProto]:
    for nodes in bodies(model):
        yield from nodes


def _kind(scope: Scope, node: NodeProto) -> int | None:
    """The integer type of a QuantizeLinear with one scale for all; None where it has several, or computes them."""
    constants = [scope.constant(name) for name in node.input[1:3]]
    if len(constants) < 2:
        return None
    scale, zero = constants
    if scale is None or zero is None or zero.data_type not in RANGES or any(dim != 1 for dim in scale.dims):
        return None
    return int(zero.data_type)


def _clipped(node: NodeProto, kind: int, names: Names) -> Iterator[NodeProto]:
    """The real number, no less and no more than the scale can hold."""
    value, scale, zero = node.input
    shift = names.fresh(zero)
    yield cast(zero, shift)
    for operator, end in zip(("Max", "Min"), RANGES[kind], strict=True):
        whole, above, number = (names.fresh(zero) for _ in range(3))
        yield scalar(whole, FLOAT, end)
        yield NodeProto(op_type="Sub", input=[whole, shift], output=[above])
        yield NodeProto(op_type="Mul", input=[above, scale], output=[number])
        bounded = node.output[0] if operator == "Min" else names.fresh(value)
        yield NodeProto(op_type=operator, input=[value, number], output=[bounded])
        value = bounded
