"""Presents that a graph changes on their way to the output alone: rounded, clipped, scaled, cast and cast back.

The attention of the same call uses another value than the one that the loop feeds back.
"""

from kvdoctor.analysis.dataflow.operators import COMPUTES
from kvdoctor.model.proto import GraphProto, TensorProto
from kvdoctor.model.traverse import needed_for, own_names, producer
from kvdoctor.model.view import GraphView, Scope
from kvdoctor.records import record

QUANTIZING = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
ROUNDING = ("Round", "Floor", "Ceil", "Cast", *QUANTIZING)
WIDE = (TensorProto.FLOAT, TensorProto.DOUBLE)
"""Types that a Cast to drops no bits of a float type that caches have."""
ELEMENTWISE = {"Identity", "Where", *COMPUTES, *ROUNDING}


@record
class ProcessedPresent:
    """The value `name` that is returned, the value `used` that the attention uses, and the operators between them."""

    graph: GraphProto
    name: str
    used: str
    operators: frozenset[str]

    @property
    def rounds(self) -> bool:
        """Whether an operator between them drops bits."""
        return not self.operators.isdisjoint(ROUNDING)


def find_processed(view: GraphView, output: str, logits: str, *, cached: bool) -> ProcessedPresent | None:
    """Find what stands between a present and the value that the logits depend on; None where nothing does."""
    scope, name = view.behind(output, cached)
    used_scope, used_name = view.behind(logits, cached)
    graph = scope.graph
    if graph is not used_scope.graph or producer(graph, name) is None:
        return None
    right, operators = _follow_back(graph, name, needed_for(graph, [used_name]))
    if right is None or right == Scope(graph, "").through(name, {"Identity"}):
        return None
    return ProcessedPresent(graph, name, right, operators)


def _follow_back(graph: GraphProto, name: str, used: set[str]) -> tuple[str | None, frozenset[str]]:
    """The one value behind elementwise operators: the first that the logits use, or that another operator makes."""
    constants = {tensor.name for tensor in graph.initializer}
    own, found, waiting, seen = own_names(graph), set[str](), [name], set[str]()
    operators = set[str]()
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
            widens = node.op_type == "Cast" and any(a.name == "to" and a.i in WIDE for a in node.attribute)
            operators.add("Identity" if widens else node.op_type)
            # Scales and zero points of a quantization may be computed: they are no source of the value.
            waiting += [read for read in (node.input[:1] if node.op_type in QUANTIZING else node.input) if read]
    return (found.pop() if len(found) == 1 else None), frozenset(operators)
