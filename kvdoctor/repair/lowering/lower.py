"""Lowers a model to an older IR version and opset, or raises it to a newer one.

Every node is changed by itself, so weights need not be loaded and everything else stays as it was. Whatever has no form
with the same meaning there is named, and then nothing is changed. Operators of other domains, the bodies of If and Loop
and local functions are raised with the model or stay as they are. Attributes beyond the ONNX standard are dropped if
they only say what the operator does without them: newer exporters write them all, and an older runtime refuses an
attribute that it does not know, and inputs beyond those that it knows even if they are empty.

Sources: the operator schemas of ONNX Runtime 1.31 (docs/ContribOperators.md); for the oldest IR version that can hold a
model, the history of versions in onnx.proto. Metadata of nodes and graphs (IR 10) does not count: a reader that does
not know it skips it, and nothing is computed from it.
"""

from collections import Counter
from collections.abc import Iterator

import onnx
from onnx import IR_VERSION, helper

from kvdoctor.model.edit import keep_only
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import STANDARD, all_nodes, bodies_of, opset_version
from kvdoctor.model.view import GraphView
from kvdoctor.records import record
from kvdoctor.repair.lowering.opset import CannotChangeVersion, Way, replace_nodes, rewrite_nodes
from kvdoctor.report.repair_record import Change
from kvdoctor.runtime.targets import Target
from kvdoctor.runtime.targets.limits import (
    CONTRIB_IN_STANDARD,
    INPUTS,
    describe_feature,
    read_demands,
    tested_operators,
)

LOWERED_CHECKS = ("ir-too-new", "opset-too-new", "operator-unsupported")
"""The checks whose findings a lowering can remove."""


@record
class VersionLimit:
    """The largest IR version and opset, None for no limit, and features that a model must not use."""

    ir: int | None = None
    opset: int | None = None
    unsupported: frozenset[str] = frozenset()

    @property
    def is_anything(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.ir or self.opset or self.unsupported)


def limit_for_targets(targets: tuple[Target, ...]) -> VersionLimit:
    """The limit that all targets accept."""
    known = [limits for target in targets if (limits := target.limits) is not None]
    return VersionLimit(
        ir=min((limits.ir for limits in known), default=None),
        opset=min((limits.opset for limits in known), default=None),
        unsupported=frozenset().union(*(limits.unsupported for limits in known)),
    )


def exceeds(view: GraphView, want: VersionLimit) -> bool:
    """Whether a graph needs more than the limit allows."""
    asked = read_demands(view)
    too_new = (want.ir is not None and asked.ir > want.ir) or (want.opset is not None and asked.opset > want.opset)
    return too_new or bool(want.unsupported & asked.features.keys())


WEIGHTS_ALONE = 4
"""From this IR version on a weight need not be an input, and one that is may be fed by the caller."""
NO_OTHER_FORM = (
    "there is no older form of it: export again without it, for example "
    "kvdoctor re-export MODEL --from CHECKPOINT -o OUT --exporter optimum"
)
MS = "com.microsoft"
GROUPED: dict[str, object] = dict.fromkeys(("do_rotary", "rotary_interleaved", "qk_output", "kv_cache_bit_width"), 0)
GROUPED |= {"softcap": 0.0, "smooth_softmax": (-1, 0), "local_window_size": -1}
GROUPED |= {"k_quant_type": b"NONE", "v_quant_type": b"NONE"}
SILENT: dict[str, dict[str, object]] = {
    "GroupQueryAttention": GROUPED,
    "MultiHeadAttention": {"unidirectional": 0},
    "RotaryEmbedding": {"is_packed_batching": 0, "num_heads": 0, "rotary_embedding_dim": 0},
    "MatMulNBits": {"accuracy_level": 0, "weight_prepacked": 0},
    "Attention": {"do_rotary": 0, "rotary_embedding_dim": 0},
}
"""By operator of com.microsoft and attribute: the values that have the same meaning as no attribute."""


def find_unsupported(model: ModelProto, unsupported: frozenset[str]) -> tuple[str, ...]:
    """Features beyond the ONNX standard that the targets lack and that cannot be left out, as text."""
    found: dict[str, int] = {}
    for node in all_nodes(model):
        attributes = {attribute.name for attribute in node.attribute if not is_silent(node, attribute)}
        domain = node.domain if node.domain not in STANDARD else CONTRIB_IN_STANDARD
        filled = max((number for number, name in enumerate(node.input, 1) if name), default=0)
        features = tested_operators().other(domain, node.op_type, attributes, filled)
        for feature in [feature for feature in features if feature in unsupported][:1]:
            found[feature] = found.get(feature, 0) + 1
    return tuple(f"{describe_feature(one)} is not supported by the target ({count} x)" for one, count in found.items())


