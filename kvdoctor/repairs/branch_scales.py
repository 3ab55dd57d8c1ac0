"""Copies scales and weights of quantised MatMuls into the branch that uses them.

Requires: a DequantizeLinear in a branch whose scale or weight is an initializer of the graph around it, and whose
output reaches a MatMul directly or through a Transpose; and a runtime that does not open the file so.
Ensures: each such branch holds a copy of the scale, and of the weight where no Transpose stands between; values, nodes
and names outside stand as they were. Copies of weights inside the file make it larger, external ones share their bytes.

ONNX Runtime 1.25 to 1.31 fuse such pairs and look the scale up in the graph of the node alone ("Missing required
scale"). Source: onnxruntime issue 28306 and pull request 28326.
"""

from collections.abc import Iterator

from kvdoctor.graph import Scope
from kvdoctor.onnx_schema import GraphProto, NodeProto, TensorProto
from kvdoctor.repairs import Change, Patient, Repair
from kvdoctor.rewiring import made_in, readers

SCALE, WEIGHT, ZERO_POINT = 1, 0, 2


def apply(patient: Patient) -> tuple[Change, ...]:
    """Look through every body of the files that the runtime did not open."""
    changes: list[Change] = []
    for file in dict.fromkeys(finding.file for finding in patient.found("session-refused") if finding.file):
        if file in patient.files:
            for scope in list(patient.view(file).scopes()):
                if scope.outer is not None:
                    changes += _copied(scope, file)
    if not changes:
        patient.cannot("what the runtime refuses is no scale of a quantised MatMul outside its branch")
    return tuple(changes)


def _copied(scope: Scope, file: str) -> Iterator[Change]:
    copied: dict[str, str] = {}
    for node in scope.graph.node:
        if node.op_type != "DequantizeLinear" or (way := _to_matmul(scope.graph, node)) is None:
            continue
        wanted = (SCALE, ZERO_POINT) if way == "Transpose" else (SCALE, ZERO_POINT, WEIGHT)
        for at in wanted:
            tensor = _outer(scope, node.input[at]) if at < len(node.input) else None
            if tensor is None:
                continue
            if tensor.name not in copied:
                copied[tensor.name] = _copy(scope.graph, tensor)
            before = node.input[at]
            node.input[at] = copied[tensor.name]
            word = {SCALE: "scale", WEIGHT: "weight", ZERO_POINT: "zero point"}[at]
            title = f'{scope.path}, DequantizeLinear "{node.name or node.output[0]}", {word}'
            yield Change(
                file, title, f"{before}, of the graph around the branch", f"{copied[tensor.name]}, a copy in it"
            )


def _to_matmul(graph: GraphProto, node: NodeProto) -> str | None:
    """Through what the output of a node reaches a MatMul: `Transpose`, nothing, or not at all (None)."""
    found = set()
    for reader, _ in readers(graph, node.output[0]):
        if reader.op_type in ("MatMul", "Gemm"):
            found.add("")
        elif reader.op_type == "Transpose":
            further = readers(graph, reader.output[0])
            found |= {"Transpose"} if any(each.op_type in ("MatMul", "Gemm") for each, _ in further) else set()
    return None if not found else "" if "" in found else "Transpose"


def _outer(scope: Scope, name: str) -> TensorProto | None:
    """The initializer of a graph around this one that a name stands for."""
    if name in made_in(scope.graph):
        return None
    around = scope.outer
    while around is not None:
        if name in around.initializers:
            return around.initializers[name]
        if name in made_in(around.graph):
            return None
        around = around.outer
    return None


def _copy(graph: GraphProto, tensor: TensorProto) -> str:
    known, name, number = made_in(graph), f"{tensor.name}.branch", 0
    while name in known:
        number += 1
        name = f"{tensor.name}.branch_{number}"
    copy = graph.initializer.add()
    copy.CopyFrom(tensor)
    copy.name = name
    return name


REPAIR = Repair(
    name="branch-scales",
    mends=("session-refused",),
    stage="session",
    keeps="bits",
    apply=apply,
    advice=("Open the session at the optimisation level basic, where it opens there.",),
)
