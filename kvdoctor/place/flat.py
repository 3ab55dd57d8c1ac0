"""A graph as one flat list of nodes that a runtime can still run: functions and taken branches written out.

`flow` reads a graph in order to follow it; here nothing may be lost, since what comes out is run again, cut and with
more outputs. A value keeps its name where that is free. Bodies of loops, and of an `If` whose branch is not known, stay
bodies.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kvdoctor.graph import bodies_of
from kvdoctor.onnx_schema import AttributeProto, FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto

STANDARD = ("", "ai.onnx")
MOST_NODES = 200_000
"""Nodes after functions are written out: more are not worth the minutes that running them again takes."""


class NotFlat(Exception):
    """The graph holds something that cannot be written out and run again; the text says what."""


@dataclass(slots=True, eq=False)
class FlatNode:
    """A node under the flat names; `proto.name` is unique. `origin` is that of the file, `scope` where it is."""

    proto: NodeProto
    origin: NodeProto
    scope: str
    reads: tuple[str, ...]

    @property
    def op(self) -> str:
        """The operator."""
        return str(self.proto.op_type)

    @property
    def domain(self) -> str:
        """Its domain; empty for the operators of ONNX itself."""
        return "" if self.proto.domain in STANDARD else str(self.proto.domain)

    @property
    def makes(self) -> list[str]:
        """The values that it makes."""
        return [name for name in self.proto.output if name]

    def attribute(self, name: str) -> AttributeProto | None:
        """The attribute of that name."""
        return next((a for a in self.proto.attribute if a.name == name), None)

    def number(self, name: str, default: int) -> int:
        """An integer attribute."""
        found = self.attribute(name)
        return int(found.i) if found is not None else default

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers, or None where the attribute is not there."""
        found = self.attribute(name)
        return tuple(found.ints) if found is not None else None


@dataclass
class Flat:
    """The flat graph. `results` gives the value behind each graph output, `labels` what the file calls a value."""

    model: ModelProto
    nodes: list[FlatNode] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    opsets: dict[str, int] = field(default_factory=dict)

    @cached_property
    def producers(self) -> dict[str, FlatNode]:
        """The node that makes each value."""
        return {name: node for node in self.nodes for name in node.makes}

    @cached_property
    def by_name(self) -> dict[str, FlatNode]:
        """The nodes by the names they have here."""
        return {str(node.proto.name): node for node in self.nodes}

    @property
    def ends(self) -> list[str]:
        """The computed outputs of the graph, and what nothing reads: the runtime computes that as well."""
        read = {name for node in self.nodes for name in node.reads}
        results = [value for value in self.results.values() if value in self.producers]
        loose = [name for node in self.nodes if read.isdisjoint(node.makes) for name in node.makes]
        return list(dict.fromkeys([*results, *loose]))

    @cached_property
    def keeps_calls(self) -> bool:
        """Whether a node or a body still calls a local function."""
        known = {(_domain(f.domain), f.name) for f in self.model.functions}
        return bool(known) and any(
            (_domain(proto.domain), proto.op_type) in known for node in self.nodes for proto in _with_bodies(node.proto)
        )

    def label(self, value: str) -> str:
        """What the file calls a value."""
        return self.labels.get(value, value)

    def before(self, values: Iterable[str], stop: Iterable[str] = ()) -> list[FlatNode]:
        """The nodes that values are computed by, in the order of the graph; `stop` are values that are given."""
        given, wanted, found = set(stop), list(values), set[str]()
        while wanted:
            name = wanted.pop()
            node = self.producers.get(name)
            if node is None or name in given or node.proto.name in found:
                continue
            found.add(str(node.proto.name))
            wanted += node.reads
        return [node for node in self.nodes if node.proto.name in found]


def flatten(model: ModelProto, taken: Mapping[str, bool]) -> Flat:
    """Write a model out. `taken` says which branch an `If` takes, by the first value that it makes.

    Raises:
        NotFlat: the graph cannot be written out.
    """
    writer = _Writer(model, taken)
    flat = writer.flat
    flat.opsets = {o.domain if o.domain not in STANDARD else "": o.version for o in model.opset_import} | writer.opsets
    names = _Names()
    for value in model.graph.input:
        names[value.name] = writer.fresh(value.name)
    writer.graph(model.graph, names, _Around())
    flat.results = {value.name: names.of(value.name) for value in model.graph.output}
    flat.nodes = _in_order(flat.nodes)
    for index, node in enumerate(flat.nodes):
        node.proto.name = f"n{index}"
    return flat


