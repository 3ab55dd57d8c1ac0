"""Flow: a graph as one flat list of nodes, with branches, bodies and local functions written out.

A value has one name in the whole flow. Where the switch of a merged decoder decides an `If`, only the chosen branch is
there; of any other `If` both are, and its outputs follow from either. No weights, no runtime.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kvdoctor.graph import GraphView, bodies_of, nodes_of
from kvdoctor.onnx_schema import AttributeProto, GraphProto, NodeProto, TensorProto

MOST_NODES = 500_000
"""Nodes after functions are written out: functions that call functions can make a small file endless."""

MOST_CALLS = 50
"""Functions within functions."""

STANDARD = ("", "ai.onnx")


class TooLarge(Exception):
    """The graph, written out, has more nodes than can be followed, or functions too deep in one another."""


class Names(dict[str, str]):
    """The flow's names for the values of a graph or body; those of the graph around it are looked up there."""

    def __init__(self, outer: "Names | None" = None) -> None:
        super().__init__()
        self.outer = outer

    def of(self, name: str, default: str) -> str:
        """The flow's name for a value of this graph or of one around it."""
        scope: Names | None = self
        while scope is not None:
            found = scope.get(name)
            if found is not None:
                return found
            scope = scope.outer
        return default


@dataclass(slots=True, eq=False)
class FlowNode:
    """A node under the flow's names. `call` is the node whose function body it stands in, `index` its place."""

    proto: NodeProto
    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    call: "FlowNode | None" = None
    index: int = 0

    def input(self, index: int) -> str:
        """The input of that number; empty where there is none, as in a node that is cut short."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def output(self, index: int = 0) -> str:
        """The output of that number; empty where there is none."""
        return self.outputs[index] if index < len(self.outputs) else ""

    @property
    def domain(self) -> str:
        """The operator's domain; empty for the operators of ONNX itself."""
        return str(self.proto.domain) if self.proto.domain not in STANDARD else ""

    def attribute(self, name: str) -> AttributeProto | None:
        """The attribute of that name; inside a function it may be the caller's."""
        found: AttributeProto | None = next((a for a in self.proto.attribute if a.name == name), None)
        if found is not None and found.ref_attr_name and self.call is not None:
            return self.call.attribute(found.ref_attr_name)
        return found

    def number(self, name: str, default: int) -> int:
        """An integer attribute."""
        attribute = self.attribute(name)
        return int(attribute.i) if attribute is not None else default

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """A list of integers, or None where the attribute is not there."""
        attribute = self.attribute(name)
        return tuple(attribute.ints) if attribute is not None else None


@dataclass
class Flow:
    """The flat graph. `results` gives the value behind each graph output; graph inputs keep their names.

    `decides` are the conditions of branches. `flaws` says why no runtime can compute the graph, as far as its structure
    tells: the reason by value or function.
    """

    nodes: list[FlowNode] = field(default_factory=list)
    constants: dict[str, TensorProto] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)
    flaws: dict[str, str] = field(default_factory=dict)
    decides: set[str] = field(default_factory=set)

    @cached_property
    def producers(self) -> dict[str, FlowNode]:
        """The node that makes each value."""
        return {name: node for node in self.nodes for name in node.outputs if name}

    @cached_property
    def consumers(self) -> dict[str, list[tuple[FlowNode, int]]]:
        """The nodes that take each value, with the index of the input."""
        found: dict[str, list[tuple[FlowNode, int]]] = {}
        for node in self.nodes:
            for index, name in enumerate(node.inputs):
                if name:
                    found.setdefault(name, []).append((node, index))
        return found

    @cached_property
    def outputs_of(self) -> dict[str, list[str]]:
        """Graph outputs by the value behind them."""
        found: dict[str, list[str]] = {}
        for output, value in self.results.items():
            found.setdefault(value, []).append(output)
        return found

    @cached_property
    def fixed(self) -> set[str]:
        """Values that no input has a part in: constants and what is computed from constants alone."""
        fixed = set(self.constants)
        for node in self.nodes:
            given = [name for name in node.inputs if name]
            if node.op == "Constant" or (given and all(name in fixed for name in given)):
                fixed.update(node.outputs)
        return fixed

    def constant(self, name: str) -> TensorProto | None:
        """The tensor behind a value that is a constant, also through Identity and Cast."""
        for _ in range(16):
            if name in self.constants:
                return self.constants[name]
            node = self.producers.get(name)
            if node is None or not node.inputs or node.op not in ("Identity", "Cast", "DequantizeLinear", "Transpose"):
                return None
            name = node.inputs[0]
        return None


