"""Repairs of what keeps a runtime from loading a file, or from running its attention."""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.diagnose.checks.attention_cache_half_wired import counts_whole, given
from kvdoctor.model.edit import fresh_name, new_name
from kvdoctor.model.operators import CachePorts, has, ports_of
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import describe_node, name_node, output_of, own_names, readers
from kvdoctor.model.view import Scope
from kvdoctor.repair.lowering.lower import LOWERED_CHECKS, exceeds, limit_for_targets, lower_model
from kvdoctor.repair.lowering.opset import CannotChangeVersion
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import CannotRepair, Change, RepairContext
from kvdoctor.runtime.release_environments import measure_limits_beside
from kvdoctor.runtime.targets import of_release


def connect_ports(context: RepairContext) -> tuple[Change, ...]:
    """Connects every past and present of fused attention operators; sets `seqlens_k` to the total length minus one.

    Requires: an operator that takes a past key and value and does not return them, or a GroupQueryAttention whose
    `seqlens_k` is the sum of a mask.
    Ensures: the operator has a present output for each of its pasts, whether it is read or not; `seqlens_k` is the
    total length minus one.
    Sources: ONNX, operator Attention 23; ONNX Runtime, docs/ContribOperators.md, GroupQueryAttention.
    """
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


SCALE, WEIGHT, ZERO_POINT = 1, 0, 2


def copy_scales(context: RepairContext) -> tuple[Change, ...]:
    """Copies scales and weights of quantized MatMuls into the branch that uses them.

    Requires: a DequantizeLinear in a branch whose scale or weight is an initializer of the enclosing graph, and whose
    output reaches a MatMul directly or through a Transpose; and a runtime that does not load the file.
    Ensures: each such branch has a copy of the scale, and of the weight if no Transpose is in between; all other
    values, nodes and names stay as they are. Copies of weights inside the file make it larger; copies of external
    weights share the bytes.

    ONNX Runtime 1.25 to 1.31 fuse such pairs and look up the scale only in the graph of the node ("Missing required
    scale").
    Source: onnxruntime issue 28306 and pull request 28326.
    """
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


BASIC_LEVEL_ADVICE = ("Load the session at the optimization level basic, if it loads there.",)


def lower(context: RepairContext) -> tuple[Change, ...]:
    """Lowers the IR version and the opset to what the runtime accepts.

    Requires: a target, or without one the local runtime, accepts less than the model asks for, and every operator of
    the graph has a form there.
    Ensures: node by node the same computation in the older form, and the lower versions in the file; weights, names and
    all other nodes stay as they are. If something has no older form it is named, and nothing is changed.
    """
    here = context.running.versions.get("onnxruntime")
    targets = context.options.targets or ((of_release(here),) if here else ())
    measured = (measure_limits_beside(target, context.running, context.options.offline) for target in targets)
    want = limit_for_targets(tuple(measured))
    if not context.found("operator-unsupported"):  # the targets have all operators, whatever the table says
        want = replace(want, unsupported=frozenset())
    changes: list[Change] = []
    for name in context.files:
        if want.is_anything and exceeds(context.view(name), want):
            try:
                changes += lower_model(context.model(name), want, name)
            except CannotChangeVersion as reason:
                raise CannotRepair(f"{name}: {'; '.join(reason.blocks)}", reason.advice) from None
    return tuple(changes)


RELEASE_ADVICE = (
    "Run the model under an onnxruntime that takes its IR version and opset; docs/targets.md has the table.",
)


REPAIRS = (
    Repair("attention-ports", ("attention-cache-half-wired",), "session", "own", connect_ports),
    Repair("branch-scales", ("session-refused",), "session", "bits", copy_scales, BASIC_LEVEL_ADVICE),
    # ir-too-new, opset-too-new, operator-unsupported: `load_for_check` looks for the names here
    Repair("lowered", LOWERED_CHECKS, "session", "bits", lower, RELEASE_ADVICE),
)