class _Names(dict[str, str]):
    """The flat names for the values of a graph; those of the graph around it are looked up there."""

    def __init__(self, outer: "_Names | None" = None) -> None:
        super().__init__()
        self.outer = outer

    def of(self, name: str) -> str:
        scope: _Names | None = self
        while scope is not None:
            if name in scope:
                return scope[name]
            scope = scope.outer
        return name


@dataclass(frozen=True)
class _Around:
    """Where nodes stand: the path in words, the attributes of the call, and the flat names that results must get."""

    scope: str = ""
    call: Mapping[str, AttributeProto] | None = None
    results: Mapping[str, str] = field(default_factory=dict)


class _Writer:
    def __init__(self, model: ModelProto, taken: Mapping[str, bool]) -> None:
        self.flat, self.taken = Flat(model), taken
        self.functions = {(_domain(f.domain), f.name): f for f in model.functions}
        self.opsets = {_domain(o.domain): o.version for o in model.opset_import}
        self.used: set[str] = set()
        self.calling: list[tuple[str, str]] = []

    def fresh(self, name: str) -> str:
        """A flat name for a value: its own, if that is free."""
        flat, number = name, 1
        while flat in self.used:
            number += 1
            flat = f"{name}~{number}"
        self.used.add(flat)
        if flat != name:
            self.flat.labels[flat] = name
        return flat

    def graph(self, graph: GraphProto, names: _Names, around: _Around) -> None:
        """Write out a graph or a branch; its results get the names that `around` wants for them."""
        if graph.sparse_initializer:
            raise NotFlat("the graph holds sparse initializers")
        for tensor in graph.initializer:
            name = names.get(tensor.name) or self.fresh(tensor.name)
            names[tensor.name] = name
            self.flat.constants[name] = tensor
        self.nodes(graph.node, names, around)

    def nodes(self, nodes: Iterable[NodeProto], names: _Names, around: _Around) -> None:
        listed, bound = list(nodes), dict(around.results)
        for node in listed:
            for name in filter(None, node.output):
                names[name] = bound.pop(name) if name in bound else self.fresh(name)
        for node in listed:
            self._node(node, names, around)
        for inner, outer in bound.items():  # a result that no node here makes: a value from around, or a constant
            self._same(names.of(inner), outer, around)

    def _node(self, proto: NodeProto, names: _Names, around: _Around) -> None:
        key = (_domain(proto.domain), proto.op_type)
        function = self.functions.get(key)
        if function is not None and key not in self.calling and self._fits(function):
            self._call(proto, function, names, around)
            return
        outputs = [names[name] if name else "" for name in proto.output]
        first = next(filter(None, outputs), "")
        if proto.op_type == "Constant" and first:
            value = next((a.t for a in proto.attribute if a.name == "value" and a.HasField("t")), None)
            if value is not None:
                self.flat.constants[first] = value
                return
        if proto.op_type == "If" and first in self.taken:
            self._branch(proto, self.taken[first], names, around, outputs)
            return
        copy = NodeProto(op_type=proto.op_type, domain=proto.domain)
        copy.input.extend(names.of(name) if name else "" for name in proto.input)
        copy.output.extend(outputs)
        copy.attribute.extend(_attributes(proto, around.call))
        free: list[str] = []
        for attribute in copy.attribute:
            for body in bodies_of(attribute):
                free += _rename(body, names, around.call)
        self._add(copy, proto, around, (*filter(None, copy.input), *free))

    def _add(self, proto: NodeProto, origin: NodeProto, around: _Around, reads: tuple[str, ...]) -> None:
        self.flat.nodes.append(FlatNode(proto, origin, around.scope, reads))
        if len(self.flat.nodes) > MOST_NODES:
            raise NotFlat(f"the graph, with its functions written out, has more than {MOST_NODES:,} nodes")

    def _same(self, source: str, target: str, around: _Around) -> None:
        proto = NodeProto(op_type="Identity", input=[source], output=[target])
        self._add(proto, proto, around, (source,))

    def _branch(self, proto: NodeProto, value: bool, names: _Names, around: _Around, outputs: list[str]) -> None:
        wanted = "then_branch" if value else "else_branch"
        body = next((a.g for a in proto.attribute if a.name == wanted), None)
        if body is None:
            raise NotFlat(f"the If {proto.name!r} has no {wanted}")
        inner = _Names(names)
        results = dict[str, str]()
        twice = []
        for value_info, outer in zip(body.output, outputs, strict=False):
            if outer and value_info.name in results:
                twice.append((value_info.name, outer))
            elif outer:
                results[value_info.name] = outer
        scope = f'{around.scope}If "{proto.name}", {wanted}, '
        within = _Around(scope, around.call, results)
        self.graph(body, inner, within)
        for name, outer in twice:
            self._same(inner.of(name), outer, within)

    def _call(self, proto: NodeProto, function: FunctionProto, names: _Names, around: _Around) -> None:
        """The body of a local function in place of the call."""
        inner, results, twice = _Names(), dict[str, str](), []
        for index, name in enumerate(function.input):
            given = proto.input[index] if index < len(proto.input) else ""
            inner[name] = names.of(given) if given else ""
        for name, outer in zip(function.output, proto.output, strict=False):
            if outer and name in results:
                twice.append((name, names[outer]))
            elif outer:
                results[name] = names[outer]
        call = {a.name: a for a in function.attribute_proto} | {a.name: a for a in _attributes(proto, around.call)}
        scope = f'{around.scope}function {function.name} called by "{proto.name or proto.output[0]}", '
        within = _Around(scope, call, results)
        self.calling.append((_domain(proto.domain), proto.op_type))
        self.nodes(function.node, inner, within)
        self.calling.pop()
        for name, outer in twice:
            self._same(inner.of(name), outer, within)

    def _fits(self, function: FunctionProto) -> bool:
        """Whether a body means the same under the operator versions of the model."""
        own = {_domain(o.domain): o.version for o in function.opset_import}
        if any(self.opsets.get(domain, version) != version for domain, version in own.items()):
            return False
        self.opsets |= own
        self.flat.opsets |= own
        return True


