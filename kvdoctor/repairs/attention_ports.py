"""Wires attention operators to their cache whole: presents beside the pasts, `seqlens_k` one less than the total.

Requires: an operator that takes a past key and value and does not return them, or a GroupQueryAttention whose
`seqlens_k` is the sum of a mask.
Ensures: the operator has all outputs that its pasts call for, which nothing has to read; `seqlens_k` is one less.
Sources: ONNX, operator Attention 23; ONNX Runtime, docs/ContribOperators.md, GroupQueryAttention.
"""

from collections.abc import Iterator

from kvdoctor.cache_operators import CachePorts, ports_of
from kvdoctor.checks.attention_cache_half_wired import counts_whole, given
from kvdoctor.graph import Scope
from kvdoctor.onnx_schema import GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.repairs import Change, Patient, Repair
from kvdoctor.rewiring import fresh


def apply(patient: Patient) -> tuple[Change, ...]:
    """Mend every operator of the files that the findings name."""
    changes: list[Change] = []
    for file in dict.fromkeys(finding.file for finding in patient.found("attention-cache-half-wired") if finding.file):
        if file in patient.files:
            for scope in list(patient.view(file).scopes()):
                changes += _mended(patient.model(file), scope, file)
    return tuple(changes)


def _mended(model: ModelProto, scope: Scope, file: str) -> Iterator[Change]:
    less: dict[str, str] = {}
    for node in list(scope.graph.node):
        ports = ports_of(node.domain if node.domain != "ai.onnx" else "", node.op_type)
        if ports is None:
            continue
        title = f'{scope.path}, {node.op_type} "{node.name or node.output[0]}"'
        if added := _name_presents(model, node, ports):
            yield Change(file, title, "no present for the past that it takes", f"returns {', '.join(added)}")
        if counts_whole(node, ports, scope):
            at = next(index for index, role in ports.roles.items() if role == "last_index")
            old = str(node.input[at])
            if old not in less:
                less[old] = _one_less(model, scope.graph, node, old)
            node.input[at] = less[old]
            yield Change(file, f"{title}, input seqlens_k", f"{old}: the total length", f"{less[old]} = Sub({old}, 1)")


def _name_presents(model: ModelProto, node: NodeProto, ports: CachePorts) -> list[str]:
    """Give names to the outputs that carry on the pasts which the node takes."""
    added = []
    for at, (_, out) in ports.pasts.items():
        if given(node.input, at) and not given(node.output, out):
            while len(node.output) <= out:
                node.output.append("")
            node.output[out] = fresh(model, f"{node.name or node.output[0]}.present_{out}")
            added.append(str(node.output[out]))
    return added


def _one_less(model: ModelProto, graph: GraphProto, node: NodeProto, total: str) -> str:
    """Insert a subtraction of one before a node; `seqlens_k` is int32 by the schema."""
    one, name = fresh(model, "kvdoctor.one"), fresh(model, f"{total}.less_one")
    graph.initializer.append(TensorProto(name=one, dims=[1], data_type=TensorProto.INT32, int32_data=[1]))
    index = next(index for index, each in enumerate(graph.node) if each is node or each == node)
    graph.node.insert(index, NodeProto(op_type="Sub", name=name, input=[total, one], output=[name]))
    return name


REPAIR = Repair(
    name="attention-ports",
    mends=("attention-cache-half-wired",),
    stage="session",
    keeps="own",
    apply=apply,
    advice=(),
)
