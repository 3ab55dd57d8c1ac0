"""Walks over a graph's values: how far they go, and which values depend on which."""

from collections import deque
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush

from kvdoctor.analysis.dataflow.operators import COUNTS_ON, KEEPS, MIXES, PASSES_OUT, SHAPES
from kvdoctor.model.flow import Flow

MOST_VISITED = 4000
"""Values that one walk visits before it gives up: the attention of a state is close to it."""

NEAR = 64
"""Values that a walk visits where the answer, if there is one, is close by."""

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


class Walk:
    """Visits values breadth first, each once; `add` queues the next ones while the walk is iterated.

    It ends when nothing is left, when `most` values were seen, or when the budget of the graph is spent.
    """

    def __init__(self, start: Iterable[str], budget: WalkBudget, most: int | None = None) -> None:
        self.waiting = deque(start)
        self.seen = set(self.waiting)
        self.budget = budget
        self.most = most

    def __iter__(self) -> Iterator[str]:
        while self.waiting and (self.most is None or len(self.seen) < self.most) and self.budget.goes_on():
            yield self.waiting.popleft()

    def add(self, values: Iterable[str]) -> None:
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
            for node, _ in self.flow.consumers.get(value, ()):
                if node.op in SHAPES or (through is not None and node.op not in through):
                    continue
                for output in node.outputs:
                    if output and output not in seen:
                        seen.add(output)
                        heappush(waiting, (node.index, output))
        return None

    def _values_behind(self, outputs: "set[str]") -> dict[str, str]:
        """Values that outputs return, and those that they are casts or views of: an output may be written late."""
        found: dict[str, str] = {}
        for output in sorted(outputs):
            value: str | None = self.flow.results[output]
            while value and value not in found:
                found[value] = output
                node = self.flow.producers.get(value)
                value = node.input(0) if node is not None and node.op in PASSES_OUT else None
        return found

    def first_use(self, name: str) -> int:
        """The index of the first node that takes a value, -1 where none does."""
        return min((node.index for node, _ in self.flow.consumers.get(name, ())), default=-1)

    def computed_at(self, output: str) -> int:
        """The index of the node that computes an output, before casts and views; -1 where none does."""
        value = self.flow.results.get(output, output)
        node, passed = self.flow.producers.get(value), set[int]()
        while node is not None and node.op in PASSES_OUT and node.index not in passed:
            passed.add(node.index)
            node = self.flow.producers.get(node.input(0))
        return node.index if node is not None else -1

    def find_count(self, name: str, outputs: "set[str]", tokens: "set[str]") -> str | None:
        """Find the output that returns a counter: the input plus a number that depends on `tokens` alone."""
        waiting, seen = deque([(name, False)]), {(name, False)}
        while waiting and len(seen) < MOST_VISITED and self.budget.goes_on():
            value, added = waiting.popleft()
            output = next((output for output in self.flow.outputs_of.get(value, ()) if output in outputs), None)
            if output is not None and added:
                return output
            for node, index in self.flow.consumers.get(value, ()):
                step = (node.output(), added or node.op == "Add")
                if node.op not in COUNTS_ON or not step[0] or step in seen:
                    continue
                if node.op != "Add" or self._depends_only_on(node.input(1 - index), tokens):
                    seen.add(step)
                    waiting.append(step)
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
        for value in walk:
            for node, index in self.flow.consumers.get(value, ()):
                if node.op in MIXES and any(other in values for i, other in enumerate(node.inputs) if i != index):
                    return True
                if index in KEEPS.get(node.op, ()) or node.op in MIXES:
                    walk.add([node.output()])
        return False

    def ancestors(self, *values: str) -> set[str]:
        """All values whose content some values depend on, themselves included; shapes alone do not count."""
        waiting, seen = list(values), set(values)
        while waiting:
            node = self.flow.producers.get(waiting.pop())
            if node is not None and node.op not in SHAPES:
                fresh = {name for name in node.inputs if name} - seen
                seen |= fresh
                waiting += fresh
        return seen

    def reached_from(self, names: "set[str]") -> set[str]:
        """All values that depend on the content of some inputs, themselves included; shapes alone do not count."""
        reached = set(names)
        for node in self.flow.nodes:
            if node.op not in SHAPES and any(name in reached for name in node.inputs):
                reached.update(node.outputs)
        return reached
