"""Makes a decode step return the cross-attention cache that it was fed.

Requires: a decode graph, or a cached branch, that returns an empty tensor under the name of a present whose past is an
input, or another value than the keys and values of the encoder that it was fed.
Ensures: that output is an `Identity` of the past and is declared with the type of the past; all other nodes, names,
initializers and declarations stay as they are.

An `Identity` is needed because a branch may not return a value of the enclosing graph directly (ONNX, operator `If`).
"""

from kvdoctor.contract import Slot
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto, ValueInfoProto
from kvdoctor.model.traverse import constant_tensor
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext, describe_type, find_declared, forget_declaration


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Replace the node that makes every emptied output of the decode step."""
    contract, file = context.drivable, context.file_of("decode")
    model, view = context.model(file), context.view(file)
    # Read before the graph is changed.
    behind = {slot.past: view.behind(slot.present or "") for slot in contract.slots if slot.emptied}
    if context.found("present-rewrites-past"):
        held = (slot for slot in contract.slots if slot.kind == "cross-attention" and slot.carry == "hold")
        origins = {slot.past: view.behind(slot.present) for slot in held if slot.present in view.outputs}
        behind |= {past: (scope, name) for past, (scope, name) in origins.items() if scope.through(name) != past}
    place = f'If "{view.branches[1].node.name}", cached branch' if view.branches else "main graph"
    changes: list[Change] = []
    for slot in contract.slots:
        if slot.past in behind:
            scope, name = behind[slot.past]
            changes += _pass_through(model, scope.graph, slot, name, (file, place))
    return tuple(changes)


def _pass_through(model: ModelProto, graph: GraphProto, slot: Slot, name: str, at: tuple[str, str]) -> list[Change]:
    file, place = at
    past, output = find_declared(model.graph.input, slot.past), find_declared(graph.output, name)
    if past is None or output is None:
        return []
    before, index = _remove(graph, name)
    if sum(value.name == name for value in graph.output) > 1:
        # Several outputs shared one constant; the names of a branch's outputs are not visible outside.
        output.name = f"{name}.{slot.past}"
    node = NodeProto(op_type="Identity", name=f"{slot.present}.pass_through", input=[slot.past], output=[output.name])
    graph.node.insert(index, node)
    changes = [Change(file, f"{place}, output {output.name!r}", before, f"Identity({slot.past})")]
    changes += _declare(graph, output, past, f"{place}, declared output {output.name!r}", file)
    if (outer := find_declared(model.graph.output, slot.present)) is not None:
        changes += _declare(model.graph, outer, past, f"declared output {slot.present!r}", file)
    return changes


def _remove(graph: GraphProto, name: str) -> tuple[str, int]:
    """Remove the node or weight that makes a value unless other outputs need it; gives its description and index."""
    shared = sum(value.name == name for value in graph.output) > 1
    for index, node in enumerate(graph.node):
        if name in node.output:
            value = constant_tensor(node)
            text = node.op_type if value is None else f"{node.op_type} {list(value.dims)}"
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


def _declare(graph: GraphProto, output: ValueInfoProto, past: ValueInfoProto, where: str, file: str) -> list[Change]:
    """Declare an output like the past, and drop other declarations of it."""
    forget_declaration(graph, output.name)
    old, new = describe_type(output), describe_type(past)
    if old == new:
        return []
    output.type.CopyFrom(past.type)
    return [Change(file, where, old, new)]


ADVICE = (
    "Keep the cross-attention outputs (present.*.encoder.*) of the first step, and feed those values at every "
    "later step.",
    "Feed back: only the self-attention outputs (present.*.decoder.*); never a tensor whose shape contains a zero.",
)
REPAIR = Repair("pass-through", ("cross-cache-emptied", "present-rewrites-past"), "slots", "bits", apply, ADVICE)
