"""What a graph asks of its runtime: IR version, opset, operators with their attributes; and the oldest that has all."""

from collections.abc import Iterator
from weakref import WeakKeyDictionary

from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import STANDARD, nodes_in, opset_version
from kvdoctor.model.view import GraphView
from kvdoctor.records import record
from kvdoctor.runtime.targets.limits import (
    ReleaseLimits,
    describe_feature,
    limits_of,
    releases,
    tested_operators,
)

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


@record
class OldestRelease:
    """`release` and every newer measured one open the graph; `because` is what the one before it lacks, if any."""

    release: str
    because: str = ""


def find_oldest(view: GraphView) -> OldestRelease | None:
    """The oldest release that opens a graph; None if not even the newest measured one does."""
    asked, found = read_demands(view), None
    for name in reversed(releases()):
        limits = limits_of(name)
        if limits is None:
            continue
        if lacks := _find_lack(asked, limits):
            return OldestRelease(found, lacks) if found is not None else None
        found = name
    return OldestRelease(found) if found is not None else None


def _find_lack(asked: Demands, limits: ReleaseLimits) -> str:
    """What a release lacks, in words; empty if nothing."""
    if asked.opset > limits.opset:
        return f"opset {asked.opset}"
    if asked.ir > limits.ir:
        return f"IR version {asked.ir}"
    return ", ".join(sorted(map(describe_feature, asked.lacking(limits)))[:1])