def flow_of(view: GraphView, cached: bool = True) -> Flow:
    """Write out a graph; of a merged decoder the cached branch, or the other one.

    Raises:
        TooLarge: there are more than MOST_NODES nodes.
    """
    chosen = view.branches[1] if view.branches else None
    branch = (chosen.cached if cached else chosen.no_past).graph if chosen else None
    writer = _Writer(view, chosen.node if chosen else None, branch)
    names, flow = Names(), writer.flow
    for value in view.model.graph.input:
        if value.name in names:
            flow.flaws[value.name] = "two inputs have this name"
        names[value.name] = value.name
    given = set(names)
    writer.graph(view.model.graph, names, "")
    flow.results = {output: names.of(output, output) for output in view.outputs}
    flow.nodes = _in_order(flow)
    for index, node in enumerate(flow.nodes):
        node.index = index
    for output, value in flow.results.items():
        if value not in flow.producers and value not in flow.constants and value not in given:
            flow.flaws[output] = "no node makes this output"
    return flow


@dataclass
class _Writer:
    view: GraphView
    switched: NodeProto | None
    branch: GraphProto | None
    flow: Flow = field(default_factory=Flow)
    bodies: int = 0

    def __post_init__(self) -> None:
        self.functions = {(f.domain if f.domain != "ai.onnx" else "", f.name): f for f in self.view.model.functions}
        self.calling: list[tuple[str, str]] = []
        self.sizes: dict[tuple[str, str], int] = {}

    def graph(self, graph: GraphProto, names: Names, prefix: str) -> list[str]:
        """Write out a graph or subgraph; `names` maps its values to the flow's. Returns its outputs."""
        for tensor in graph.initializer:
            names[tensor.name] = prefix + tensor.name
            self.flow.constants[prefix + tensor.name] = tensor
        for sparse in graph.sparse_initializer:
            name = sparse.values.name
            names[name] = prefix + name
            self.flow.constants[prefix + name] = TensorProto(data_type=sparse.values.data_type, dims=sparse.dims)
        self.nodes(graph.node, names, prefix, None)
        return [names.of(value.name, value.name) for value in graph.output]

    def nodes(self, nodes: "Sequence[NodeProto]", names: Names, prefix: str, call: FlowNode | None) -> None:
        written = [name for node in nodes for name in node.output if name]
        made = {name: prefix + name for name in written}
        if len(made) < len(written):
            twice = next(name for name, count in Counter(written).items() if count > 1)
            self.flow.flaws[twice] = "two nodes make this value"
        names.update(made)
        for proto in nodes:
            inputs = tuple(names.of(name, prefix + name) if name else "" for name in proto.input)
            outputs = tuple(names[name] if name else "" for name in proto.output)
            node = FlowNode(proto, proto.op_type, inputs, outputs, call)
            self._node(node, names)
            if len(self.flow.nodes) > MOST_NODES:
                raise TooLarge(f"the graph, with its functions written out, has more than {MOST_NODES:,} nodes")

    def _node(self, node: FlowNode, names: Names) -> None:
        proto, key = node.proto, (node.domain, node.op)
        if key in self.functions:
            if key not in self.calling:
                self._call(node, key)
                return
            self.flow.flaws[node.op] = "this local function calls itself"
        if node.op == "Constant" and proto.output:
            value = next((a.t for a in proto.attribute if a.name == "value" and a.HasField("t")), None)
            value = value if value is not None else _listed(proto)
            if value is not None:
                self.flow.constants[node.outputs[0]] = value
                return
        bodies = [body for attribute in proto.attribute for body in bodies_of(attribute)]
        if bodies and self.branch is not None and self.switched is not None and proto.output == self.switched.output:
            bodies = [self.branch]
        if not bodies:
            self.flow.nodes.append(node)
            return
        self._bodied(node, bodies, names)

    def _call(self, node: FlowNode, key: tuple[str, str]) -> None:
        """The body of a local function in place of the call."""
        self._limit(key)
        self.bodies += 1
        function, prefix, names = self.functions[key], f"{self.bodies}:", Names()
        names.update(zip(function.input, node.inputs, strict=False))
        self.calling.append(key)
        self.nodes(function.node, names, prefix, node)
        self.calling.pop()
        for inner, outer in zip(function.output, node.outputs, strict=False):
            if outer:
                self._same(names.of(inner, prefix + inner), outer)

    def _limit(self, key: tuple[str, str]) -> None:
        """Refuse a call that would take long to write out, before it is begun."""
        if len(self.flow.nodes) + self._size(key, 0) > MOST_NODES:
            raise TooLarge(f"the graph, with its functions written out, has more than {MOST_NODES:,} nodes")

    def _size(self, key: tuple[str, str], depth: int) -> int:
        """Nodes of a function with all that it calls, also from the bodies of control flow."""
        if depth > MOST_CALLS:
            raise TooLarge(f"the local functions of the graph call one another more than {MOST_CALLS} deep")
        if key not in self.sizes:
            self.sizes[key] = 0  # counts for a call of itself
            nodes = nodes_of(self.functions[key].node)
            called = ((n.domain if n.domain not in STANDARD else "", n.op_type) for n in nodes)
            self.sizes[key] = sum(1 + (self._size(c, depth + 1) if c in self.functions else 0) for c in called)
        return self.sizes[key]

    def _bodied(self, node: FlowNode, bodies: list[GraphProto], names: Names) -> None:
        """An If, Loop or Scan: its bodies are written out, and its outputs follow from theirs and from its inputs."""
        states = _carried(node, bodies)
        results: list[list[str]] = [[] for _ in node.outputs]
        for body in bodies:
            self.bodies += 1
            inner = Names(names)
            for value in body.input:
                inner[value.name] = f"{self.bodies}:{value.name}"
            for outer, value in states:
                if value < len(body.input) and outer < len(node.inputs) and node.inputs[outer]:
                    self._same(node.inputs[outer], inner[body.input[value].name])
            ends = self.graph(body, inner, f"{self.bodies}:")
            ends = ends[1:] if node.op == "Loop" else ends
            for index, end in enumerate(ends[: len(results)]):
                results[index].append(end)
        if node.op == "If":
            self.flow.decides.update(node.inputs)
            for output, ends in zip(node.outputs, results, strict=True):
                if output:
                    self._same(ends, output)
            return
        # What is carried around a loop leaves at its own place; the node itself stays to say so.
        self.flow.nodes.append(
            FlowNode(
                node.proto, node.op, (*node.inputs, *(end for ends in results for end in ends)), node.outputs, node.call
            )
        )

    def _same(self, source: "str | list[str]", name: str) -> None:
        sources = (source,) if isinstance(source, str) else tuple(source)
        self.flow.nodes.append(FlowNode(_SAME, "Identity", sources, (name,)))


