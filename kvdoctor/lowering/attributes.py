"""Attributes of operators beyond the standard that say only what the operator does without them.

A newer exporter writes them all; an older runtime refuses an attribute that it does not know, whatever it says.

Source: the operator schemas of ONNX Runtime 1.31 (docs/ContribOperators.md).
"""

from kvdoctor.graph import GraphView
from kvdoctor.onnx_schema import AttributeProto, ModelProto, NodeProto
from kvdoctor.report.document import Change

MS = "com.microsoft"
SILENT: dict[str, dict[str, object]] = {
    "GroupQueryAttention": {
        "softcap": 0.0,
        "smooth_softmax": (-1, 0),
        "local_window_size": -1,
        "do_rotary": 0,
        "rotary_interleaved": 0,
        "qk_output": 0,
        "k_quant_type": b"NONE",
        "v_quant_type": b"NONE",
        "kv_cache_bit_width": 0,
    },
    "MultiHeadAttention": {"unidirectional": 0},
    "RotaryEmbedding": {"is_packed_batching": 0, "num_heads": 0, "rotary_embedding_dim": 0},
    "MatMulNBits": {"accuracy_level": 0, "weight_prepacked": 0},
    "Attention": {"do_rotary": 0, "rotary_embedding_dim": 0},
}
"""By operator of com.microsoft, and attribute: the values that are those of an absent one."""


def without_silent(model: ModelProto, lacks: frozenset[str], file: str) -> list[Change]:
    """Drop such attributes where a target does not know them. Changes the model."""
    dropped: dict[str, int] = {}
    view = GraphView(model)
    nodes = [node for scope in view.scopes() for node in scope.graph.node]
    for node in (*nodes, *(node for function in model.functions for node in function.node)):
        for index in reversed(range(len(node.attribute))):
            attribute = node.attribute[index]
            feature = f"{MS}:{node.op_type}.{attribute.name}"
            if node.domain == MS and feature in lacks and _is_silent(node, attribute):
                dropped[feature] = dropped.get(feature, 0) + 1
                del node.attribute[index]
    return [
        Change(file, f"{count} x {feature.rpartition(':')[2]}", "the value of an absent one", "absent")
        for feature, count in dropped.items()
    ]


def _is_silent(node: NodeProto, attribute: AttributeProto) -> bool:
    default = SILENT.get(node.op_type, {}).get(attribute.name)
    value = {1: attribute.f, 2: attribute.i, 3: attribute.s}.get(attribute.type)
    return default is not None and (value in default if isinstance(default, tuple) else value == default)
