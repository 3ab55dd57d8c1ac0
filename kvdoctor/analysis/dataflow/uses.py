"""What values are used for: an operand whose product reaches a Softmax is a key, one that meets its result a value."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from kvdoctor.analysis.dataflow import walks
from kvdoctor.analysis.dataflow.walks import MIXES, MOST_VISITED, NEAR_USE, Walk, WalkBudget, is_past, keeps, viewed_by
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import operator_of, operators_with, places_of, ports_of
from kvdoctor.records import record

UsedAs = Literal["key", "value", "key-value", "memory", "conv"]
ATTENTION_PARTS = ("key", "value", "key-value")

LOOKUPS = places_of("embed")
MOST_VIEWS = 12
"""Casts and views between an output and the value that an attention takes."""

MOST_OUTPUTS_FOLLOWED = 3
"""Outputs of one node that a walk goes on from; a Split of queries, keys and values has three."""


@record
class StateUse:
    """What a state is used for. `site` is the index of the attention in the flow, which orders the layers.

    `part` is `memory` for what a weight is multiplied with: hidden states from which keys and values are computed.
    `proven` says that the Softmax of the attention was found: its input comes from the key, its result meets the value.
    An operand of a product without a Softmax near it is taken for a value, unproven.
    """

    part: UsedAs
    site: int
    proven: bool = True


@dataclass(eq=False, repr=False)
class UseFinder:
    """Finds the attention, projection or convolution that takes a value; answers are cached."""

    flow: Flow
    budget: WalkBudget
    _uses: dict[str, StateUse | None] = field(default_factory=dict)
    _scores: dict[int, bool] = field(default_factory=dict)

    def use_of(self, name: str) -> StateUse | None:
        """What the nearest attention, projection or convolution after a value uses it for."""
        if name not in self._uses:
            self._uses[name] = self._find_use(name)
        return self._uses[name]

    def _find_use(self, name: str) -> StateUse | None:
        found: dict[UsedAs, tuple[FlatNode, int]] = {}
        walk = Walk([name], self.budget, MOST_VISITED)
        for node, index in walk.takers(self.flow):
            part = self._part_at(node, index)
            if part is not None:
                found.setdefault(part, (node, index))
            elif keeps(node, index) or node.op in MIXES or is_past(node, index):
                walk.add(node.outputs[:MOST_OUTPUTS_FOLLOWED])
        if {"key", "value"} <= found.keys() or "key-value" in found:
            return StateUse("key-value", min(node.index for node, _ in found.values()))
        order: tuple[UsedAs, ...] = ("key", "value", "conv", "memory")
        part = next((part for part in order if part in found), None)
        if part is None:
            return None
        node, index = found[part]
        return StateUse(part, node.index, part != "value" or self._is_weighted(node, index))

    def masked_by(self, masks: Iterable[str]) -> set[str]:
        """All values that masks change, other than through positions and the weights of an attention."""
        scores = Walk(value for node in self.flow.nodes if self.is_softmax(node) for value in node.inputs[:1])
        for value in scores:
            maker = self.flow.producers.get(value)
            scores.add(maker.inputs if maker is not None and (keeps(maker, 0) or maker.op in MIXES) else ())
        walk = Walk(masks)
        for node, index in walk.takers(self.flow):
            weighs = node.op in MIXES and not scores.seen.isdisjoint(node.outputs)
            passes = node.op not in walks.SHAPES and index not in operator_of(node.op).places
            if passes and not (weighs or node.has("attend") or self.is_softmax(node)):
                walk.add(node.outputs)
        return walk.seen

    def table_rows(self, name: str) -> int | None:
        """Rows of the constant table that an input of integers indexes directly; None where there is none."""
        walk = Walk([name], self.budget, NEAR_USE)
        for node, index in walk.takers(self.flow):
            if index in LOOKUPS.get(node.op, ()):
                name_of_table = node.input(0 if index else 2)
                table, made = self.flow.constant(name_of_table), self.flow.producers.get(name_of_table)
                if table is not None and len(table.dims) >= 2:
                    # The weights of the output head are used again, transposed.
                    transposed = made is not None and made.has("permute")
                    return int(table.dims[-1 if transposed else 0])
            elif keeps(node, index) or node.has("join", "clamp") or (index and node.has("select")):
                walk.add(node.outputs)
        return None

    def use_of_output(self, output: str) -> StateUse | None:
        """What the graph that computes an output uses it for: the value itself, or one that it is a view of."""
        value: str | None = self.flow.results.get(output, output)
        for _ in range(MOST_VIEWS):
            if value is None:
                return None
            use = self.use_of(value)
            if use is not None and use.part in ATTENTION_PARTS:
                return use
            node = self.flow.producers.get(value)
            if node is None or not node.inputs:
                return None
            ports = ports_of(node.domain, node.op)
            for part, out in (ports.pasts if ports else {}).values():
                if out < len(node.outputs) and node.outputs[out] == value and part in ("key", "value", "key-value"):
                    return StateUse(part, node.index)
            value = viewed_by(node, value) or None
        return None

    def _part_at(self, node: FlatNode, index: int) -> UsedAs | None:
        """What a node uses one of its inputs for, where that ends the walk."""
        ports = ports_of(node.domain, node.op)
        if ports is not None:
            part = ports.pasts[index][0] if index in ports.pasts else None
            if part in ("key", "value", "key-value", "conv"):
                return part
            if index in ports.keys:
                return "key"
            if index in ports.values:
                return "value"
        if node.has("convolve") and index == 0:
            return "conv"
        operands = operator_of(node.op).operands
        if index in operands:
            others = [node.inputs[i] for i in operands if i != index and i < len(node.inputs)]
            if all(name in self.flow.fixed for name in others):
                return "memory"
            if node.index not in self._scores:
                self._scores[node.index] = self._reaches_softmax(node)
            return "key" if self._scores[node.index] else "value"
        return None

    def _reaches_softmax(self, node: FlatNode) -> bool:
        """Whether the result of a product reaches a Softmax before it meets another product."""
        walk = Walk(node.outputs, self.budget, MOST_VISITED)
        for value in walk:
            takers = self.flow.consumers.get(value, ())
            if any(self.is_softmax(taker) for taker, _ in takers):
                return True
            for taker, index in takers:
                if keeps(taker, index) or taker.op in MIXES:
                    walk.add(taker.outputs)
        return False

    def is_softmax(self, node: FlatNode) -> bool:
        """Whether a node is a Softmax, or the Exp of a decomposed one, which is divided by its sum."""
        if node.op != "Exp":
            return node.has("softmax")
        takers = {taker.op for output in node.outputs for taker, _ in self.flow.consumers.get(output, ())}
        return not takers.isdisjoint(operators_with("sum")) and not takers.isdisjoint(operators_with("divide"))

    def _is_weighted(self, node: FlatNode, index: int) -> bool:
        """Whether the other operand of a product comes from a Softmax, or a fused operator declares the value."""
        if ports_of(node.domain, node.op) is not None:
            return True
        others = (node.inputs[i] for i in operator_of(node.op).operands if i != index and i < len(node.inputs))
        walk = Walk(others, self.budget, MOST_VISITED)
        for value in walk:
            maker = self.flow.producers.get(value)
            if maker is None:
                continue
            if self.is_softmax(maker):
                return True
            if keeps(maker, 0) or maker.op in MIXES:
                walk.add(maker.inputs)
        return False
