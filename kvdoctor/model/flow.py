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
from kvdoctor.model.iteration import Iteration, ScanInput, ScanOutput, read_iteration
from kvdoctor.model.proto import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto
from kvdoctor.model.traverse import are_equal_constants, constant_tensor, stable_order, subgraphs
from kvdoctor.model.view import GraphView
from kvdoctor.records import record

MOST_NODES = 500_000
"""Nodes after functions are written out: functions that call functions can make a small file endless."""

MOST_PASSES = 8
"""Passes over all nodes in which carried values are found that an input has a part in: then all count as such."""

REVERSED = "reversed"
"""The attribute of nodes that stand for a Scan which takes entries, or puts them together, last first."""


@record
class IterationNumber:
    """The number of an iteration: its rank, 0 or 1, and whether a value is carried from one iteration to the next."""

    rank: int
    carries: bool


@dataclass
class Flow(FlatGraph[FlatNode]):
    """The flat graph that values are followed through; graph inputs keep their names.

    `decides` are the conditions of branches. `flaws` says why no runtime can compute the graph, as far as its structure
    tells: the reason by value or function. The body of a Loop or Scan stands there once, as one iteration:
    `iterations` are the values that number it, and `carried` gives for a value of the body that changes from one
    iteration to the next the value that it has then.
    """

    flaws: dict[str, str] = field(default_factory=dict)
    decides: set[str] = field(default_factory=set)
    iterations: dict[str, IterationNumber] = field(default_factory=dict)
    carried: dict[str, str] = field(default_factory=dict)

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
        """Values that no input has a part in: constants, numbers of iterations, and what is computed of them alone."""
        changing = set[str]()
        for _ in range(MOST_PASSES):
            fixed = self._fixed_without(changing)
            fed = {name for name, later in self.carried.items() if name in fixed and later not in fixed}
            if not fed:
                return fixed
            changing |= fed
        return self._fixed_without(set(self.carried))

    def _fixed_without(self, changing: set[str]) -> set[str]:
        """The same, where an input has a part in some carried values from the second iteration on."""
        fixed = {*self.constants, *self.iterations}
        for node in self.nodes:
            given = [name for name in node.inputs if name]
            if node.op == "Constant" or (given and all(name in fixed for name in given)):
                fixed.update(name for name in node.outputs if name not in changing)
        return fixed

    def constant(self, name: str) -> TensorProto | None:
        """The tensor behind a value that is a constant, also through Identity and Cast."""
        for _ in range(16):
            if name in self.constants:
                return self.constants[name]
            node = self.producers.get(name)
            if (
                node is None
                or name in self.carried
                or not node.inputs
                or node.op not in ("Identity", "Cast", "DequantizeLinear", "Transpose")
            ):
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
    flow = Flow(nodes, writer.constants, results, writer.flaws, writer.decides, writer.iterations)
    flow.carried |= {name: later for name, later in writer.carried.items() if not _is_same(flow, name, later)}
    for output, value in results.items():
        if value not in flow.producers and value not in flow.constants and value not in given:
            flow.flaws[output] = "no node makes this output"
    return flow


def _is_same(flow: Flow, name: str, later: str) -> bool:
    """Whether a carried value is handed on as it is: a weight, a mask."""
    for _ in range(16):
        node = flow.producers.get(later)
        if later == name or node is None or node.op != "Identity":
            break
        later = node.input(0)
    return later == name


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
        self.iterations: dict[str, IterationNumber] = {}
        self.carried: dict[str, str] = {}

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
        form = read_iteration(proto, bodies[0]) if len(bodies) == 1 else None
        inner = [Site(ScopeNames(site.names), self.next_prefix(), call=site.call) for _ in bodies]
        if form is not None:
            ends = [self._write_iteration(form, bodies[0], inputs, inner[0])]
        else:
            ends = [self._write_branch(body, within) for body, within in zip(bodies, inner, strict=True)]
        if bodies and proto.op_type == "If":
            self.decides.update(inputs)
            for index, output in enumerate(outputs):
                if output:
                    self.write_identity(tuple(found[index] for found in ends if index < len(found)), output, site)
            return
        # Behind the inputs are the values that the outputs return, in their order.
        behind = ends[0][: len(outputs)] if form is not None else [end for found in ends for end in found]
        self.add(FlatNode(proto, (*inputs, *behind), outputs, site.call))

    def _write_branch(self, body: GraphProto, site: Site) -> list[str]:
        """Write out a body that may run; returns the flat names of its results."""
        site.names.update({value.name: site.prefix + value.name for value in body.input})
        self.write_graph(body, site)
        return [site.names.of(value.name, value.name) for value in body.output]

    def _write_iteration(self, form: Iteration, body: GraphProto, inputs: tuple[str, ...], site: Site) -> list[str]:
        """Write out the body of a Loop or Scan as one iteration; returns the flat names of what the node returns."""
        within = [site.prefix + value.name for value in body.input]
        number = within[form.number] if form.number is not None else f"{self.next_prefix()}iteration"
        rank = len(body.input[form.number].type.tensor_type.shape.dim) if form.number is not None else 0
        self.iterations[number] = IterationNumber(rank, bool(form.carried))
        for first, at, _ in form.carried:
            self.write_identity((inputs[first],), within[at], site)
        if form.condition is not None and form.condition < len(inputs) and inputs[form.condition]:
            self.write_identity((inputs[form.condition],), within[form.condition], site)
        for part in form.scan_inputs:
            self.add(FlatNode(_take_one(part), (inputs[part.input], number), (within[part.body_input],)))
        ends = self._write_branch(body, site)
        self.carried |= {within[at]: ends[later] for _, at, later in form.carried}
        results = [ends[later] for _, _, later in form.carried]
        for output in form.scan_outputs:
            results.append(f"{self.next_prefix()}stacked")
            self.add(FlatNode(_stack(output), (ends[output.body_output],), (results[-1],)))
        return results


_IDENTITY = NodeProto(op_type="Identity")


def _take_one(part: ScanInput) -> NodeProto:
    """What a Scan does with an input: each iteration gets the entry of its number."""
    return NodeProto(op_type="Gather", attribute=[_number("axis", part.axis), _number(REVERSED, part.reversed)])


def _stack(output: ScanOutput) -> NodeProto:
    """What a Loop or Scan does with an output of its body: the results of all iterations along a new axis."""
    axes = AttributeProto(name="axes", type=AttributeProto.INTS, ints=[output.axis])
    return NodeProto(op_type="Unsqueeze", attribute=[axes, _number(REVERSED, output.reversed)])


def _number(name: str, value: int) -> AttributeProto:
    return AttributeProto(name=name, type=AttributeProto.INT, i=int(value))


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