def drop_silent_attributes(model: ModelProto, unsupported: frozenset[str], file: str) -> list[Change]:
    """Drop attributes with the default meaning that a target does not know. Changes the model."""
    dropped = Counter[str]()
    for node in all_nodes(model) if unsupported else ():
        if node.domain != MS:
            continue
        for index in reversed(range(len(node.attribute))):
            attribute = node.attribute[index]
            if f"{MS}:{node.op_type}.{attribute.name}" in unsupported and is_silent(node, attribute):
                dropped[f"{node.op_type}.{attribute.name}"] += 1
                del node.attribute[index]
        while f"{MS}:{node.op_type}.{INPUTS}{len(node.input)}" in unsupported and not node.input[-1]:
            dropped[f"empty input of {node.op_type}"] += 1
            del node.input[-1]
    default = "has the default meaning"
    return [Change(file, f"{count} x {what}", default, "removed") for what, count in dropped.items()]


def is_silent(node: NodeProto, attribute: AttributeProto) -> bool:
    """Whether an attribute of an operator of com.microsoft has the same meaning as no attribute."""
    default = SILENT.get(node.op_type, {}).get(attribute.name)
    value = {1: attribute.f, 2: attribute.i, 3: attribute.s}.get(attribute.type)
    return default is not None and (value in default if isinstance(default, tuple) else value == default)


def lower_model(model: ModelProto, want: VersionLimit, file: str) -> tuple[Change, ...]:
    """Lower a model in place to a limit; nothing is changed if it is within the limit.

    `file` is the name in the changes. External data need not be loaded.

    Raises:
        CannotChangeVersion: something that the model uses needs more; the model is as it was.
    """
    if left := find_unsupported(model, want.unsupported):
        raise CannotChangeVersion(left, NO_OTHER_FORM)
    replaced = rewrite_nodes(model, want.opset, "lowered") if want.opset is not None else []
    if want.ir is not None:
        refuse_older_ir(model, want.ir)
    changes = [*replace_nodes(model, replaced, file)]
    if want.opset is not None:
        changes += _change_imports(model, want.opset, "lowered", file)
    changes += drop_silent_attributes(model, want.unsupported, file)
    if want.ir is not None and model.ir_version > want.ir:
        changes += set_ir(model, want.ir, file)
    return tuple(changes)


def refuse_older_ir(model: ModelProto, ir: int) -> None:
    """Refuse an IR version older than the model's that has no form for something in it.

    Raises:
        CannotChangeVersion: with what needs a newer one.
    """
    least = find_oldest_ir(model)
    if model.ir_version > ir and least[0] > ir:
        raise CannotChangeVersion((f"{least[1]} needs IR version {least[0]}",), f"IR version {ir} has no form for it")


def set_ir(model: ModelProto, ir: int, file: str) -> list[Change]:
    """Give a model an IR version, in place."""
    change = Change(file, "IR version", str(model.ir_version), str(ir))
    model.ir_version = ir
    return [change]


def _change_imports(model: ModelProto, opset: int, way: Way, file: str) -> Iterator[Change]:
    functions = ((f"opset of function {f.name}", f.opset_import) for f in model.functions)
    for where, entry in ((w, e) for w, imports in (("opset", model.opset_import), *functions) for e in imports):
        if entry.domain in STANDARD and (entry.version > opset if way == "lowered" else entry.version < opset):
            yield Change(file, where, str(entry.version), str(opset))
            entry.version = opset


