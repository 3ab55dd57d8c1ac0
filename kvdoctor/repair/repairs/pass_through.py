"""Makes a decode step return the cross-attention cache that it was fed.

Requires: a decode graph, or a cached branch, that returns an empty tensor under the name of a present whose past is an
input, or another value than the keys and values of the encoder that it was fed.
Ensures: that output is an `Identity` of the past and is declared with the type of the past; all other nodes, names,
initializers and declarations stay as they are.

An `Identity` is needed because a branch may not return a value of the enclosing graph directly (ONNX, operator `If`).
"""

from kvdoctor.contract import Slot, describe
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, ValueInfoProto
from kvdoctor.model.traverse import constant_tensor
from kvdoctor.model.view import GraphView, Scope, declared
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import Change


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Replace the node that makes every emptied output of the decode step."""
    contract, file = context.drivable, context.file_of("decode")
    model, view = context.model(file), context.view(file)
    # Read before the graph is changed.
    behind = {slot.past: view.behind(slot.present or "") for slot in contract.slots if slot.emptied}
    if context.found("present-rewrites-past"):
        held = (slot for slot in contract.slots if slot.kind == "cross-attention" and slot.carry == "hold")
        behind |= {slot.past: found for slot in held if (found := _find_other_origin(view, slot)) is not None}
    place = f'If "{view.branches[1].node.name}", cached branch' if view.branches else "main graph"
    changes: list[Change] = []
    for slot in contract.slots:
        if slot.past in behind:
            scope, name = behind[slot.past]
            changes += _pass_through(model, scope.graph, slot, name, (file, place))
    return tuple(changes)


def _find_other_origin(view: GraphView, slot: Slot) -> tuple[Scope, str] | None:
    """The origin of a present that must be its past, if it is something else."""
    if slot.present is None or slot.present not in view.outputs:
        return None
    scope, name = view.behind(slot.present)
    return None if scope.through(name) == slot.past else (scope, name)


def _pass_through(model: ModelProto, graph: GraphProto, slot: Slot, name: str, at: tuple[str, str]) -> list[Change]:
    file, place = at
    past = next(value for value in model.graph.input if value.name == slot.past)
    output = next((value for value in graph.output if value.name == name), None)
    if output is None:
        return []
    before, index = _remove(graph, name)
    if sum(value.name == name for value in graph.output) > 1:
        # Several outputs shared one constant; the names of a branch's outputs are not visible outside.
        output.name = f"{name}.{slot.past}"
    node = NodeProto(op_type="Identity", name=f"{slot.present}.pass_through", input=[slot.past], output=[output.name])
    graph.node.insert(index, node)
    changes = [Change(file, f"{place}, output {output.name!r}", before, f"Identity({slot.past})")]
    changes += _declare(graph, output, past, f"{place}, declared output {output.name!r}", file)
    if (outer := next((v for v in model.graph.output if v.name == slot.present), None)) is not None:
        changes += _declare(model.graph, outer, past, f"declared output {slot.present!r}", file)
    return changes


def _remove(graph: GraphProto, name: str) -> tuple[str, int]:
    """Remove the node or weight that makes a value unless other outputs need it; gives its description and index."""
    shared = sum(value.name == name for value in graph.output) > 1
    for index, node in enumerate(graph.node):
        if name in node.output:
            text = f"{node.op_type} {_describe_dims(node)}".strip()
            if not shared:
                del graph.node[index]
            return text, index
    for index, tensor in enumerate(graph.initializer):
        if tensor.name == name:
            text = f"initializer {list(tensor.dims)}"
            if not shared:
                del graph.initializer[index]
            return text, 0
    return "value of the enclosing graph", 0


def _describe_dims(node: NodeProto) -> str:
    value = constant_tensor(node)
    return "" if value is None else str(list(value.dims))


def _declare(graph: GraphProto, output: ValueInfoProto, past: ValueInfoProto, where: str, file: str) -> list[Change]:
    """Declare an output like the past, and drop other declarations of it."""
    for index in reversed([i for i, value in enumerate(graph.value_info) if value.name == output.name]):
        del graph.value_info[index]
    old, new = declared(output), declared(past)
    if (old.dtype, old.shape) == (new.dtype, new.shape):
        return []
    output.type.CopyFrom(past.type)
    return [Change(file, where, describe(old.dtype, old.shape), describe(new.dtype, new.shape))]


REPAIR = Repair(
    name="pass-through",
    checks=("cross-cache-emptied", "present-rewrites-past"),
    stage="slots",
    keeps="bits",
    apply=apply,
    advice=(
        "Keep the cross-attention outputs (present.*.encoder.*) of the first step, and feed those values at every "
        "later step.",
        "Feed back: only the self-attention outputs (present.*.decoder.*); never a tensor whose shape contains a zero.",
    ),
)
