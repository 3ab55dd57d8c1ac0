"""Returns keys and values as the attention uses them, without what is done to them on their way out alone.

Requires: a present that is made from a value which the logits hang on too, by operators that change elements one by one
(rounding, clipping, scaling, casting to another type and back).
Ensures: the present is that value; the logits of the same call stand as they were.
"""

from collections.abc import Iterator

from kvdoctor.contract import Slot
from kvdoctor.graph import GraphView, Scope
from kvdoctor.onnx_schema import GraphProto
from kvdoctor.repairs import Change, Patient, Repair
from kvdoctor.rewiring import in_words, made_in, needs, place_of, producer, return_value, returned_in

ELEMENTWISE = (
    *("Identity", "Round", "Floor", "Ceil", "Clip", "Abs", "Neg", "Relu", "Sign", "Cast"),
    *("Add", "Sub", "Mul", "Div", "Min", "Max", "Where"),
)
INSTEAD = "export again, so that what is returned is what the attention used"


def apply(patient: Patient) -> tuple[Change, ...]:
    """Mend what the first step returns, and what a decode step returns."""
    contract, changes = patient.drivable, list[Change]()
    for phase, file in patient.graphs():
        port = contract.graph(phase).port("logits")
        for slot in contract.slots if port is not None else ():
            output = slot.present if phase == "decode" else slot.filled_by
            view = patient.view(file)
            if port is not None and output in view.outputs and slot.kind in ("self-attention", "cross-attention"):
                changes += _mended(view, slot, output, (file, phase == "decode"), port.name)
    if not changes:
        patient.cannot("nothing is done to the presents on their way out alone", INSTEAD)
    return tuple(changes)


def _mended(view: GraphView, slot: Slot, output: str, at: tuple[str, bool], logits: str) -> Iterator[Change]:
    file, cached = at
    graph, name = returned_in(view, output, cached)
    used_graph, used_name = returned_in(view, logits, cached)
    if graph is not used_graph or producer(graph, name) is None:
        return
    used = needs(graph, used_name)
    right = _before(graph, name, used)
    if right is None or right == Scope(graph, "").through(name, {"Identity"}) or (slot.emptied and cached):
        return
    before = in_words(graph, name)
    return_value(view.model, graph, name, right)
    yield Change(
        file, f"{place_of(view, graph)}, output {output!r}", before, f"Identity({right}), which the attention uses"
    )


def _before(graph: GraphProto, name: str, used: set[str]) -> str | None:
    """The one value behind elementwise operators: the first that the logits hang on, or that is made in another way."""
    constants = {tensor.name for tensor in graph.initializer}
    own, found, waiting, seen = made_in(graph), set[str](), [name], set[str]()
    while waiting:
        value = waiting.pop()
        node = producer(graph, value)
        if value in seen or value in constants or (node is not None and node.op_type == "Constant"):
            continue
        seen.add(value)
        if node is None:
            found |= {value} if value not in own or value in used else set()
        elif not used.isdisjoint(node.output) or node.op_type not in ELEMENTWISE:
            found.add(value)
        else:
            waiting += [read for read in node.input if read]
    return found.pop() if len(found) == 1 else None


REPAIR = Repair(
    name="plain-presents",
    mends=("cached-differs", "present-rewrites-past"),
    stage="slots",
    keeps="first-step",
    apply=apply,
)
