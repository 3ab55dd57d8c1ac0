"""Which values others have a part in: how states that are replaced are carried on, what tokens reach."""

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush

from kvdoctor.dataflow.effort import MOST_VISITED, NEAR, Effort
from kvdoctor.dataflow.operators import COUNTS_ON, KEEPS, MIXES, PASSES_OUT, SHAPES
from kvdoctor.flow import Flow


@dataclass
class Descent:
    """Questions to one flow about what comes of a value, and of what a value comes."""

    flow: Flow
    effort: Effort

    def updated(self, name: str, fitting: "set[str]") -> str | None:
        """The nearest of some outputs that depends on an input: how a replaced state is carried on.

        `fitting` are the outputs of the same element type and shape that nothing else claims.
        """
        wanted: dict[str, str] = {}
        for output in sorted(fitting):
            value: str | None = self.flow.results[output]
            while value and value not in wanted:  # as it was before it was only passed out: that may come late
                wanted[value] = output
                node = self.flow.producers.get(value)
                value = node.input(0) if node is not None and node.op in PASSES_OUT else None
        waiting: list[tuple[int, str]] = [(-1, name)]
        seen = {name}
        while waiting and self.effort.goes_on():
            _, value = heappop(waiting)
            if value in wanted:
                return wanted[value]
            for node, _ in self.flow.consumers.get(value, ()):
                if node.op in SHAPES:
                    continue
                for output in node.outputs:
                    if output and output not in seen:
                        seen.add(output)
                        heappush(waiting, (node.index, output))
        return None

    def used_first(self, name: str) -> int:
        """The place of the first node that takes a value."""
        return min((node.index for node, _ in self.flow.consumers.get(name, ())), default=-1)

    def made_last(self, output: str) -> int:
        """The place of the node that makes an output, before it is only turned and passed out."""
        value = self.flow.results.get(output, output)
        node, passed = self.flow.producers.get(value), set[int]()
        while node is not None and node.op in PASSES_OUT and node.index not in passed:
            passed.add(node.index)
            node = self.flow.producers.get(node.input(0))
        return node.index if node is not None else -1

    def counted(self, name: str, fitting: "set[str]", tokens: "set[str]") -> str | None:
        """The output that returns a counter: the input with a number added that only `tokens` have a part in."""
        waiting, seen = deque([(name, False)]), {(name, False)}
        while waiting and len(seen) < MOST_VISITED and self.effort.goes_on():
            value, added = waiting.popleft()
            output = next((output for output in self.flow.outputs_of.get(value, ()) if output in fitting), None)
            if output is not None and added:
                return output
            for node, index in self.flow.consumers.get(value, ()):
                step = (node.output(), added or node.op == "Add")
                if node.op not in COUNTS_ON or not step[0] or step in seen:
                    continue
                if node.op != "Add" or self._made_of(node.input(1 - index), tokens):
                    seen.add(step)
                    waiting.append(step)
        return None

    def _made_of(self, value: str, names: "set[str]") -> bool:
        """Whether no other inputs of the graph than some have a part in a value, not even by their shape."""
        waiting, seen = deque([value]), {value}
        while waiting and self.effort.goes_on():
            current = waiting.popleft()
            node = self.flow.producers.get(current)
            if node is None and current not in names and current not in self.flow.constants:
                return False
            fresh = [name for name in (node.inputs if node is not None else ()) if name and name not in seen]
            seen.update(fresh)
            waiting.extend(fresh)
            if len(seen) > NEAR:
                return False
        return True

    def meets(self, name: str, values: "set[str]") -> bool:
        """Whether an input is multiplied with or added to one of some values before it comes to an attention.

        What is reckoned with new tokens so is no past: it is a table of rotations, or a mask.
        """
        waiting, seen = deque([name]), {name}
        while waiting and len(seen) < MOST_VISITED and self.effort.goes_on():
            for node, index in self.flow.consumers.get(waiting.popleft(), ()):
                if node.op in MIXES and any(other in values for i, other in enumerate(node.inputs) if i != index):
                    return True
                if (index in KEEPS.get(node.op, ()) or node.op in MIXES) and node.output() not in seen:
                    seen.add(node.output())
                    waiting.append(node.output())
        return False

    def behind(self, value: str) -> set[str]:
        """All values whose content has a part in one; shapes alone do not count."""
        waiting, seen = [value], {value}
        while waiting:
            node = self.flow.producers.get(waiting.pop())
            if node is not None and node.op not in SHAPES:
                fresh = {name for name in node.inputs if name} - seen
                seen |= fresh
                waiting += fresh
        return seen

    def reached_from(self, names: "set[str]") -> set[str]:
        """All values that the content of some inputs has a part in; shapes alone do not count."""
        reached = set(names)
        for node in self.flow.nodes:
            if node.op not in SHAPES and any(name in reached for name in node.inputs):
                reached.update(node.outputs)
        return reached
