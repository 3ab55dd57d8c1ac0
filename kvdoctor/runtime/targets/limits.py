"""What each release of onnxruntime takes and computes, and what a graph asks of it.

What a release takes is measured: `docs/make_limits.py` opens small models in every release and writes `limits.json`.
`meanings.json` has the operators that compute something else from some release on, which a test runs on either side.
"""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal
from weakref import WeakKeyDictionary

from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import STANDARD, nodes_in, opset_version
from kvdoctor.model.view import GraphView
from kvdoctor.records import from_plain, record

INPUTS = "inputs-"
FILE = Path(__file__).with_name("limits.json")
MEANINGS = Path(__file__).with_name("meanings.json")


@record
class ReleaseLimits:
    """One release. `pythons` are versions of Python that it has wheels for and that kvdoctor can run in.

    `unsupported` are names of features, as `TestedOperators` makes them, that a model may not use.
    """

    release: str
    ir: int
    opset: int
    pythons: tuple[str, ...]
    unsupported: frozenset[str]


@record
class TestedOperators:
    """The operators that were tried in every release.

    `since` are the versions of each standard operator that were tried, `contrib` the attributes of each operator of
    other domains, by `DOMAIN:OPERATOR`.
    """

    since: dict[str, tuple[int, ...]]
    contrib: dict[str, tuple[str, ...]]

    def standard(self, operator: str, opset: int) -> str | None:
        """The feature that a standard operator is at an opset: `Attention-23`; None where it was not tried."""
        fitting = [version for version in self.since.get(operator, ()) if version <= opset]
        return f"{operator}-{fitting[-1]}" if fitting else None

    def other(self, domain: str, operator: str, attributes: set[str], inputs: int) -> tuple[str, ...]:
        """The features that an operator of another domain is: itself, its attributes, the number of its inputs.

        `inputs-9` is one with nine inputs, empty ones counted.
        """
        name = f"{domain}:{operator}"
        if name not in self.contrib:
            return ()
        has = {*attributes, f"{INPUTS}{inputs}"}
        return (name, *(f"{name}.{attribute}" for attribute in self.contrib[name] if attribute in has))


@cache
def _data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@cache
def releases() -> tuple[str, ...]:
    """The releases that were measured, from old to new."""
    return tuple(_data()["releases"])


@cache
def tested_operators() -> TestedOperators:
    """What was tried."""
    since = {name: tuple(versions) for name, versions in _data()["operators"].items()}
    return TestedOperators(since, {name: tuple(attributes) for name, attributes in _data()["contrib"].items()})


def limits_of(release: str) -> ReleaseLimits | None:
    """What was measured of a release; None beyond what was.

    For a patch release that was not measured, only what holds for all measured patches of its line: some added
    operators.
    """
    line = [name for name in releases() if name.rpartition(".")[0] == release.rpartition(".")[0]]
    rows = [_data()["releases"][name] for name in ([release] if release in line else line)]
    if not rows:
        return None
    return ReleaseLimits(
        release=release,
        ir=max(row["ir"] for row in rows),
        opset=max(row["opset"] for row in rows),
        pythons=tuple(rows[-1]["pythons"]),
        unsupported=frozenset(rows[0]["unsupported"]).intersection(*(row["unsupported"] for row in rows)),
    )


def newest_limits() -> ReleaseLimits:
    """The newest release that was measured."""
    found = limits_of(releases()[-1])
    assert found is not None  # noqa: S101 - it is in the table
    return found


def describe_feature(feature: str) -> str:
    """`Attention-23` as `Attention of opset 23`, `com.microsoft:GroupQueryAttention.softcap` as its attribute."""
    domain, _, name = feature.rpartition(":")
    if not domain:
        operator, _, since = name.rpartition("-")
        return f"{operator} of opset {since}"
    operator, _, attribute = name.partition(".")
    whole = operator if domain == "ai.onnx" else f"{domain} {operator}"
    if attribute.startswith(INPUTS):
        return f"{whole} with {attribute.removeprefix(INPUTS)} inputs"
    return f"attribute {attribute} of {whole}" if attribute else whole


