"""Operators by what they do with the content of an input: keep, overwrite, combine, multiply or measure it."""

from collections.abc import Iterator

from kvdoctor.model.cache_operators import ports_of
from kvdoctor.model.flatten import FlatNode

KEEPS = {
    "Identity": (0,),
    "Cast": (0,),
    "CastLike": (0,),
    "Transpose": (0,),
    "Reshape": (0,),
    "Squeeze": (0,),
    "Unsqueeze": (0,),
    "Flatten": (0,),
    "Expand": (0,),
    "Tile": (0,),
    "Slice": (0,),
    "Gather": (0,),
    "GatherND": (0,),
    "GatherElements": (0,),
    "Split": (0,),
    "Compress": (0,),
    "QuantizeLinear": (0,),
    "DequantizeLinear": (0,),
    "DynamicQuantizeLinear": (0,),
}
"""Operators whose output holds the content of an input, by the indices of such inputs."""

PASSES_OUT = {"Identity", "Cast", "Transpose", "Reshape", "Squeeze", "Unsqueeze"}
"""Casts and views that may stand between a computed state and the output that returns it."""

WRITES = {"ScatterND": (0,), "ScatterElements": (0,), "Scatter": (0,), "Where": (1, 2)}
"""Operators that write new entries into a buffer, by the indices of inputs that may be the buffer."""

MIXES = {
    "Add",
    "Sub",
    "Mul",
    "Div",
    "Neg",
    "Pow",
    "Sqrt",
    "Reciprocal",
    "Where",
    "Concat",
    "Pad",
    "Clip",
    "Max",
    "Min",
    "Tanh",
    "ReduceMean",
    "LayerNormalization",
    "SimplifiedLayerNormalization",
    "RMSNormalization",
    "RotaryEmbedding",
    "ScatterND",
    "ScatterElements",
    "TensorScatter",
    "MaskedFill",
}
"""Operators between a past and its attention (rotation, scaling, normalization), or between scores and the Softmax."""

PRODUCTS = {
    "MatMul": (0, 1),
    "FusedMatMul": (0, 1),
    "TransposeMatMul": (0, 1),
    "Gemm": (0, 1),
    "MatMulInteger": (0, 1),
    "MatMulIntegerToFloat": (0, 1),
    "QLinearMatMul": (0, 3),
    "DynamicQuantizeMatMul": (0, 1),
    "MatMulNBits": (0,),
    "Einsum": (0, 1, 2, 3),
}
"""Matrix products, by the indices of their operands."""

BLENDS = PASSES_OUT | {"Add", "Sub", "Mul", "Div", "Max", "Min", "Where"}
"""Operators between a state that is kept in part and its next value: the cell of an LSTM, a state space."""

COMPUTES = {"Add", "Sub", "Mul", "Div", "Neg", "Abs", "Min", "Max", "Clip", "Round", "Floor", "Ceil", "Sign", "Relu"}
"""Operators that compute each number of their output from one number of the input: they keep its shape."""

COUNTS_ON = {"Identity", "Cast", "Squeeze", "Unsqueeze", "Reshape", "Add"}
"""Operators between a counter and the output that returns it, increased by the number of new tokens."""

TRIMS = {"Slice", "Gather", "Split", "GatherND"}
"""Operators that cut entries off."""

SOFTMAX = {"Softmax", "BiasSoftmax", "LogSoftmax"}
CONVOLUTIONS = {"Conv", "ConvInteger", "QLinearConv", "NhwcConv", "FusedConv"}
SHAPES = {"Shape", "Size", "ConstantOfShape", "Range"}

LOOPS = {"Loop", "Scan"}
"""Operators whose body a flow has once; behind their own inputs are the values that their outputs return."""


def is_past(node: FlatNode, index: int) -> bool:
    """Whether an input of a node is the past of an operator that holds a cache."""
    ports = ports_of(node.domain, node.op)
    return ports is not None and index in ports.pasts


def views_of(node: FlatNode, index: int) -> tuple[str, ...]:
    """The outputs of a node that are views of an input, or hold it in parts."""
    if node.op in LOOPS:
        behind = index - len(node.proto.input)
        return node.outputs[behind : behind + 1] if behind >= 0 else ()
    return node.outputs if index in KEEPS.get(node.op, ()) else ()


def viewed_by(node: FlatNode, output: str) -> str:
    """The input of a node that an output is a view of; empty where there is none."""
    if node.op in LOOPS:
        return node.input(len(node.proto.input) + node.outputs.index(output))
    return node.input(0) if node.op in KEEPS else ""


def outputs_with_content(node: FlatNode, index: int) -> Iterator[tuple[str, bool]]:
    """The outputs of a node that hold the content of an input, each with whether new entries joined it there."""
    ports = ports_of(node.domain, node.op)
    if ports is not None and index in ports.pasts:
        out = ports.pasts[index][1]
        if out < len(node.outputs):
            yield node.outputs[out], True
    elif index in KEEPS.get(node.op, ()):
        for output in node.outputs:
            yield output, False
    elif node.op == "Identity":
        yield node.output(), False
    elif node.op in LOOPS:
        yield from ((output, False) for output in views_of(node, index))
    elif (node.op == "Concat" or index in WRITES.get(node.op, ())) and node.outputs:
        # A Concat of one input adds nothing: exporters leave it where they stacked a list of one.
        yield node.outputs[0], len(node.inputs) > 1
