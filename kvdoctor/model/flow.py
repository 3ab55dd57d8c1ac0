"""Flow: the flat graph through which values are followed.

Where the switch of a merged decoder decides an `If`, only the chosen branch is there; of any other `If` both are, and
its outputs follow from either. Broken graphs are described, not refused. No node is copied: graphs have 50,000 of them.

The values of a Loop or Scan go into its body and come out carried, as scan inputs, or as scan outputs (`Iteration`).
Sources: the operators Loop and Scan of ONNX, and "If, Loop and Scan" in its IR.md. A Scan before opset 9 has a batch in
front of everything and is not described here.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvdoctor.model import traverse
from kvdoctor.model.flatten import FlatGraph, FlatNode, Flattener, FunctionKey, ScopeNames, Site
from kvdoctor.model.operators import has
from kvdoctor.model.proto import AttributeProto, FunctionProto, GraphProto, NodeProto, TensorProto
from kvdoctor.model.view import GraphView
from kvdoctor.records import record

CALLS_ITSELF, MADE_TWICE = "this local function calls itself", "two nodes make this value"
GIVEN_TWICE, NEVER_MADE = "two inputs have this name", "no node makes this output"
CIRCULAR = "this value depends on itself, or on one that does"
FLAWS = frozenset({CALLS_ITSELF, MADE_TWICE, GIVEN_TWICE, NEVER_MADE, CIRCULAR})
"""Why no runtime can compute a value, where the structure of the graph says so."""


@record
class StackedPort:
    """An input or output of a Scan whose values in all iterations lie along an axis; the body's has not that axis.

    `number` is that of the input of node and body, or of the output of the body. Where it is `reversed`, the value of
    the first iteration comes last.
    """

    number: int
    axis: int
    reversed: bool = False


@record
class Iteration:
    """The ports of one Loop or Scan, by their numbers.

    Attributes:
        carried: An input of the node, the input of the body that has its value in the first iteration, and the output
            of the body that has the value of the next one. The outputs of the node begin with their last values.
        scan_inputs: The inputs of which each iteration gets one entry.
        scan_outputs: Each other output of the node, in their order.
        number: The input of the body that is the number of the iteration, if it has one.
        condition: The input of node and body that says whether another iteration follows, if it has one.
    """

    carried: tuple[tuple[int, int, int], ...]
    scan_inputs: tuple[StackedPort, ...]
    scan_outputs: tuple[StackedPort, ...]
    number: int | None = None
    condition: int | None = None


def read_iteration(node: NodeProto, body: GraphProto) -> Iteration | None:
    """How a Loop or Scan goes together with its body; None for another node, and for one of an unknown form."""
    if traverse.normalize_domain(node.domain) or not has(node.op_type, "loop"):
        return None
    if node.op_type != "Loop":
        return _read_scan(node, body)
    # Trip count, condition and initial values; its body has the number, the condition and the values.
    count = len(body.input) - 2
    if count < 0 or max(len(node.input), 2) != len(body.input) or len(body.output) < count + 1:
        return None
    carried = tuple((at + 2, at + 2, at + 1) for at in range(count))
    return Iteration(carried, (), tuple(StackedPort(at, 0) for at in range(count + 1, len(body.output))), 0, 1)


def _read_scan(node: NodeProto, body: GraphProto) -> Iteration | None:
    """A Scan: initial values and inputs that are taken apart; its body has the same."""
    attribute = traverse.find_attribute(node, "num_scan_inputs")
    taken = int(attribute.i) if attribute is not None else 0
    count = len(body.input) - taken
    if taken < 1 or count < 0 or len(node.input) != len(body.input) or len(body.output) < count:
        return None  # before opset 9 the node has one input more
    inputs = _read_stacked(node, "scan_input", range(count, count + taken))
    outputs = _read_stacked(node, "scan_output", range(count, len(body.output)))
    return Iteration(tuple((at, at, at) for at in range(count)), inputs, outputs)


def _read_stacked(node: NodeProto, ports: str, numbers: range) -> tuple[StackedPort, ...]:
    """Some ports of a Scan; those of the first axis, forwards, where the node says nothing."""
    found = (traverse.find_attribute(node, f"{ports}_{what}") for what in ("axes", "directions"))
    given = [tuple(one.ints) if one is not None else () for one in found]
    axes, directions = (one if len(one) == len(numbers) else (0,) * len(numbers) for one in given)
    return tuple(StackedPort(at, axis, way == 1) for at, axis, way in zip(numbers, axes, directions, strict=True))


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


@dataclass(eq=False, repr=False)
class Flow(FlatGraph[FlatNode]):
    """The flat graph that values are followed through; graph inputs keep their names.

    `decides` are the conditions of branches. `flaws` says why no runtime can compute the graph, where its structure
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
        """Graph outputs by the value that they return."""
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
            if node.has("constant") or (given and all(name in fixed for name in given)):
                fixed.update(name for name in node.outputs if name not in changing)
        return fixed

    def before(self, value: str) -> Iterator[FlatNode]:
        """The nodes that a value is computed by, the nearest first."""
        waiting, seen = [value], {value}
        for name in waiting:
            if (node := self.producers.get(name)) is not None:
                yield node
                new = [one for one in dict.fromkeys(node.inputs) if one and one not in seen]
                seen.update(new)
                waiting += new

    def constant(self, name: str) -> TensorProto | None:
        """The tensor of a value that is a constant, also through Identity and Cast."""
        for _ in range(16):
            node = self.producers.get(name) if name not in self.constants and name not in self.carried else None
            if node is None or not node.inputs or not node.has("copy", "cast", "dequantize", "permute"):
                break
            name = node.inputs[0]
        return self.constants.get(name)


