"""Presents that a graph changes on their way to the output alone: rounded, clipped, scaled, cast and cast back.

The attention of the same call uses another value than the one that the loop feeds back.
"""

from kvdoctor.analysis.dataflow.operators import COMPUTES
from kvdoctor.contract import CacheContract, PhaseName
from kvdoctor.model.proto import GraphProto, NodeProto, TensorProto
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
    """The value `name` that is returned, the value `used` that the attention uses, and what stands between them.

    `operators` are those of the nodes between them, `rounding` the nodes that drop bits, the first one first.
    """

    graph: GraphProto
    name: str
    used: str
    operators: frozenset[str]
    rounding: tuple[NodeProto, ...]

    @property
    def rounds(self) -> bool:
        """Whether a node between them drops bits."""
        return bool(self.rounding)

    @property
    def words(self) -> tuple[str, ...]:
        """The nodes that drop bits, as reports name them."""
        return tuple(f'{node.op_type} "{node.name or node.output[0]}"' for node in self.rounding)


def find_processed(view: GraphView, output: str, logits: str, *, cached: bool) -> ProcessedPresent | None:
    """Find what stands between a present and the value that the logits depend on; None where nothing does."""
    scope, name = view.behind(output, cached)
    used_scope, used_name = view.behind(logits, cached)
    graph = scope.graph
    if graph is not used_scope.graph or producer(graph, name) is None:
        return None
    return _find_between(graph, name, needed_for(graph, [used_name]))


def _find_between(graph: GraphProto, name: str, needed: set[str]) -> ProcessedPresent | None:
    """What stands between a value and the one among those `needed` for the logits that it is made of."""
    right, nodes = _follow_back(graph, name, needed)
    if right is None or right == Scope(graph, "").through(name, {"Identity"}):
        return None
    rounding = [node for node in nodes if node.op_type in ROUNDING and not _widens(node)]
    operators = frozenset("Identity" if _widens(node) else node.op_type for node in nodes)
    return ProcessedPresent(graph, name, right, operators, tuple(reversed(rounding)))


def _find_processed_entries(view: GraphView, output: str, logits: str, *, cached: bool) -> ProcessedPresent | None:
    """What stands between the new entries of a present, joined with its past, and those the logits depend on."""
    scope, name = view.behind(output, cached)
    used_scope, used_name = view.behind(logits, cached)
    joined = producer(scope.graph, scope.through(name, {"Identity"}))
    if scope.graph is not used_scope.graph or joined is None or joined.op_type != "Concat":
        return None
    needed = needed_for(scope.graph, [used_name])
    found = (_find_between(scope.graph, part, needed) for part in joined.input)
    return next((processed for processed in found if processed is not None), None)


def list_rounded(view: GraphView, contract: CacheContract, phase: PhaseName = "decode") -> dict[str, ProcessedPresent]:
    """The presents of a phase that are rounded on the way to the output alone, whole or their new entries, by name."""
    logits, cached = contract.graph(phase).port("logits"), phase == "decode"
    outputs = [slot.present if cached else slot.filled_by for slot in contract.slots]
    if logits is None or logits.name not in view.outputs:
        return {}
    given = [name for name in outputs if name in view.outputs]
    found = {
        name: find_processed(view, name, logits.name, cached=cached)
        or _find_processed_entries(view, name, logits.name, cached=cached)
        for name in given
        if name is not None
    }
    return {name: processed for name, processed in found.items() if processed is not None and processed.rounds}


def _widens(node: NodeProto) -> bool:
    return node.op_type == "Cast" and any(a.name == "to" and a.i in WIDE for a in node.attribute)


def _follow_back(graph: GraphProto, name: str, used: set[str]) -> tuple[str | None, list[NodeProto]]:
    """The one value behind elementwise operators: the first that the logits use, or that another operator makes.

    The nodes behind it come with it, the last one first.
    """
    constants = {tensor.name for tensor in graph.initializer}
    own, found, waiting, seen = own_names(graph), set[str](), [name], set[str]()
    nodes: list[NodeProto] = []
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
            nodes.append(node)
            # Scales and zero points of a quantization may be computed: they are no source of the value.
            waiting += [read for read in (node.input[:1] if node.op_type in QUANTIZING else node.input) if read]
    return _drop_scales(graph, found), nodes


def _drop_scales(graph: GraphProto, found: set[str]) -> str | None:
    """The one value among some of which the others are reductions: its scales (ReduceMax and the like)."""
    for name in found:
        others = found - {name}
        reduced = all((made := producer(graph, one)) and made.op_type.startswith("Reduce") for one in others)
        if reduced and all(name in needed_for(graph, [one]) for one in others):
            return name
    return None
