"""What a graph asks of its runtime, read off the graph: IR version, opset, operators with their attributes."""

from collections.abc import Iterator
from weakref import WeakKeyDictionary

from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import STANDARD, nodes_in, opset_version
from kvdoctor.model.view import GraphView
from kvdoctor.records import record
from kvdoctor.runtime.targets.limits import ReleaseLimits, tested_operators

CONTRIB_IN_STANDARD = "ai.onnx"
"""Under this name the table has operators that ONNX Runtime added to the standard domain by itself."""


@record
class Demands:
    """`features` are those of the table, each with the name of a node that needs it."""

    ir: int
    opset: int
    features: dict[str, str]

    def lacking(self, limits: ReleaseLimits) -> dict[str, str]:
        """The features that a release lacks. Features that its opset already rules out are left out."""
        if self.opset > limits.opset:
            return {name: node for name, node in self.features.items() if ":" in name and name in limits.unsupported}
        return {name: node for name, node in self.features.items() if name in limits.unsupported}


def read_demands(view: GraphView) -> Demands:
    """What a graph asks for, at any depth and in its functions. Read once for each graph."""
    if view not in _READ:
        _READ[view] = _demands(view)
    return _READ[view]


_READ: WeakKeyDictionary[GraphView, Demands] = WeakKeyDictionary()


def _demands(view: GraphView) -> Demands:
    opset = max([view.opsets.get("", 1), *(opset_version(f.opset_import) for f in view.model.functions)])
    own = {(function.domain, function.name) for function in view.model.functions}
    found: dict[str, str] = {}
    seen: set[tuple[str, str, int]] = set()
    for node, version in _nodes(view):
        kind = node.domain, node.op_type, version
        if kind[:2] in own or kind in seen:
            continue
        if not tested_operators().by_attribute(
            CONTRIB_IN_STANDARD if node.domain in STANDARD else node.domain, node.op_type
        ):
            seen.add(kind)  # the next one asks for the same
        for feature in _features(node, version):
            found.setdefault(feature, node.name)
    return Demands(int(view.model.ir_version), opset, found)


def _nodes(view: GraphView) -> Iterator[tuple[NodeProto, int]]:
    for scope in view.scopes():
        yield from ((node, view.opsets.get("", 1)) for node in scope.graph.node)
    for function in view.model.functions:
        yield from ((node, opset_version(function.opset_import)) for node in nodes_in(function.node))


def _features(node: NodeProto, version: int) -> Iterator[str]:
    known, attributes = tested_operators(), {attribute.name for attribute in node.attribute}
    if node.domain not in STANDARD:
        yield from known.other(node.domain, node.op_type, attributes, len(node.input))
        return
    yield from known.other(CONTRIB_IN_STANDARD, node.op_type, attributes, len(node.input))
    if (feature := known.standard(node.op_type, version)) is not None:
        yield feature
