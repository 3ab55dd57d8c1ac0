"""Decides whether a node has the same meaning under another schema of its operator, older or newer.

Most new versions of operators allow further types, or have a further attribute whose default keeps the earlier meaning.
A node that uses neither stays as it is, or loses an attribute that has its default. A newer schema may also have taken
an attribute away, which became an input, or ask for one that was not there.

Source: onnx.defs, the schemas of all versions; `OTHER_MEANING` from their changelogs.
"""

from collections.abc import Sequence
from typing import Any

import onnx
from onnx import defs, helper

from kvdoctor.model.edit import keep_only

OTHER_MEANING = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), (13,)),
    "BatchNormalization": (14,),
    "RoiAlign": (16,),
    "Resize": (11, 13, 18, 19),
    "GroupNormalization": (21,),
    "GridSample": (20,),
    "Attention": (24,),
}
"""Versions that give the same signature another meaning."""
SAME_IN_NEWER = {"Attention": (24,)}
"""Of these the ones that give it only to signatures which the older version does not have."""

LENGTHS = ("Split", "num_outputs")
"""Without it and without lengths, an older Split makes as many equal parts as it has outputs."""
LENGTHS_SINCE = 18
"""The version of Split that needs one of the two."""


def fit_to_schema(
    node: onnx.NodeProto, own: int, other: int, types: Sequence[onnx.TypeProto | None]
) -> onnx.NodeProto | None:
    """The node as the schema of another opset allows it; None if its meaning would differ or is unknown.

    `own` is the opset of the node, `types` are those of the inputs, None where unknown.
    """
    now, then = (defs.get_schema(node.op_type, version, "") for version in (own, other))
    # A Split into equal parts says nothing of their number, which a newer version needs.
    lacks_lengths = node.op_type == LENGTHS[0] and own < LENGTHS_SINCE <= other and not any(node.input[1:])
    if then.deprecated or means_other(node, own, other) or lacks_lengths:
        return None
    if not _same_ports(node, now, then) or not _types_allowed(then, types):
        return None
    theirs = then.attributes
    if any(_default(ours) != _default(theirs[name]) for name, ours in now.attributes.items() if name in theirs):
        return None
    fitting = drop_default_attributes(node, own, other)
    given = {attribute.name for attribute in fitting.attribute}
    needed = {name for name, attribute in then.attributes.items() if attribute.required}
    return fitting if needed <= given <= set(then.attributes) else None


def means_other(node: onnx.NodeProto, own: int, other: int) -> bool:
    """Whether a version between two opsets gives the signature of a node another meaning."""
    older, newer = sorted((own, other))
    kept = SAME_IN_NEWER.get(node.op_type, ()) if own < other else ()
    return any(older < version <= newer and version not in kept for version in OTHER_MEANING.get(node.op_type, ()))


def drop_default_attributes(node: onnx.NodeProto, own: int, other: int) -> onnx.NodeProto:
    """The node without attributes that the schema of another opset does not know, where they have their default."""
    now, then = (defs.get_schema(node.op_type, version, "") for version in (own, other))
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    keep_only(bare.attribute, lambda one: one.name in then.attributes or not _has_default_meaning(node, one, now))
    return bare


def _same_ports(node: onnx.NodeProto, now: defs.OpSchema, then: defs.OpSchema) -> bool:
    """Whether the inputs and outputs that the node has are the same ones under both schemas."""
    used = max((i + 1 for i, name in enumerate(node.input) if name), default=0)
    if not then.min_input <= used <= then.max_input or not then.min_output <= len(node.output) <= then.max_output:
        return False
    pairs = [(now.inputs, then.inputs, used), (now.outputs, then.outputs, len(node.output))]
    return all(_name(new, i) == _name(old, i) for new, old, count in pairs for i in range(count))


def _name(ports: Sequence[defs.OpSchema.FormalParameter], index: int) -> str:
    """The name of a port; the last one may stand for all that follow."""
    return str(ports[min(index, len(ports) - 1)].name).lower()


def _types_allowed(then: defs.OpSchema, types: Sequence[onnx.TypeProto | None]) -> bool:
    for index, kind in enumerate(types):
        if kind is None or kind.WhichOneof("value") != "tensor_type" or not kind.tensor_type.elem_type:
            continue
        name = helper.tensor_dtype_to_string(kind.tensor_type.elem_type).rpartition(".")[2].lower()
        allowed = then.inputs[min(index, len(then.inputs) - 1)].types
        if f"tensor({name})" not in allowed:
            return False
    return True


def _has_default_meaning(node: onnx.NodeProto, attribute: onnx.AttributeProto, now: defs.OpSchema) -> bool:
    """Whether an attribute that the other schema does not know has its default, which keeps the meaning."""
    if (node.op_type, attribute.name) == LENGTHS:
        return bool(attribute.i == len(node.output))
    default = _default(now.attributes[attribute.name]) if attribute.name in now.attributes else None
    return default is not None and not attribute.ref_attr_name and helper.get_attribute_value(attribute) == default


def _default(attribute: defs.OpSchema.Attribute) -> Any:
    """The default of an attribute, None where it has none."""
    value = attribute.default_value
    return helper.get_attribute_value(value) if value.name else None
