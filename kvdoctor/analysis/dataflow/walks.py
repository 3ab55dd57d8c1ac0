"""Walks over a graph's values: how far they go, what depends on what, and what each node does with a content."""

from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, TypeVar

from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import OPERATORS, operator_of, operators_with, ports_of

Visited = TypeVar("Visited")

KEEPS = frozenset(name for name, entry in OPERATORS.items() if entry.keeps)
"""Operators whose outputs hold the content of an input."""

PASSES_OUT = operators_with("copy", "cast", "view", "permute")
"""Casts and views that may stand between a computed state and the output that returns it."""

MIXES = operators_with("arithmetic", "cap", "select", "join", "pad", "write", "normalize", "rotate", "reduce")
"""Operators between a past and its attention (rotation, scaling, normalization), or between scores and the Softmax."""

BLENDS = PASSES_OUT | operators_with("add", "subtract", "scale", "clamp", "select")
"""Operators between a state that is retained in part and its next value: the cell of an LSTM, a state space."""

COMPUTES = operators_with("arithmetic", "activation")
"""Operators that compute each number of their output from one number of the input: they keep its shape."""

COUNTS_ON = operators_with("copy", "cast", "view", "add")
"""Operators between a counter and the output that returns it, increased by the number of new tokens."""

SHAPES = operators_with("measure", "fill", "generate", "range")
"""Operators whose result does not depend on the content of their input."""


def skip_copies(flow: Flow, value: str) -> str:
    """The value that a chain of Identity nodes passes on; of a circle, which no runtime can compute, any."""
    seen = {value}
    while (node := flow.producers.get(value)) is not None and node.has("copy") and node.input(0) not in seen:
        value = node.input(0)
        seen.add(value)
    return value


def keeps(node: FlatNode, index: int) -> bool:
    """Whether the outputs of a node hold the content of an input."""
    return index in operator_of(node.op).keeps


def is_past(node: FlatNode, index: int) -> bool:
    """Whether an input of a node is the past of an operator that holds a cache."""
    ports = ports_of(node.domain, node.op)
    return ports is not None and index in ports.pasts


def views_of(node: FlatNode, index: int) -> tuple[str, ...]:
    """The outputs of a node that are views of an input, or hold it in parts."""
    if node.has("loop"):
        behind = index - len(node.proto.input)
        return node.outputs[behind : behind + 1] if behind >= 0 else ()
    return node.outputs if keeps(node, index) else ()


def viewed_by(node: FlatNode, output: str) -> str:
    """The input of a node that an output is a view of; empty where there is none."""
    if node.has("loop"):  # after its own inputs are the values that its outputs return
        return node.input(len(node.proto.input) + node.outputs.index(output))
    return node.input(0) if keeps(node, 0) else ""


def outputs_with_content(node: FlatNode, index: int) -> Iterator[tuple[str, bool]]:
    """The outputs of a node that hold the content of an input, each with whether new entries joined it there."""
    ports = ports_of(node.domain, node.op)
    if ports is not None and index in ports.pasts:
        out = ports.pasts[index][1]
        if out < len(node.outputs):
            yield node.outputs[out], True
    elif keeps(node, index):
        for output in node.outputs:
            yield output, False
    elif node.has("copy"):  # the result of a branch: an Identity of the results of all branches
        yield node.output(), False
    elif node.has("loop"):
        yield from ((output, False) for output in views_of(node, index))
    elif (node.has("join") or index in operator_of(node.op).buffers) and node.outputs:
        # A Concat of one input adds nothing: exporters leave it where they stacked a list of one.
        yield node.outputs[0], len(node.inputs) > 1


MOST_VISITED = 4000
"""Values that one walk visits before it gives up: the attention of a state is close to it."""

NEAR = 64
"""Values that a walk visits where the answer, if there is one, is close by."""

NEAR_USE = 600
"""Values that a walk visits from an input to the operator that shows its role."""

MOST_VISITED_IN_ALL = 300_000
"""Values that all walks over one graph visit together. A layer takes about 30; thousands of inputs on one long chain
would take minutes.
"""


@dataclass(eq=False, repr=False)
class WalkBudget:
    """Counts the values that all walks over one graph visit."""

    visited: int = 0

    def goes_on(self) -> bool:
        """Count one more value; False once there were MOST_VISITED_IN_ALL."""
        self.visited += 1
        return not self.is_spent

    @property
    def is_spent(self) -> bool:
        """Whether walks were stopped because there were too many values."""
        return self.visited > MOST_VISITED_IN_ALL


class Walk(Generic[Visited]):
    """Visits values breadth first, each once; `add` queues the next ones while the walk is iterated.

    A walk that carries something along visits pairs of a value and that.
    """

    def __init__(self, start: Iterable[Visited], budget: WalkBudget | None = None, most: int | None = None) -> None:
        self.waiting = deque(start)
        self.seen = set(self.waiting)
        self.budget = budget
        self.most = most

    def __iter__(self) -> Iterator[Visited]:
        while self.waiting and (self.most is None or len(self.seen) < self.most):
            if self.budget is not None and not self.budget.goes_on():
                return
            yield self.waiting.popleft()

    def takers(self: "Walk[str]", flow: Flow) -> Iterator[tuple[FlatNode, int]]:
        """The nodes that take the values, each with the index of the input."""
        for value in self:
            yield from flow.consumers.get(value, ())

    def add(self, values: Iterable[Visited]) -> None:
        """Queue values that were not seen before; the empty name stands for an optional input or output left out."""
        for value in values:
            if value and value not in self.seen:
                self.seen.add(value)
                self.waiting.append(value)


