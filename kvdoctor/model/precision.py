"""How exactly a graph computes: how far its arithmetic lets two right computations of the same logits differ."""

import math
import re
from collections.abc import Iterable, Iterator

from kvdoctor.contract import Exactness, Slot
from kvdoctor.model.operators import has, operators_with
from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import find_attribute, input_of
from kvdoctor.model.view import ELEMENT_TYPES, GraphView, Scope

DYNAMIC = operators_with("dynamic")
"""Operators that take the scale of what they round from a whole tensor, and so from other tokens and rows."""

ROUNDING = operators_with("static")
"""Operators that round their result by a scale that the graph holds."""

INT8_LEVEL = 4
"""`accuracy_level` of MatMulNBits from which what is multiplied is rounded to 8 bits as well, row by row."""

ROUNDED = re.compile(r"quantize|QLinear|Integer|NBits|QAttention|QGemm", re.IGNORECASE)
"""Operators that compute with weights rounded to 8 bits or fewer."""

EIGHT_BITS = {"int8", "uint8"}


def exactness_of(views: Iterable[GraphView], slots: Iterable[Slot], without_rounding: bool = False) -> Exactness:
    """The weakest arithmetic of the graphs of a stack, the one that decodes first.

    Weights that are stored in 8 or 4 bits lose nothing by that from one call to the next; what is rounded on its way
    does, and the runtime may do so of itself: ONNX Runtime makes MatMulNBits of accuracy level 4 of a DequantizeLinear
    before a MatMul (session.qdq_matmulnbits_accuracy_level). In a float32 copy (`without_rounding`) it is set
    not to, and weights are widened when the file is opened, whatever they are stored in.
    """
    found = tuple(views)
    kinds = {slot.dtype for slot in slots} | {port.dtype for port in found[0].outputs.values()}
    kinds.add("" if without_rounding else _weight_type(found[0]))
    if any(DYNAMIC & set(view.operators) for view in found):
        return "dynamic-quantization"
    if "bfloat16" in kinds:
        return "bfloat16"
    if any(slot.dtype == "uint8" for slot in slots) and any(slot.part.endswith("-scale") for slot in slots):
        return "int4-cache"
    kept_in_8_bits = any(slot.dtype in EIGHT_BITS for slot in slots)
    if kept_in_8_bits or any(_rounds(view, not without_rounding) for view in found):
        return "static-quantization"
    return "float16" if "float16" in kinds else "float"


def activations_rounded(view: GraphView) -> Iterator[tuple[Scope, NodeProto]]:
    """The QuantizeLinear nodes that round what no constant holds, each with its scope."""
    for scope in view.scopes():
        for node in scope.graph.node:
            if has(node.op_type, "quantize") and node.input and scope.constant(node.input[0]) is None:
                yield scope, node


def _rounds(view: GraphView, fused: bool) -> bool:
    if ROUNDING & set(view.operators) or next(activations_rounded(view), None) is not None:
        return True
    if any(has(node.op_type, "quantize") for function in view.model.functions for node in function.node):
        return True
    nodes = ((scope, node) for scope in view.scopes() for node in scope.graph.node)
    return any(
        (fused and _will_be_fused(scope, node))
        or (node.op_type == "MatMulNBits" and getattr(find_attribute(node, "accuracy_level"), "i", 0) >= INT8_LEVEL)
        for scope, node in nodes
    )


def _will_be_fused(scope: Scope, node: NodeProto) -> bool:
    """Whether a MatMul takes a weight that a DequantizeLinear unpacks, directly or transposed."""
    if not has(node.op_type, "product") or len(node.input) < 2:
        return False
    maker = scope.producers.get(scope.through(node.input[1], operators_with("permute", "copy")))
    if maker is None or not has(maker.op_type, "dequantize"):
        return False
    return scope.constant(input_of(maker, 0)) is not None


def _weight_type(view: GraphView) -> str:
    """The float type that most weights are stored in: a float16 graph may keep float inputs and outputs."""
    sizes: dict[str, int] = {}
    for tensor in view.model.graph.initializer:
        kind = ELEMENT_TYPES.get(tensor.data_type, "")
        if "float" in kind and "8" not in kind:
            sizes[kind] = sizes.get(kind, 0) + math.prod(tensor.dims)
    return max(sizes, key=lambda kind: sizes[kind], default="")