def flow_of(view: GraphView, cached: bool = True) -> Flow:
    """Write out a graph; of a merged decoder the cached branch, or the other one.

    Raises:
        TooLarge: there are more than MOST_NODES nodes.
    """
    names, given = ScopeNames(), Counter(value.name for value in view.model.graph.input)
    names.update({name: name for name in given})
    writer = _FlowWriter(view, cached)
    writer.flaws |= {name: GIVEN_TWICE for name, count in given.items() if count > 1}
    writer.write_graph(view.model.graph, Site(names))
    order, cyclic = traverse.stable_order(
        [node.inputs for node in writer.nodes], [node.outputs for node in writer.nodes]
    )
    nodes = [writer.nodes[index] for index in (*order, *cyclic)]
    if cyclic:
        name = next((name for index in cyclic for name in writer.nodes[index].outputs if name), "")
        writer.flaws[name] = CIRCULAR
    for index, node in enumerate(nodes):
        node.index = index
    results = {output: names.of(output, output) for output in view.outputs}
    flow = Flow(nodes, writer.constants, results, writer.flaws, writer.decides, writer.iterations)
    flow.carried |= {name: later for name, later in writer.carried.items() if not _is_same(flow, name, later)}
    for output, value in results.items():
        if value not in flow.producers and value not in flow.constants and value not in given:
            flow.flaws[output] = NEVER_MADE
    return flow


def _is_same(flow: Flow, name: str, later: str) -> bool:
    """Whether a carried value is handed on as it is: a weight, a mask."""
    for _ in range(16):
        node = flow.producers.get(later)
        if later == name or node is None or not node.has("copy"):
            break
        later = node.input(0)
    return later == name


class _FlowWriter(Flattener[FlatNode]):
    def __init__(self, view: GraphView, cached: bool) -> None:
        taken = view.branches[1].taken(cached) if view.branches is not None else {}
        super().__init__(view.model, MOST_NODES, taken)
        self.flaws: dict[str, str] = {}
        self.iterations: dict[str, IterationNumber] = {}
        self.carried: dict[str, str] = {}

    def name_value(self, name: str, site: Site) -> str:
        return site.prefix + name

    def sparse_constant(self, sparse: Any) -> TensorProto:
        return TensorProto(data_type=sparse.values.data_type, dims=sparse.dims)

    def constant_tensor(self, proto: NodeProto) -> TensorProto | None:
        return traverse.constant_value(proto)

    def writes_out(self, key: FunctionKey, function: FunctionProto) -> bool:
        if key in self.calling:
            self.flaws[function.name] = CALLS_ITSELF
        return key not in self.calling

    def write_nodes(self, nodes: Iterable[NodeProto], site: Site) -> None:
        listed = list(nodes)
        made: dict[str, NodeProto] = {}
        for node in listed:
            for name in filter(None, node.output):
                if name in made and not traverse.are_equal_constants(made[name], node):
                    self.flaws.setdefault(name, MADE_TWICE)
                made[name] = node
        super().write_nodes(listed, site)

    def write_identity(self, sources: tuple[str, ...], target: str, _site: Site) -> None:
        self.add(FlatNode(_IDENTITY, sources, (target,)))

    def write_other(self, proto: NodeProto, inputs: tuple[str, ...], outputs: tuple[str, ...], site: Site) -> None:
        """An If, Loop or Scan: its bodies are written out, and its outputs follow from theirs and from its inputs."""
        bodies = list(traverse.subgraphs(proto))
        form = read_iteration(proto, bodies[0]) if len(bodies) == 1 else None
        inner = [Site(ScopeNames(site.names), self.next_prefix(), call=site.call) for _ in bodies]
        if form is not None:
            ends = [self._write_iteration(form, bodies[0], inputs, inner[0])]
        else:
            ends = [self._write_branch(body, within) for body, within in zip(bodies, inner, strict=True)]
        if bodies and has(proto.op_type, "branch"):
            self.decides.update(inputs)
            for index, output in enumerate(outputs):
                if output:
                    self.write_identity(tuple(found[index] for found in ends if index < len(found)), output, site)
            return
        # After the inputs come the values that the outputs return, in their order.
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
            # Each iteration gets the entry of its number.
            take = NodeProto(op_type="Gather", attribute=[_number("axis", part.axis), _number(REVERSED, part.reversed)])
            self.add(FlatNode(take, (inputs[part.number], number), (within[part.number],)))
        ends = self._write_branch(body, site)
        self.carried |= {within[at]: ends[later] for _, at, later in form.carried}
        results = [ends[later] for _, _, later in form.carried]
        for output in form.scan_outputs:
            results.append(f"{self.next_prefix()}stacked")
            # The results of all iterations along a new axis.
            axes = AttributeProto(name="axes", type=AttributeProto.INTS, ints=[output.axis])
            stack = NodeProto(op_type="Unsqueeze", attribute=[axes, _number(REVERSED, output.reversed)])
            self.add(FlatNode(stack, (ends[output.number],), (results[-1],)))
        return results


_IDENTITY = NodeProto(op_type="Identity")


def _number(name: str, value: int) -> AttributeProto:
    return AttributeProto(name=name, type=AttributeProto.INT, i=int(value))
