"""The versions that a model may need: the limits that targets set, and the oldest IR version that can hold a model.

Source: the history of IR versions in onnx.proto. Metadata of nodes and graphs (IR 10) does not count: a reader that
does not know it skips it, and nothing is computed from it.
"""

from collections.abc import Iterator
from typing import Literal

from kvdoctor.errors import KvdoctorError
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import bodies_of
from kvdoctor.model.view import GraphView
from kvdoctor.records import record
from kvdoctor.report.wording import join_some
from kvdoctor.runtime.targets import Target
from kvdoctor.runtime.targets.limits import read_demands

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


Way = Literal["lowered", "raised"]
"""What is done to an IR version or an opset."""


class CannotChangeVersion(KvdoctorError):
    """A model cannot be lowered to a limit, or raised to a version; `blocks` are the reasons."""

    def __init__(self, blocks: tuple[str, ...], advice: str, way: Way = "lowered") -> None:
        shown = join_some(blocks, 4, "; ", "; and {} more")
        super().__init__(f"the model cannot be {way}: {shown}; {advice}")
        self.blocks, self.advice = blocks, advice


def limit_for_targets(targets: tuple[Target, ...], ir: int | None = None, opset: int | None = None) -> VersionLimit:
    """The limit that all targets accept, and no more than the versions given by number."""
    known = [limits for target in targets if (limits := target.limits) is not None]
    return VersionLimit(
        ir=min([*(limits.ir for limits in known), *([ir] if ir else [])], default=None),
        opset=min([*(limits.opset for limits in known), *([opset] if opset else [])], default=None),
        unsupported=frozenset().union(*(limits.unsupported for limits in known)),
    )


def exceeds(view: GraphView, want: VersionLimit) -> bool:
    """Whether a graph needs more than the limit allows."""
    asked = read_demands(view)
    too_new = (want.ir is not None and asked.ir > want.ir) or (want.opset is not None and asked.opset > want.opset)
    return too_new or bool(want.unsupported & asked.features.keys())


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
