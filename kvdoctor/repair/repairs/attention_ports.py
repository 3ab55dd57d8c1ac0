"""Connects every past and present of fused attention operators; sets `seqlens_k` to the total length minus one.

Requires: an operator that takes a past key and value and does not return them, or a GroupQueryAttention whose
`seqlens_k` is the sum of a mask.
Ensures: the operator has a present output for each of its pasts, whether it is read or not; `seqlens_k` is the total
length minus one.
Sources: ONNX, operator Attention 23; ONNX Runtime, docs/ContribOperators.md, GroupQueryAttention.
"""

from collections.abc import Iterator

from kvdoctor.diagnose.checks.attention_cache_half_wired import counts_whole, given
from kvdoctor.model.edit import new_name
from kvdoctor.model.operators import CachePorts, ports_of
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import describe_node, name_node
from kvdoctor.model.view import Scope
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Repair every operator of the files that the findings name."""
    changes: list[Change] = []
    for file in context.files_of("attention-cache-half-wired"):
        for scope in list(context.view(file).scopes()):
            changes += _repair_operators(context.model(file), scope, file)
    return tuple(changes)


def _repair_operators(model: ModelProto, scope: Scope, file: str) -> Iterator[Change]:
    less: dict[str, str] = {}
    for node in list(scope.graph.node):
        ports = ports_of(node.domain, node.op_type)
        if ports is None:
            continue
        title = f"{scope.path}, {describe_node(node)}"
        if added := _name_presents(model, node, ports):
            yield Change(file, title, "no present output for its past", f"returns {', '.join(added)}")
        if counts_whole(node, ports, scope):
            at = next(index for index, role in ports.roles.items() if role == "last_index")
            old = str(node.input[at])
            if old not in less:
                less[old] = _subtract_one(model, scope.graph, node, old)
            node.input[at] = less[old]
            yield Change(file, f"{title}, input seqlens_k", f"{old}: the total length", f"{less[old]} = Sub({old}, 1)")


def _name_presents(model: ModelProto, node: NodeProto, ports: CachePorts) -> list[str]:
    """Give names to the present outputs of all pasts that the node takes."""
    added = []
    for at, (_, out) in ports.pasts.items():
        if given(node.input, at) and not given(node.output, out):
            while len(node.output) <= out:
                node.output.append("")
            node.output[out] = new_name(model, f"{name_node(node)}.present_{out}")
            added.append(str(node.output[out]))
    return added


def _subtract_one(model: ModelProto, graph: GraphProto, node: NodeProto, total: str) -> str:
    """Insert a subtraction of one before a node; the schema declares `seqlens_k` as int32."""
    one, name = new_name(model, "kvdoctor.one"), new_name(model, f"{total}.less_one")
    graph.initializer.append(TensorProto(name=one, dims=[1], data_type=TensorProto.INT32, int32_data=[1]))
    index = next(index for index, each in enumerate(graph.node) if each is node or each == node)
    graph.node.insert(index, NodeProto(op_type="Sub", name=name, input=[total, one], output=[name]))
    return name


REPAIR = Repair("attention-ports", ("attention-cache-half-wired",), "session", "own", apply)