def describe_operator(operator: str) -> str:
    """`com.microsoft:GroupQueryAttention` as `com.microsoft GroupQueryAttention`."""
    return operator.replace(":", " ")


def operator_of(feature: str) -> str:
    """The operator that a feature belongs to: of an attribute the operator, of an operator itself."""
    domain, separator, name = feature.rpartition(":")
    return f"{domain}{separator}{name.partition('.')[0]}"


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

    def describe_lacking(self, limits: ReleaseLimits) -> tuple[str, ...]:
        """The operators and attributes that a release lacks, without attributes of operators that it lacks."""
        names = self.lacking(limits).keys()
        return tuple(
            describe_feature(name) for name in names if operator_of(name) == name or operator_of(name) not in names
        )

    def first_lacking(self, limits: ReleaseLimits) -> str:
        """What a release lacks first: the opset, the IR version or an operator; empty if nothing."""
        if self.opset > limits.opset:
            return f"opset {self.opset}"
        if self.ir > limits.ir:
            return f"IR version {self.ir}"
        return ", ".join(sorted(map(describe_feature, self.lacking(limits)))[:1])


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
        domain = CONTRIB_IN_STANDARD if node.domain in STANDARD else node.domain
        if not tested_operators().contrib.get(f"{domain}:{node.op_type}"):
            seen.add(kind)  # whatever its attributes and inputs, the next one asks for the same
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
        if lacks := asked.first_lacking(limits):
            return OldestRelease(found, lacks) if found is not None else None
        found = name
    return OldestRelease(found) if found is not None else None


@record
class Meaning:
    """A change of what an operator computes on the CPU, with the same inputs and attributes.

    Attributes:
        operator: With its domain, `com.microsoft:GroupQueryAttention`; a standard one without.
        uses: What a node has that is concerned, one of these combinations: an attribute above 0, `input 3` (counted
            from 0), `no input 4`.
        last: The newest measured release with the old meaning.
        since: The oldest measured release with the new one.
        calls: In which calls they differ: `chunk` are several new tokens on a past.
        predicts: Whether the old meaning is wrong for every decoder, so that a target that has it needs no run.
        before: What it computes up to `last`.
        after: What it computes from `since` on.
        source: An address.
    """

    operator: str
    uses: tuple[tuple[str, ...], ...]
    last: str
    since: str
    calls: Literal["all", "chunk", "batch"]
    predicts: bool
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        """Both meanings in one sentence."""
        name = describe_operator(self.operator)
        return f"{name} up to {self.last}: {self.before}; from {self.since} on: {self.after} ({self.source})"


@cache
def meanings() -> tuple[Meaning, ...]:
    """The table."""
    return from_plain(tuple[Meaning, ...], json.loads(MEANINGS.read_text(encoding="utf-8")))


def find_meanings(view: GraphView) -> dict[Meaning, tuple[str, ...]]:
    """The changes of meaning that concern a graph, each with the nodes, by name or by the first value they make."""
    found: dict[Meaning, tuple[str, ...]] = {}
    own = {(function.domain, function.name) for function in view.model.functions}
    for node, _ in _nodes(view):
        operator = node.op_type if node.domain in STANDARD else f"{node.domain}:{node.op_type}"
        for one in meanings() if (node.domain, node.op_type) not in own else ():
            if one.operator == operator and any(all(_has(node, what) for what in use) for use in one.uses):
                found[one] = (*found.get(one, ()), node.name or next(iter(node.output), ""))
    return found


def _has(node: NodeProto, what: str) -> bool:
    """Whether a node has what `Meaning.uses` names."""
    name, _, index = what.rpartition("input ")
    if index.isdecimal():
        given = len(node.input) > int(index) and node.input[int(index)] != ""
        return given != (name == "no ")
    return any(one.name == what and (one.i > 0 or one.f > 0) for one in node.attribute)