def _domain(domain: str) -> str:
    return "" if domain in STANDARD else domain


def _with_bodies(proto: NodeProto) -> Iterator[NodeProto]:
    yield proto
    for attribute in proto.attribute:
        for body in bodies_of(attribute):
            for inner in body.node:
                yield from _with_bodies(inner)


def _attributes(proto: NodeProto, call: Mapping[str, AttributeProto] | None) -> Iterator[AttributeProto]:
    """Copies of a node's attributes; those that stand for the caller's take their value from the call."""
    for attribute in proto.attribute:
        copy = AttributeProto()
        if attribute.ref_attr_name:
            if call is None or attribute.ref_attr_name not in call:
                continue
            copy.CopyFrom(call[attribute.ref_attr_name])
            copy.name = attribute.name
        else:
            copy.CopyFrom(attribute)
        yield copy


def _rename(body: GraphProto, names: _Names, call: Mapping[str, AttributeProto] | None) -> list[str]:
    """Put the flat names of outer values into a body that stays one; returns those that it reads."""
    own = {value.name for value in body.input} | {tensor.name for tensor in body.initializer}
    own |= {name for node in body.node for name in node.output}
    within, free = _Names(names), list[str]()
    within.update((name, name) for name in own)
    for node in body.node:
        for index, name in enumerate(node.input):
            if name and name not in own:
                node.input[index] = names.of(name)
                free.append(node.input[index])
        kept = list(_attributes(node, call))
        del node.attribute[:]
        node.attribute.extend(kept)
        for attribute in node.attribute:
            for inner in bodies_of(attribute):
                free += [name for name in _rename(inner, within, call) if name not in own]
    for value in body.output:
        if value.name not in own:
            free.append(names.of(value.name))
            value.name = names.of(value.name)
    return free


def _in_order(nodes: list[FlatNode]) -> list[FlatNode]:
    """The nodes, each behind those it needs, else as they stand."""
    made = {name: index for index, node in enumerate(nodes) for name in node.makes}
    ordered, state = list[FlatNode](), [0] * len(nodes)
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            index = stack[-1]
            if state[index] == 2:
                stack.pop()
                continue
            state[index] = 1
            needs = [made[name] for name in nodes[index].reads if name in made and state[made[name]] != 2]
            if any(state[need] == 1 for need in needs):
                raise NotFlat("a value of the graph depends on itself")
            if needs:
                stack += reversed(needs)
                continue
            state[index] = 2
            ordered.append(nodes[index])
            stack.pop()
    return ordered