@dataclass(eq=False, repr=False)
class Descent:
    """Answers which values of one flow depend on which others."""

    flow: Flow
    budget: WalkBudget

    def find_update(self, name: str, outputs: "set[str]", through: Container[str] | None = None) -> str | None:
        """Find the nearest of some outputs that depends on an input: the one that carries a replaced state on.

        `outputs` have the state's element type and shape, and no other role. `through` are the operators that may lie
        between, all of them where it is None.
        """
        wanted = self._values_behind(outputs)
        waiting: list[tuple[int, str]] = [(-1, name)]
        seen = {name}
        while waiting and self.budget.goes_on():
            _, value = heappop(waiting)
            if value in wanted:
                return wanted[value]
            for node, index in self.flow.consumers.get(value, ()):
                loops = through is not None and node.has("loop")
                if node.op in SHAPES or (through is not None and not loops and node.op not in through):
                    continue
                for output in views_of(node, index) if loops else node.outputs:
                    if output and output not in seen:
                        seen.add(output)
                        heappush(waiting, (node.index, output))
        return None

    def find_carried(self, name: str, outputs: "set[str]") -> str | None:
        """Find the output that returns what a loop has carried on from an input."""
        wanted, value = self._values_behind(outputs), name
        walk = Walk([name], self.budget, NEAR)
        for value in walk:
            if value in self.flow.carried:
                return wanted.get(self.flow.carried[value])
            walk.add(n.output() for n, _ in self.flow.consumers.get(value, ()) if n.op in PASSES_OUT)
        return None

    def _values_behind(self, outputs: "set[str]") -> dict[str, str]:
        """Values that outputs return, and those that they are casts or views of: an output may be written late."""
        found: dict[str, str] = {}
        for output in sorted(outputs):
            for value in self.views(self.flow.results[output]):
                found.setdefault(value, output)
        return found

    def views(self, value: str) -> Iterator[str]:
        """A value, and those that it is a cast or view of, or that a loop returns as it, one after the other."""
        seen = set[str]()
        while value and value not in seen:
            yield value
            seen.add(value)
            node = self.flow.producers.get(value)
            if node is not None and node.has("loop"):
                value = viewed_by(node, value)
            else:
                value = node.input(0) if node is not None and node.op in PASSES_OUT else ""

    def computed_at(self, output: str) -> int:
        """The index of the node that computes an output, before casts and views; -1 where none does."""
        nodes = [self.flow.producers.get(value) for value in self.views(self.flow.results.get(output, output))]
        return nodes[-1].index if nodes and nodes[-1] is not None else -1

    def find_count(self, name: str, outputs: "set[str]", tokens: "set[str]") -> str | None:
        """Find the output that returns a counter: the input plus a number that depends on `tokens` alone."""
        walk = Walk([(name, False)], self.budget, MOST_VISITED)
        for value, added in walk:
            output = next((output for output in self.flow.outputs_of.get(value, ()) if output in outputs), None)
            if output is not None and added:
                return output
            for node, index in self.flow.consumers.get(value, ()):
                step = (node.output(), added or node.has("add"))
                if node.op not in COUNTS_ON or not step[0] or step in walk.seen:
                    continue
                if not node.has("add") or self._depends_only_on(node.input(1 - index), tokens):
                    walk.add([step])
        return None

    def _depends_only_on(self, value: str, names: "set[str]") -> bool:
        """Whether a value depends on no other inputs of the graph, not even on their shapes."""
        walk = Walk([value], self.budget)
        for current in walk:
            node = self.flow.producers.get(current)
            if node is None and current not in names and current not in self.flow.constants:
                return False
            walk.add(node.inputs if node is not None else ())
            if len(walk.seen) > NEAR:
                return False
        return True

    def meets(self, name: str, values: "set[str]") -> bool:
        """Whether an input is multiplied with, or added to, one of some values before it reaches an attention.

        An input that is combined with new tokens in this way is no past: it is a rotation table or a mask.
        """
        walk = Walk([name], self.budget, MOST_VISITED)
        for node, index in walk.takers(self.flow):
            if node.op in MIXES and any(other in values for i, other in enumerate(node.inputs) if i != index):
                return True
            if keeps(node, index) or node.op in MIXES:
                walk.add([node.output()])
        return False

    def ancestors(self, *values: str) -> set[str]:
        """All values whose content some values depend on, themselves included; shapes alone do not count."""
        walk = Walk(values)
        for value in walk:
            node = self.flow.producers.get(value)
            walk.add(node.inputs if node is not None and node.op not in SHAPES else ())
        return walk.seen

    def reached_from(self, names: "set[str]", before: FlatNode | None = None) -> set[str]:
        """All values that depend on the content of some inputs, themselves included; shapes alone do not count.

        `before` limits them to those that nodes in front of it compute.
        """
        walk = Walk(names)
        for node, _ in walk.takers(self.flow):
            if node.op not in SHAPES and (before is None or node.index < before.index):
                walk.add(node.outputs)
        return walk.seen
