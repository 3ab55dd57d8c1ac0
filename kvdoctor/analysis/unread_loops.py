"""Finds pasts and presents that are left over because a Loop or Scan stands between them that was not followed.

A loop may keep its layers in a sequence of tensors, or change them in a way that no walk follows. Whether one of its
outputs returns the past is open then: that is no fault of the model.
"""

from kvdoctor.analysis.axes import as_number
from kvdoctor.analysis.dataflow.operators import LOOPS
from kvdoctor.analysis.dataflow.states import Dataflow
from kvdoctor.contract import CacheContract, Port
from kvdoctor.model.traverse import describe_node

MOST_LOOPS = 50
"""Loops of one graph that are looked at: each takes two walks over all nodes."""

LEAST_AXES = 3


def find_unread_loops(dataflow: Dataflow | None, contract: CacheContract) -> dict[str, str]:
    """The loop between leftover ports of the decode graph, as reports name it, by the names of the ports.

    Such a past reaches the loop, and the loop such a present, declared like the past but for one size.
    """
    taken = {name for slot in contract.slots if slot.filled_by for name in (slot.past, slot.present) if slot.present}
    taken |= {slot.past for slot in contract.slots if slot.is_given}
    graph = contract.graph("decode")
    pasts = [port for port in graph.inputs if port.role in ("past", "auxiliary") and port.name not in taken]
    presents = [port for port in graph.outputs if port.role in ("present", "auxiliary") and port.name not in taken]
    fitting = [(past, present) for past in pasts for present in presents if _fits(past, present)]
    if dataflow is None or not fitting:
        return {}
    found, flow = dict[str, str](), dataflow.flow
    for node in [node for node in flow.nodes if node.op in LOOPS][:MOST_LOOPS]:
        before = dataflow.descent.ancestors(*node.inputs)
        behind = dataflow.descent.reached_from(set(filter(None, node.outputs)))
        for past, present in fitting:
            if past.name in before and flow.results.get(present.name) in behind:
                found.setdefault(past.name, describe_node(node.proto))
                found.setdefault(present.name, describe_node(node.proto))
    return found


def _fits(past: Port, present: Port) -> bool:
    """Whether two ports have one element type, and no other sizes on more than one axis."""
    before, after = past.shape or (), present.shape or ()
    if past.dtype != present.dtype or len(before) != len(after) or len(before) < LEAST_AXES:
        return False
    sizes = [(as_number(one), as_number(other)) for one, other in zip(before, after, strict=True)]
    return sum(isinstance(one, int) and isinstance(other, int) and one != other for one, other in sizes) < 2
