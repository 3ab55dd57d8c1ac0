"""Attributes of operators beyond the standard that say only what the operator does without them, and empty inputs.

A newer exporter writes them all; an older runtime refuses an attribute that it does not know, whatever it says, and
inputs beyond those that it knows, though they are empty.

Source: the operator schemas of ONNX Runtime 1.31 (docs/ContribOperators.md).
"""

from collections.abc import Iterator

from kvdoctor.graph import GraphView
from kvdoctor.onnx_schema import AttributeProto, ModelProto, NodeProto
from kvdoctor.report.document import Change
from kvdoctor.targets.demands import CONTRIB_IN_STANDARD, STANDARD
from kvdoctor.targets.limits import INPUTS, tried
from kvdoctor.targets.words import words_of

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


def unknown(model: ModelProto, lacks: frozenset[str]) -> tuple[str, ...]:
    """What operators say beyond the standard that the targets lack, and that cannot be left out, in words."""
    found: dict[str, int] = {}
    for node in _nodes(model):
        attributes = {attribute.name for attribute in node.attribute if not _is_silent(node, attribute)}
        domain = node.domain if node.domain not in STANDARD else CONTRIB_IN_STANDARD
        features = [f for f in tried().other(domain, node.op_type, attributes, _filled(node)) if f in lacks]
        for feature in features[:1]:
            found[feature] = found.get(feature, 0) + 1
    return tuple(f"{words_of(feature)} is unknown there ({count} x)" for feature, count in found.items())


def without_silent(model: ModelProto, lacks: frozenset[str], file: str) -> list[Change]:
    """Drop what says nothing where a target does not know it. Changes the model."""
    dropped: dict[str, int] = {}
    for node in _nodes(model) if lacks else ():
        if node.domain != MS:
            continue
        for index in reversed(range(len(node.attribute))):
            attribute = node.attribute[index]
            feature = f"{MS}:{node.op_type}.{attribute.name}"
            if feature in lacks and _is_silent(node, attribute):
                dropped[feature] = dropped.get(feature, 0) + 1
                del node.attribute[index]
        while f"{MS}:{node.op_type}.{INPUTS}{len(node.input)}" in lacks and not node.input[-1]:
            told = f"empty input of {node.op_type}"
            dropped[told] = dropped.get(told, 0) + 1
            del node.input[-1]
    return [
        Change(file, f"{count} x {feature.rpartition(':')[2]}", "says the same as an absent one", "absent")
        for feature, count in dropped.items()
    ]


def _nodes(model: ModelProto) -> Iterator[NodeProto]:
    for scope in GraphView(model).scopes():
        yield from scope.graph.node
    for function in model.functions:
        yield from function.node


def _filled(node: NodeProto) -> int:
    """The number of inputs up to the last that is not empty."""
    return max((number for number, name in enumerate(node.input, 1) if name), default=0)


def _is_silent(node: NodeProto, attribute: AttributeProto) -> bool:
    default = SILENT.get(node.op_type, {}).get(attribute.name)
    value = {1: attribute.f, 2: attribute.i, 3: attribute.s}.get(attribute.type)
    return default is not None and (value in default if isinstance(default, tuple) else value == default)
