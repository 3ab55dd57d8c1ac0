"""Finds caches that are no slots: made constant by an export, or hidden by a loop that was not followed.

A state inside a module becomes a constant: no state leaves the graph. A Loop or Scan may keep its layers in a sequence
of tensors, or change them in a way that no walk follows. Whether one of its outputs returns the past is open then: that
is no fault of the model.
"""

from kvdoctor.analysis.axes import unequal_axes
from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.analysis.slot_rules import proven_part
from kvdoctor.analysis.stacks import FLOATS, OnnxFile, has_named_logits, makes_logits
from kvdoctor.contract import CacheContract
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.operators import operator_of
from kvdoctor.model.traverse import describe_node


def returns_logits(file: OnnxFile) -> bool:
    """Whether a graph returns logits: by name, or as a float output as wide as the embedding table has rows."""
    view, flow = file.view, file.dataflow
    return view is not None and (has_named_logits(view) or (flow is not None and makes_logits(view, flow)))


def is_cacheless(file: OnnxFile) -> bool:
    """Whether a graph returns logits and has no float input and output of four or more axes, which may be a cache."""
    if not returns_logits(file) or file.view is None:
        return False
    sides = (file.view.inputs.values(), file.view.outputs.values())
    return not all(any(port.dtype in FLOATS and len(port.shape or ()) >= 4 for port in side) for side in sides)


def find_constant_caches(file: OnnxFile) -> tuple[str, ...]:
    """Find constants that new keys or values join before an attention, in the order of the graph."""
    dataflow = file.dataflow
    if dataflow is None:
        return ()
    joins = [(_constant_operand(node, dataflow.flow.fixed), node.output()) for node in dataflow.flow.nodes]
    near = ((name, output) for name, output in joins if name is not None and dataflow.budget.goes_on())
    return tuple(dict.fromkeys(name for name, output in near if proven_part(dataflow.uses.use_of(output)) is not None))


def _constant_operand(node: FlatNode, fixed: set[str]) -> str | None:
    """The constant that a node joins new entries to; None where it is no constant."""
    if node.has("join"):
        constants = [name for name in node.inputs if name in fixed]
        return constants[0] if constants and len(constants) < len(node.inputs) else None
    new = operator_of(node.op).new
    if not new or new >= len(node.inputs) or node.inputs[0] not in fixed or node.inputs[new] in fixed:
        return None
    return node.inputs[0]


MOST_LOOPS = 50
"""Loops of one graph that are looked at: each takes two walks over all nodes."""

LEAST_AXES = 3


def find_unread_loops(dataflow: Dataflow | None, contract: CacheContract) -> dict[str, str]:
    """The loop between leftover ports of the decode graph, as reports name it, by the names of the ports."""
    taken = {name for slot in contract.slots if slot.filled_by for name in (slot.past, slot.present) if slot.present}
    taken |= {slot.past for slot in contract.slots if slot.is_given}
    graph = contract.graph("decode")
    pasts = [port for port in graph.inputs if port.role in ("past", "auxiliary") and port.name not in taken]
    presents = [port for port in graph.outputs if port.role in ("present", "auxiliary") and port.name not in taken]
    wide = [(past, present) for past in pasts for present in presents if len(past.shape or ()) >= LEAST_AXES]
    fitting = [pair for pair in wide if (unequal := unequal_axes(*pair)) is not None and len(unequal) < 2]
    if dataflow is None or not fitting:
        return {}
    found, flow = dict[str, str](), dataflow.flow
    for node in [node for node in flow.nodes if node.has("loop")][:MOST_LOOPS]:
        before = dataflow.descent.ancestors(*node.inputs)
        behind = dataflow.descent.reached_from(set(filter(None, node.outputs)))
        for past, present in fitting:
            if past.name in before and flow.results.get(present.name) in behind:
                found.setdefault(past.name, describe_node(node.proto))
                found.setdefault(present.name, describe_node(node.proto))
    return found