_SAME = NodeProto(op_type="Identity")


def _carried(node: FlowNode, bodies: list[GraphProto]) -> list[tuple[int, int]]:
    """Which input of a Loop or Scan enters its body where: (index outside, index inside)."""
    if node.op == "Loop":
        return [(index, index) for index in range(len(node.inputs)) if index != 0]
    if node.op == "Scan" and bodies:
        return [(index, index) for index in range(len(bodies[0].input))]
    return []


def _listed(proto: NodeProto) -> TensorProto | None:
    """A Constant given as plain numbers."""
    for attribute in proto.attribute:
        if attribute.name == "value_ints":
            return TensorProto(data_type=TensorProto.INT64, dims=[len(attribute.ints)], int64_data=attribute.ints)
        if attribute.name == "value_int":
            return TensorProto(data_type=TensorProto.INT64, int64_data=[attribute.i])
        if attribute.name == "value_float":
            return TensorProto(data_type=TensorProto.FLOAT, float_data=[attribute.f])
        if attribute.name == "value_floats":
            return TensorProto(data_type=TensorProto.FLOAT, dims=[len(attribute.floats)], float_data=attribute.floats)
    return None


def _in_order(flow: Flow) -> list[FlowNode]:
    """The nodes, each after those it needs; as they stand where that holds already. Circles come last."""
    made: set[str] = set()
    produced = {name for node in flow.nodes for name in node.outputs if name}
    for node in flow.nodes:
        if any(name in produced and name not in made for name in node.inputs):
            return _sorted(flow, produced)
        made.update(node.outputs)
    return flow.nodes


def _sorted(flow: Flow, produced: set[str]) -> list[FlowNode]:
    waiting = {id(node): {name for name in node.inputs if name in produced} for node in flow.nodes}
    takers: dict[str, list[FlowNode]] = {}
    for node in flow.nodes:
        for name in waiting[id(node)]:
            takers.setdefault(name, []).append(node)
    ready = [node for node in reversed(flow.nodes) if not waiting[id(node)]]
    ordered: list[FlowNode] = []
    while ready:
        node = ready.pop()
        ordered.append(node)
        for name in node.outputs:
            for taker in takers.pop(name, ()) if name else ():
                waiting[id(taker)].discard(name)
                if not waiting[id(taker)]:
                    ready.append(taker)
    done = {id(node) for node in ordered}
    circular = [node for node in flow.nodes if id(node) not in done]
    if circular:
        name = next((name for node in circular for name in node.outputs if name), "")
        flow.flaws[name] = "this value depends on itself, or on one that does"
    return ordered + circular