def change_versions(model: ModelProto, ir: int | None, opset: int | None, file: str) -> tuple[Change, ...]:
    """Give a model an IR version and an opset, in place; None keeps what it has. `file` is the name in the changes.

    A raised opset raises the IR version to that of files with this opset, where none is asked for. External data
    need not be loaded.

    Raises:
        CannotChangeVersion: something has no form there; the model is as it was.
    """
    if ir is not None and model.ir_version < ir > IR_VERSION:
        known = f"IR version {ir} is newer than onnx {onnx.__version__} knows"
        raise CannotChangeVersion((known,), "pip install -U onnx", "raised")
    if opset is None or opset <= opset_version(model.opset_import):
        changes = [*lower_model(model, VersionLimit(ir=ir, opset=opset), file)]
    else:
        if ir is not None:
            refuse_older_ir(model, ir)
        replaced = rewrite_nodes(model, opset, "raised")
        changes = [*replace_nodes(model, replaced, file), *_change_imports(model, opset, "raised", file)]
        least = helper.find_min_ir_version_for([helper.make_opsetid("", opset)], ignore_unknown=True)
        ir = ir or max(model.ir_version, least)
        changes += set_ir(model, ir, file) if ir < model.ir_version else []
    if ir is not None and ir > model.ir_version:
        changes += [*_fix_weights(model, ir, file), *set_ir(model, ir, file)]
    return tuple(changes)


def _fix_weights(model: ModelProto, ir: int, file: str) -> Iterator[Change]:
    """Take weights from the inputs: older versions list all of them there, newer ones let the caller replace those."""
    if model.ir_version >= WEIGHTS_ALONE or ir < WEIGHTS_ALONE:
        return
    weights, before = {tensor.name for tensor in model.graph.initializer}, len(model.graph.input)
    keep_only(model.graph.input, lambda value: value.name not in weights)
    if count := before - len(model.graph.input):
        yield Change(file, "inputs", f"{count} weights among them", "the weights are no inputs")


OLDEST = 4
"""Earlier versions require every initializer to be a graph input, which changes the contract with the caller."""

SINCE = {9: ("FLOAT8E4M3FN", "FLOAT8E4M3FNUZ", "FLOAT8E5M2", "FLOAT8E5M2FNUZ"), 10: ("UINT4", "INT4")}
SINCE |= {11: ("FLOAT4E2M1",), 12: ("FLOAT8E8M0",), 13: ("UINT2", "INT2"), 14: ("FLOAT6E2M3", "FLOAT6E3M2")}
TYPES = dict(TensorProto.DataType.items())
NEEDS = {TYPES[name]: (version, name) for version, names in SINCE.items() for name in names if name in TYPES}

Need = tuple[int, str]


def find_oldest_ir(model: ModelProto) -> Need:
    """The oldest IR version, and what needs it."""
    needs = [(OLDEST, "a weight that is not an input"), *_needs_of_model(model)]
    return max(needs, key=lambda need: need[0])


def _needs_of_model(model: ModelProto) -> Iterator[Need]:
    for scope in GraphView(model).scopes():
        yield from _needs_of_graph(scope.graph)
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
            yield from _needs_of_node(node)
    if _has(model, "configuration") and len(model.configuration):
        yield 11, "its device configuration"


def _needs_of_graph(graph: GraphProto) -> Iterator[Need]:
    if len(graph.quantization_annotation):
        yield 5, "an annotation of quantization"
    if len(graph.sparse_initializer):
        yield 6, "a sparse weight"
    for tensor in graph.initializer:
        yield from _needs_of_type(tensor.data_type, f"weight {tensor.name}")
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.WhichOneof("value")
        if kind in ("optional_type", "sparse_tensor_type"):
            yield 8, f"{value.name}, which is optional or sparse,"
        if kind == "tensor_type":
            yield from _needs_of_type(value.type.tensor_type.elem_type, value.name)
    for node in graph.node:
        yield from _needs_of_node(node)


def _needs_of_node(node: NodeProto) -> Iterator[Need]:
    if _has(node, "overload") and node.overload:
        yield 10, f"node {node.name} calls an overload, which"
    if _has(node, "device_configurations") and len(node.device_configurations):
        yield 11, f"node {node.name} is placed on a device, which"
    for attribute in node.attribute:
        if attribute.HasField("t"):
            yield from _needs_of_type(attribute.t.data_type, f"constant of node {node.name}")
        if attribute.name in ("to", "output_dtype", "dtype"):
            yield from _needs_of_type(attribute.i, f"{node.op_type} {node.name}")
        if any(body.sparse_initializer for body in bodies_of(attribute)):
            yield 6, "a sparse weight"


def _needs_of_type(number: int, who: str) -> Iterator[Need]:
    if number in NEEDS:
        version, name = NEEDS[number]
        yield version, f"{name} ({who})"


def _has(message: ModelProto | NodeProto, field: str) -> bool:
    """Whether the installed onnx knows a field of a message."""
    return field in message.DESCRIPTOR.fields_by_name
