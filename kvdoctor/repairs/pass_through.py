"""Makes the cached branch return the cross-attention cache it was given.

Requires: a merged decoder whose cached branch returns a constant without elements under the name of a present whose
past is an input of the graph. Ensures: that output is an `Identity` of the past, and is declared with the type of the
past; all other nodes, names, initializers and declarations stand as they were.

An `Identity` is needed because a branch may not return a value of the outer graph directly (ONNX, operator `If`).
"""

import onnx

from kvdoctor.contract import CacheContract, Slot, describe
from kvdoctor.graph import Branches, GraphView, declared
from kvdoctor.repairs import Repair
from kvdoctor.report.document import Change


def apply(model: onnx.ModelProto, contract: CacheContract) -> tuple[Change, ...]:
    """Replace every emptied constant of the cached branch. Changes `model` in place."""
    view = GraphView(model)
    if view.branches is None:
        return ()
    branches = view.branches[1]
    # Asked of the graph as it was: the views hold on to it while it is changed below.
    inner = {slot.past: view.branch_output(slot.present or "", branches.cached) for slot in contract.slots}
    changes: list[Change] = []
    for slot in contract.slots:
        name = inner[slot.past]
        if slot.emptied and name is not None:
            changes += _pass_through(model, branches, slot, name, contract.graph("decode").file)
    return tuple(changes)


def _pass_through(model: onnx.ModelProto, branches: Branches, slot: Slot, name: str, file: str) -> list[Change]:
    graph, place = branches.cached.graph, f'If "{branches.node.name}", cached branch'
    past = next(value for value in model.graph.input if value.name == slot.past)
    position = _position(graph, name, slot)
    before, index = _remove(graph, name)
    output = graph.output[position]
    shared = sum(value.name == name for value in graph.output) > 1
    if shared:
        output.name = f"{name}.{slot.past}"
    node = onnx.helper.make_node("Identity", [slot.past], [output.name], name=f"{slot.present}.pass_through")
    graph.node.insert(index, node)
    changes = [Change(file, f"{place}, output {output.name!r}", before, f"Identity({slot.past})")]
    changes += _declare(graph, output, past, f"{place}, declared output {output.name!r}", file)
    if (declared_output := next((v for v in model.graph.output if v.name == slot.present), None)) is not None:
        changes += _declare(None, declared_output, past, f"declared output {slot.present!r}", file)
    return changes


def _position(graph: onnx.GraphProto, name: str, slot: Slot) -> int:
    """The output of the branch that stands for the slot: several outputs may share one constant."""
    positions = [i for i, value in enumerate(graph.output) if value.name == name]
    return positions[0] if positions else _missing(slot)


def _missing(slot: Slot) -> int:
    raise ValueError(f"the cached branch has no output for {slot.present!r}")


def _remove(graph: onnx.GraphProto, name: str) -> tuple[str, int]:
    """Take away what made the value, unless other outputs still need it. Gives its description and its place."""
    shared = sum(value.name == name for value in graph.output) > 1
    for index, node in enumerate(graph.node):
        if name in node.output:
            text = f"{node.op_type} {_dims(node)}".strip()
            if not shared:
                del graph.node[index]
            return text, index
    for index, tensor in enumerate(graph.initializer):
        if tensor.name == name:
            text = f"initializer {list(tensor.dims)}"
            if not shared:
                del graph.initializer[index]
            return text, 0
    return "value of the outer graph", 0


def _dims(node: onnx.NodeProto) -> str:
    value = next((a.t for a in node.attribute if a.name == "value"), None)
    return "" if value is None else str(list(value.dims))


def _declare(
    graph: onnx.GraphProto | None, output: onnx.ValueInfoProto, past: onnx.ValueInfoProto, where: str, file: str
) -> list[Change]:
    """Give an output the declared type of the past, and drop what the branch says of it elsewhere."""
    if graph is not None:
        for index in reversed([i for i, value in enumerate(graph.value_info) if value.name == output.name]):
            del graph.value_info[index]
    old, new = declared(output), declared(past)
    if (old.dtype, old.shape) == (new.dtype, new.shape):
        return []
    output.type.CopyFrom(past.type)
    return [Change(file, where, describe(old.dtype, old.shape), describe(new.dtype, new.shape))]


REPAIR = Repair(
    name="pass-through",
    mends="cross-cache-emptied",
    apply=apply,
    advice=(
        "Hold: keep the cross-attention outputs (present.*.encoder.*) of the first step, and feed those values at "
        "every later step.",
        "Feed back: only the self-attention outputs (present.*.decoder.*); never a tensor whose shape holds a zero.",
    ),
)
