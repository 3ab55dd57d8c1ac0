"""The flat list of nodes of a graph: local functions and chosen branches written out in the place of their calls.

A value has one name in the whole flat graph. One traversal (`Flattener`) has two subclasses, for a reason:
values are followed through `kvdoctor.model.flow`, which writes out bodies of any control flow, describes broken graphs
and copies no node; `kvdoctor.diagnose.locate.runnable` is run again, so that there values keep their names, undecided
branches and loops stay bodies, and what cannot be run is refused. No weights, no runtime.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, TypeVar

from kvdoctor.model.operators import Trait, has
from kvdoctor.model.proto import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import find_attribute, nodes_in, normalize_domain
from kvdoctor.records import record

MOST_CALLS = 50
"""Functions within functions."""

FunctionKey = tuple[str, str]
"""Domain and name of a local function."""


class TooLarge(Exception):
    """The graph, written out, has more nodes than can be followed, or functions too deep in one another."""


class ScopeNames(dict[str, str]):
    """The flat names for the values of a graph or body; those of the graph around it are looked up there."""

    def __init__(self, outer: "ScopeNames | None" = None) -> None:
        super().__init__()
        self.outer = outer

    def of(self, name: str, default: str) -> str:
        """The flat name for a value of this graph or of one around it."""
        scope: ScopeNames | None = self
        while scope is not None:
            found = scope.get(name)
            if found is not None:
                return found
            scope = scope.outer
        return default


@dataclass(slots=True, eq=False)
class FlatNode:
    """A node of the file under flat names. `call` holds the attributes of the call in whose function it stands."""

    proto: NodeProto
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    call: Mapping[str, AttributeProto] | None = None
    index: int = 0
    op: str = ""

    def __post_init__(self) -> None:
        self.op = str(self.proto.op_type)

    def has(self, *traits: Trait) -> bool:
        """Whether its operator has one of some traits."""
        return has(self.op, *traits)

    def input(self, index: int) -> str:
        """The input of that number; empty where there is none, as in a node that is cut short."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def output(self, index: int = 0) -> str:
        """The output of that number; empty where there is none."""
        return self.outputs[index] if index < len(self.outputs) else ""

    @property
    def domain(self) -> str:
        """The operator's domain; empty for the operators of ONNX itself."""
        return normalize_domain(self.proto.domain)

    def attribute(self, name: str) -> AttributeProto | None:
        """The attribute of that name; inside a function it may be the caller's."""
        found = find_attribute(self.proto, name)
        if found is not None and found.ref_attr_name and self.call is not None:
            return self.call.get(found.ref_attr_name)
        return found

    def number(self, name: str, default: int) -> int:
        """An integer attribute."""
        attribute = self.attribute(name)
        return int(attribute.i) if attribute is not None else default

    def real(self, name: str, default: float) -> float:
        """An attribute that is a float."""
        attribute = self.attribute(name)
        return float(attribute.f) if attribute is not None else default

    def text(self, name: str, default: str) -> str:
        """An attribute that is a text."""
        attribute = self.attribute(name)
        return bytes(attribute.s).decode("utf-8", "replace") if attribute is not None else default

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers, or None where the attribute is not there."""
        attribute = self.attribute(name)
        return tuple(attribute.ints) if attribute is not None else None


AnyNode = TypeVar("AnyNode", bound=FlatNode)


@dataclass(eq=False, repr=False)
class FlatGraph(Generic[AnyNode]):
    """The flat graph. `results` gives the value that each graph output returns."""

    nodes: list[AnyNode] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)

    @cached_property
    def producers(self) -> dict[str, AnyNode]:
        """The node that makes each value."""
        return {name: node for node in self.nodes for name in node.outputs if name}


@record
class Site:
    """Where nodes stand: the names known there, the prefix of new ones, the path for people, and the call around them.

    `results` are the flat names that some values made there must get.
    """

    names: ScopeNames
    prefix: str = ""
    path: str = ""
    call: Mapping[str, AttributeProto] | None = None
    results: Mapping[str, str] = field(default_factory=dict)


class Flattener(ABC, Generic[AnyNode]):
    """The traversal: writes nodes under flat names, with functions and chosen branches in place.

    `branches` names the branch that an `If` is known to take, by its first output; `decides` collects the conditions of
    branches that are written out.
    """

    def __init__(self, model: ModelProto, most_nodes: int, branches: Mapping[str, str]) -> None:
        self.functions = {(normalize_domain(f.domain), f.name): f for f in model.functions}
        self.most_nodes, self.branches = most_nodes, branches
        self.nodes: list[AnyNode] = []
        self.constants: dict[str, TensorProto] = {}
        self.decides: set[str] = set()
        self.calling: list[FunctionKey] = []
        self.bodies = 0
        self.sizes: dict[FunctionKey, int] = {}

    @abstractmethod
    def name_value(self, name: str, site: Site) -> str:
        """A flat name for a value that is made at a site."""

    @abstractmethod
    def sparse_constant(self, sparse: Any) -> TensorProto:
        """What stands for a sparse initializer."""

    @abstractmethod
    def constant_tensor(self, proto: NodeProto) -> TensorProto | None:
        """The tensor of a Constant, where it needs no node."""

    @abstractmethod
    def writes_out(self, key: FunctionKey, function: FunctionProto) -> bool:
        """Whether the body of a function takes the place of a call."""

    @abstractmethod
    def write_other(self, proto: NodeProto, inputs: tuple[str, ...], outputs: tuple[str, ...], site: Site) -> None:
        """Write any other node."""

    @abstractmethod
    def write_identity(self, sources: tuple[str, ...], target: str, site: Site) -> None:
        """Give a value, or one of several, another name."""

    def write_graph(self, graph: GraphProto, site: Site) -> None:
        """Write out a graph or subgraph."""
        tensors = [(tensor.name, tensor) for tensor in graph.initializer]
        tensors += [(sparse.values.name, self.sparse_constant(sparse)) for sparse in graph.sparse_initializer]
        for name, tensor in tensors:
            site.names[name] = site.names.get(name) or self.name_value(name, site)
            self.constants[site.names[name]] = tensor
        self.write_nodes(graph.node, site)

    def write_nodes(self, nodes: Iterable[NodeProto], site: Site) -> None:
        """Write out nodes in the order of the file."""
        listed, names, wanted = list(nodes), site.names, dict(site.results)
        for proto in listed:
            for name in proto.output:
                if name:
                    names[name] = wanted.pop(name) if name in wanted else self.name_value(name, site)
        for proto in listed:
            self._write_node(proto, site)
        for inner, outer in wanted.items():  # made by no node here: a value from around, or a constant
            self.write_identity((names.of(inner, site.prefix + inner),), outer, site)

    def add(self, node: AnyNode) -> None:
        """Append a node.

        Raises:
            TooLarge: there are too many.
        """
        self.nodes.append(node)
        if len(self.nodes) > self.most_nodes:
            raise self._too_large()

    def _too_large(self) -> TooLarge:
        return TooLarge(f"the graph, with its functions written out, has more than {self.most_nodes:,} nodes")

    def _write_node(self, proto: NodeProto, site: Site) -> None:
        names, key = site.names, (normalize_domain(proto.domain), proto.op_type)
        inputs = tuple(names.of(name, site.prefix + name) if name else "" for name in proto.input)
        outputs = tuple(names[name] if name else "" for name in proto.output)
        if key in self.functions and self.writes_out(key, self.functions[key]):
            self._write_call(proto, inputs, outputs, site)
            return
        if has(proto.op_type, "constant") and outputs and outputs[0]:
            tensor = self.constant_tensor(proto)
            if tensor is not None:
                self.constants[outputs[0]] = tensor
                return
        wanted = self.branches.get(next(filter(None, outputs), "")) if has(proto.op_type, "branch") else None
        branch = next((a.g for a in proto.attribute if a.name == wanted), None) if wanted is not None else None
        if branch is None:
            self.write_other(proto, inputs, outputs, site)
            return
        self.decides.update(inputs)
        path = f'{site.path}If "{proto.name}", {wanted}, '
        ends = [value.name for value in branch.output]
        self._write_body(branch, ends, outputs, Site(ScopeNames(names), self.next_prefix(), path, site.call))

    def _write_call(self, proto: NodeProto, inputs: tuple[str, ...], outputs: tuple[str, ...], site: Site) -> None:
        """The body of a local function in place of the call."""
        key = normalize_domain(proto.domain), proto.op_type
        if len(self.nodes) + self._size(key, 0) > self.most_nodes:
            raise self._too_large()  # before it is begun: it would take long
        function, names = self.functions[key], ScopeNames()
        names.update({name: inputs[index] if index < len(inputs) else "" for index, name in enumerate(function.input)})
        attributes = {a.name: a for a in function.attribute_proto} | resolved_attributes(proto, site.call)
        path = f'{site.path}function {function.name} called by "{proto.name or next(iter(proto.output), "")}", '
        self.calling.append(key)
        self._write_body(function, function.output, outputs, Site(names, self.next_prefix(), path, attributes))
        self.calling.pop()

    def _write_body(
        self, body: "GraphProto | FunctionProto", ends: Iterable[str], outputs: Sequence[str], site: Site
    ) -> None:
        """Write out a body whose results get the names of the outer outputs."""
        results, again = dict[str, str](), list[tuple[str, str]]()
        for name, outer in zip(ends, outputs, strict=False):
            if outer and name in results:
                again.append((name, outer))
            elif outer:
                results[name] = outer
        within = Site(site.names, site.prefix, site.path, site.call, results)
        if isinstance(body, FunctionProto):
            self.write_nodes(body.node, within)
        else:
            self.write_graph(body, within)
        for name, outer in again:
            self.write_identity((site.names.of(name, site.prefix + name),), outer, within)

    def next_prefix(self) -> str:
        """The prefix for the names of the next body."""
        self.bodies += 1
        return f"{self.bodies}:"

    def _size(self, key: FunctionKey, depth: int) -> int:
        """Nodes of a function with all that it calls, also from the bodies of control flow."""
        if depth > MOST_CALLS:
            raise TooLarge(f"the local functions of the graph call one another more than {MOST_CALLS} deep")
        if key not in self.sizes:
            self.sizes[key] = 0  # counts for a call of itself
            called = [(normalize_domain(n.domain), n.op_type) for n in nodes_in(self.functions[key].node)]
            self.sizes[key] = sum(1 + (self._size(c, depth + 1) if c in self.functions else 0) for c in called)
        return self.sizes[key]


def resolved_attributes(proto: NodeProto, call: Mapping[str, AttributeProto] | None) -> dict[str, AttributeProto]:
    """The attributes of a node by name; those that refer to the caller's are the caller's, where it gives them."""
    found = dict[str, AttributeProto]()
    for attribute in proto.attribute:
        given = (call or {}).get(attribute.ref_attr_name) if attribute.ref_attr_name else attribute
        if given is not None:
            found[attribute.name] = given
    return found
