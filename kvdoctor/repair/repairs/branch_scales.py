"""Copies scales and weights of quantized MatMuls into the branch that uses them.

Requires: a DequantizeLinear in a branch whose scale or weight is an initializer of the enclosing graph, and whose
output reaches a MatMul directly or through a Transpose; and a runtime that does not load the file.
Ensures: each such branch has a copy of the scale, and of the weight if no Transpose is in between; all other values,
nodes and names stay as they are. Copies of weights inside the file make it larger; copies of external weights share the
bytes.

ONNX Runtime 1.25 to 1.31 fuse such pairs and look up the scale only in the graph of the node ("Missing required
scale").
Source: onnxruntime issue 28306 and pull request 28326.
"""

from collections.abc import Iterator

from kvdoctor.model.edit import fresh_name
from kvdoctor.model.operators import has
from kvdoctor.model.proto import TensorProto
from kvdoctor.model.traverse import describe_node, output_of, own_names, readers
from kvdoctor.model.view import Scope
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext

SCALE, WEIGHT, ZERO_POINT = 1, 0, 2


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Search every branch of the files that the runtime does not load."""
    changes: list[Change] = []
    for file in context.files_of("session-refused"):
        for scope in list(context.view(file).scopes()):
            if scope.outer is not None:
                changes += _copy_scales(scope, file)
    if not changes:
        context.cannot("no quantized MatMul takes its scale from outside its branch: the runtime has another reason")
    return tuple(changes)


def _copy_scales(scope: Scope, file: str) -> Iterator[Change]:
    copied: dict[str, str] = {}
    reads = readers(scope.graph)
    for node in scope.graph.node:
        following = [reader for reader, _ in reads.get(output_of(node), ())]
        transposed = [reader for reader in following if has(reader.op_type, "permute")]
        further = [reader for one in transposed for reader, _ in reads.get(output_of(one), ())]
        direct, reached = (any(has(one.op_type, "product") for one in some) for some in (following, further))
        if not has(node.op_type, "dequantize") or not (direct or reached):
            continue
        wanted = (SCALE, ZERO_POINT, WEIGHT) if direct else (SCALE, ZERO_POINT)
        for at in wanted:
            tensor = _find_outer(scope, node.input[at]) if at < len(node.input) else None
            if tensor is None:
                continue
            if tensor.name not in copied:
                copy = scope.graph.initializer.add()
                copy.CopyFrom(tensor)
                copy.name = fresh_name(f"{tensor.name}.branch", own_names(scope.graph))
                copied[tensor.name] = str(copy.name)
            before = node.input[at]
            node.input[at] = copied[tensor.name]
            word = {SCALE: "scale", WEIGHT: "weight", ZERO_POINT: "zero point"}[at]
            title = f"{scope.path}, {describe_node(node)}, {word}"
            after = f"{copied[tensor.name]}, a copy in the branch"
            yield Change(file, title, f"{before}, of the enclosing graph", after)


def _find_outer(scope: Scope, name: str) -> TensorProto | None:
    """The initializer of an enclosing graph that a name refers to."""
    around = scope if name not in own_names(scope.graph) else None
    while around is not None and (around := around.outer) is not None:
        if name in around.initializers:
            return around.initializers[name]
        if name in own_names(around.graph):
            return None
    return None


ADVICE = ("Load the session at the optimization level basic, if it loads there.",)
REPAIR = Repair("branch-scales", ("session-refused",), "session", "bits", apply, ADVICE)
