"""Flow: the flat graph through which values are followed.

Where the switch of a merged decoder decides an `If`, only the chosen branch is there; of any other `If` both are, and
its outputs follow from either. Broken graphs are described, not refused. No node is copied: graphs have 50,000 of them.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvdoctor.model.flatten import FlatGraph, FlatNode, Flattener, FunctionKey, ScopeNames, Site
from kvdoctor.model.proto import FunctionProto, GraphProto, NodeProto, TensorProto
from kvdoctor.model.traverse import are_equal_constants, constant_tensor, stable_order, subgraphs
from kvdoctor.model.view import GraphView

MOST_NODES = 500_000
"""Nodes after functions are written out: functions that call functions can make a small file endless."""


@dataclass
class Flow(FlatGraph[FlatNode]):
    """The flat graph that values are followed through; graph inputs keep their names.

    `decides` are the conditions of branches. `flaws` says why no runtime can compute the graph, as far as its structure
    tells: the reason by value or function.
    """

    flaws: dict[str, str] = field(default_factory=dict)
    decides: set[str] = field(default_factory=set)

    @cached_property
    def consumers(self) -> dict[str, list[tuple[FlatNode, int]]]:
        """The nodes that take each value, with the index of the input."""
        found: dict[str, list[tuple[FlatNode, int]]] = {}
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
    names, given = ScopeNames(), Counter(value.name for value in view.model.graph.input)
    names.update({name: name for name in given})
    writer = _FlowWriter(view, cached)
    writer.flaws |= {name: "two inputs have this name" for name, count in given.items() if count > 1}
    writer.write_graph(view.model.graph, Site(names))
    order, cyclic = stable_order([node.inputs for node in writer.nodes], [node.outputs for node in writer.nodes])
    nodes = [writer.nodes[index] for index in (*order, *cyclic)]
    if cyclic:
        name = next((name for index in cyclic for name in writer.nodes[index].outputs if name), "")
        writer.flaws[name] = "this value depends on itself, or on one that does"
    for index, node in enumerate(nodes):
        node.index = index
    results = {output: names.of(output, output) for output in view.outputs}
    flow = Flow(nodes, writer.constants, results, writer.flaws, writer.decides)
    for output, value in results.items():
        if value not in flow.producers and value not in flow.constants and value not in given:
            flow.flaws[output] = "no node makes this output"
    return flow


def _branch_taken(view: GraphView, cached: bool) -> dict[str, str]:
    """The branch that a merged decoder takes, by the first output of its `If`."""
    if view.branches is None:
        return {}
    branches = view.branches[1]
    chosen = (branches.cached if cached else branches.no_past).graph
    names = (attribute.name for attribute in branches.node.attribute if attribute.g is chosen)
    return {next(filter(None, branches.node.output), ""): next(names)}


class _FlowWriter(Flattener[FlatNode]):
    def __init__(self, view: GraphView, cached: bool) -> None:
        super().__init__(view.model, MOST_NODES, _branch_taken(view, cached))
        self.flaws: dict[str, str] = {}

    def name_value(self, name: str, site: Site) -> str:
        return site.prefix + name

    def sparse_constant(self, sparse: Any) -> TensorProto:
        return TensorProto(data_type=sparse.values.data_type, dims=sparse.dims)

    def constant_tensor(self, proto: NodeProto) -> TensorProto | None:
        value = constant_tensor(proto)
        return value if value is not None else _listed(proto)

    def writes_out(self, key: FunctionKey, function: FunctionProto) -> bool:
        if key in self.calling:
            self.flaws[function.name] = "this local function calls itself"
        return key not in self.calling

    def write_nodes(self, nodes: Iterable[NodeProto], site: Site) -> None:
        listed = list(nodes)
        made: dict[str, NodeProto] = {}
        for node in listed:
            for name in filter(None, node.output):
                if name in made and not are_equal_constants(made[name], node):
                    self.flaws.setdefault(name, "two nodes make this value")
                made[name] = node
        super().write_nodes(listed, site)

    def write_identity(self, sources: tuple[str, ...], target: str, _site: Site) -> None:
        self.add(FlatNode(_IDENTITY, sources, (target,)))

    def write_other(self, proto: NodeProto, inputs: tuple[str, ...], outputs: tuple[str, ...], site: Site) -> None:
        """An If, Loop or Scan: its bodies are written out, and its outputs follow from theirs and from its inputs."""
        bodies = list(subgraphs(proto))
        results: list[list[str]] = [[] for _ in outputs]
        for body in bodies:
            inner = Site(ScopeNames(site.names), self.next_prefix(), call=site.call)
            ends = self._write_undecided(body, proto.op_type, inputs, inner)
            for index, end in enumerate(ends[: len(results)]):
                results[index].append(end)
        if bodies and proto.op_type == "If":
            self.decides.update(inputs)
            for output, ends in zip(outputs, results, strict=True):
                if output:
                    self.write_identity(tuple(ends), output, site)
            return
        # What is carried around a loop leaves at its own place; the node itself stays to say so.
        self.add(FlatNode(proto, (*inputs, *(end for ends in results for end in ends)), outputs, site.call))

    def _write_undecided(self, body: GraphProto, op: str, inputs: tuple[str, ...], site: Site) -> list[str]:
        """Write out a body that may run, once or more; returns the flat names of its results."""
        names = site.names
        names.update({value.name: site.prefix + value.name for value in body.input})
        first = {"Loop": 1, "Scan": 0}.get(op, len(inputs))
        for index in range(first, min(len(inputs), len(body.input))):
            if inputs[index]:
                self.write_identity((inputs[index],), names[body.input[index].name], site)
        self.write_graph(body, site)
        ends = [names.of(value.name, value.name) for value in body.output]
        return ends[1:] if op == "Loop" else ends


_IDENTITY = NodeProto(op_type="Identity")


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
