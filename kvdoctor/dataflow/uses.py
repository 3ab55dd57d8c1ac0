"""What values are used for: what reaches an attention's Softmax is a key, what meets its result is a value."""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from kvdoctor.cache_operators import ports_of
from kvdoctor.dataflow.effort import MOST_VISITED, Effort
from kvdoctor.dataflow.operators import CONVOLUTIONS, KEEPS, MIXES, PRODUCTS, SOFTMAX, is_past
from kvdoctor.flow import Flow, FlowNode

Part = Literal["key", "value", "key-value", "memory", "conv"]


@dataclass(frozen=True, slots=True)
class Use:
    """What a state is used for. `site` is the place of the attention in the flow, which orders the layers.

    `proven` says that the Softmax of the attention was seen: before it is a key, what meets its result is a value. An
    operand of a product without one near it is taken for a value, unproven.
    """

    part: Part
    site: int
    proven: bool = True


@dataclass
class Uses:
    """Looks for the attention, projection or convolution behind a value; answers are kept."""

    flow: Flow
    effort: Effort
    _known: dict[str, Use | None] = field(default_factory=dict)
    _scores: dict[int, bool] = field(default_factory=dict)

    def of(self, name: str) -> Use | None:
        """What the nearest attention, projection or convolution behind a value takes it for."""
        if name not in self._known:
            self._known[name] = self._used(name)
        return self._known[name]

    def _used(self, name: str) -> Use | None:
        waiting, seen = deque([name]), {name}
        found: dict[str, tuple[FlowNode, int]] = {}
        while waiting and len(seen) < MOST_VISITED and self.effort.goes_on():
            value = waiting.popleft()
            for node, index in self.flow.consumers.get(value, ()):
                part = self._part(node, index)
                if part is not None:
                    found.setdefault(part, (node, index))
                elif index in KEEPS.get(node.op, ()) or node.op in MIXES or is_past(node, index):
                    for output in node.outputs[:3]:
                        if output and output not in seen:
                            seen.add(output)
                            waiting.append(output)
        if {"key", "value"} <= set(found) or "key-value" in found:
            return Use("key-value", min(node.index for node, _ in found.values()))
        part = next((part for part in ("key", "value", "conv", "memory") if part in found), None)
        if part is None:
            return None
        node, index = found[part]
        return Use(part, node.index, part != "value" or self._is_weighted(node, index))

    def made(self, output: str) -> Use | None:
        """What a graph output is used for in the graph that makes it: the value itself, or one it is a view of."""
        value: str | None = self.flow.results.get(output, output)
        for _ in range(12):
            if value is None:
                return None
            use = self.of(value)
            if use is not None and use.part in ("key", "value", "key-value"):
                return use
            node = self.flow.producers.get(value)
            if node is None or not node.inputs:
                return None
            ports = ports_of(node.domain, node.op)
            for part, out in (ports.pasts if ports else {}).values():
                if out < len(node.outputs) and node.outputs[out] == value and part in ("key", "value", "key-value"):
                    return Use(part, node.index)
            value = node.inputs[0] if node.op in KEEPS else None
        return None

    def _part(self, node: FlowNode, index: int) -> str | None:
        """What a node takes its input for, where that ends the walk."""
        ports = ports_of(node.domain, node.op)
        if ports is not None:
            if index in ports.pasts and ports.pasts[index][0] in ("key", "value", "key-value"):
                return ports.pasts[index][0]
            if index in ports.pasts and ports.pasts[index][0] in ("conv",):
                return "conv"
            if index in ports.keys:
                return "key"
            if index in ports.values:
                return "value"
        if node.op in CONVOLUTIONS and index == 0:
            return "conv"
        if index in PRODUCTS.get(node.op, ()):
            others = [node.inputs[i] for i in PRODUCTS[node.op] if i != index and i < len(node.inputs)]
            if all(name in self.flow.fixed for name in others):
                return "memory"
            return "key" if self._gives_scores(node) else "value"
        return None

    def _gives_scores(self, node: FlowNode) -> bool:
        """Whether a product runs into a Softmax before it meets another product."""
        if node.index not in self._scores:
            waiting, seen = deque(node.outputs), set(node.outputs)
            found = False
            while waiting and not found and len(seen) < MOST_VISITED and self.effort.goes_on():
                for taker, index in self.flow.consumers.get(waiting.popleft(), ()):
                    found = found or self.is_softmax(taker)
                    if index in KEEPS.get(taker.op, ()) or taker.op in MIXES:
                        for output in taker.outputs:
                            if output and output not in seen:
                                seen.add(output)
                                waiting.append(output)
            self._scores[node.index] = found
        return self._scores[node.index]

    def is_softmax(self, node: FlowNode) -> bool:
        """A Softmax, or the Exp of one that is spelled out: divided by its sum."""
        if node.op != "Exp":
            return node.op in SOFTMAX
        takers = {taker.op for output in node.outputs for taker, _ in self.flow.consumers.get(output, ())}
        return {"ReduceSum", "Div"} <= takers

    def _is_weighted(self, node: FlowNode, index: int) -> bool:
        """Whether what a product multiplies an operand with comes from a Softmax, or a fused operator says it."""
        if ports_of(node.domain, node.op) is not None:
            return True
        waiting = deque(node.inputs[i] for i in PRODUCTS[node.op] if i != index and i < len(node.inputs))
        seen = set(waiting)
        while waiting and len(seen) < MOST_VISITED and self.effort.goes_on():
            maker = self.flow.producers.get(waiting.popleft())
            if maker is None:
                continue
            if self.is_softmax(maker):
                return True
            if maker.op in KEEPS or maker.op in MIXES or maker.op == "Dropout":
                fresh = [value for value in maker.inputs if value and value not in seen]
                seen.update(fresh)
                waiting.extend(fresh)
        return False
