"""Presents that a graph changes on their way to the output alone: rounded, clipped, scaled, cast and cast back.

The attention of the same call uses another value than the one that the loop feeds back.
"""

from functools import cached_property

from kvdoctor.analysis.dataflow.walks import COMPUTES, Walk
from kvdoctor.contract import CacheContract, PhaseName
from kvdoctor.model.operators import has, operators_with
from kvdoctor.model.proto import GraphProto, NodeProto, TensorProto
from kvdoctor.model.traverse import needed_for, own_names, values_read
from kvdoctor.model.view import GraphView, Scope
from kvdoctor.records import record

QUANTIZING = operators_with("quantize", "quantize-dynamically", "dequantize")
ROUNDING = operators_with("round", "cast") | QUANTIZING
WIDE = (TensorProto.FLOAT, TensorProto.DOUBLE)
"""Types that a Cast to drops no bits of a float type that caches have."""
ELEMENTWISE = operators_with("copy", "select") | COMPUTES | ROUNDING
MOST_NODES = 1000
"""Nodes before a present that are followed. What exporters put there is a dozen."""


@record(slots=False)
class ProcessedPresent:
    """The value `name` that is returned, the value `used` that the attention uses, and the `nodes` between them."""

    graph: GraphProto
    name: str
    used: str
    nodes: tuple[NodeProto, ...]

    @cached_property
    def rounding(self) -> tuple[NodeProto, ...]:
        """The nodes that drop bits."""
        return tuple(node for node in self.nodes if node.op_type in ROUNDING and not _widens(node))

    @property
    def operators(self) -> frozenset[str]:
        """The operators of the nodes; one that only passes on what it takes is an Identity."""
        return frozenset("Identity" if _widens(node) else node.op_type for node in self.nodes)

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
    return _Search(view, logits, cached).find(output)


def list_rounded(view: GraphView, contract: CacheContract, phase: PhaseName = "decode") -> dict[str, ProcessedPresent]:
    """The presents of a phase that are rounded on the way to the output alone, whole or their new entries, by name."""
    logits, cached = contract.graph(phase).port("logits"), phase == "decode"
    outputs = [slot.present if cached else slot.filled_by for slot in contract.slots]
    if logits is None or logits.name not in view.outputs:
        return {}
    search = _Search(view, logits.name, cached)
    given = [name for name in outputs if name is not None and name in view.outputs]
    found = {name: search.find(name) or search.find_entries(name) for name in given}
    return {name: processed for name, processed in found.items() if processed is not None and processed.rounds}


@record(slots=False)
class _Search:
    """Looks for what is done to presents alone; what it knows of a graph is found once for all presents."""

    view: GraphView
    logits: str
    cached: bool

    @cached_property
    def scope(self) -> Scope:
        """The graph or the branch that makes the logits."""
        return self.view.behind(self.logits, self.cached)[0]

    @cached_property
    def used(self) -> set[str]:
        """The values that the logits depend on."""
        return needed_for(self.scope.graph, [self.view.behind(self.logits, self.cached)[1]])

    @cached_property
    def own(self) -> set[str]:
        """The values of the graph itself."""
        return own_names(self.scope.graph)

    def find(self, output: str) -> ProcessedPresent | None:
        """What stands between a present and the value that the logits depend on."""
        scope, name = self.view.behind(output, self.cached)
        if scope.graph is not self.scope.graph or name not in self.scope.producers:
            return None
        return self._find_between(name)

    def find_entries(self, output: str) -> ProcessedPresent | None:
        """What stands between the new entries of a present, joined with its past, and those the logits depend on."""
        scope, name = self.view.behind(output, self.cached)
        joined = self.scope.producers.get(self.scope.through(name))
        if scope.graph is not self.scope.graph or joined is None or not has(joined.op_type, "join"):
            return None
        found = (self._find_between(part) for part in joined.input)
        return next((processed for processed in found if processed is not None), None)

    def _find_between(self, name: str) -> ProcessedPresent | None:
        """What stands between a value and the one among those the logits depend on that it is made of."""
        right, nodes = self._follow_back(name)
        if right is None or right == self.scope.through(name):
            return None
        return ProcessedPresent(self.scope.graph, name, right, tuple(reversed(nodes)))

    def _follow_back(self, name: str) -> tuple[str | None, list[NodeProto]]:
        """The one value that elementwise operators process: the first that the logits use, or another operator makes.

        The nodes after it come with it, the last one first. Neither where there are too many of them.
        """
        found, waiting, seen = set[str](), [name], set[str]()
        nodes: list[NodeProto] = []
        while waiting:
            value = waiting.pop()
            node = self.scope.producers.get(value)
            constant = value in self.scope.initializers or (node is not None and has(node.op_type, "constant"))
            if value in seen or constant:
                continue
            seen.add(value)
            if node is None:
                found |= {value} if value not in self.own or value in self.used else set()
            elif not self.used.isdisjoint(node.output) or node.op_type not in ELEMENTWISE:
                found.add(value)
            elif len(nodes) == MOST_NODES:
                return None, []
            else:
                nodes.append(node)
                # Scales and zero points of a quantization may be computed: they are no source of the value.
                waiting += [read for read in (node.input[:1] if node.op_type in QUANTIZING else node.input) if read]
        return self._drop_scales(found), nodes

    def _drop_scales(self, found: set[str]) -> str | None:
        """The one value among some of which the others are reductions: its scales (ReduceMax and the like)."""
        made = ((one, self.scope.producers.get(one)) for one in found)
        scales = {one for one, node in made if node is not None and has(node.op_type, "reduce")}
        for name in found if found == scales else found - scales:
            if found - {name} <= scales and all(self._depends(one, name) for one in found - {name}):
                return name
        return None

    def _depends(self, name: str, on: str) -> bool:
        """Whether a value is made of another, by the nodes nearest to it."""
        walk = Walk([name], most=MOST_NODES + 1)
        for value in walk:
            if value == on:
                return True
            node = self.scope.producers.get(value)
            walk.add(values_read(node) if node is not None else ())
        return False


def _widens(node: NodeProto) -> bool:
    """Whether a cast drops no bits; a CastLike, whose type nothing here tells, counts as one that does not."""
    return has(node.op_type, "cast") and not any(a.name == "to" and a.i not in WIDE for a in node.attribute)
