"""One decode step computed with shapes alone, to find out whether a graph can be read as a contract reads it.

Sizes that agree by chance would answer nothing: sequences, new tokens and the past have sizes of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import Axis, CacheContract

if TYPE_CHECKING:
    from kvdoctor.analysis.abstract_run.graph_run import AbstractGraph
    from kvdoctor.analysis.abstract_run.values import Abstract

SEQUENCES, TOKENS, PAST = 2, 3, 5
"""Sizes of the step, all different."""

MOST_NODES = 20_000
"""Nodes that are computed for one question, at most."""
MOST_NODES_IN_ALL = 100_000
"""Nodes that are computed for all questions about one graph, at most."""


@dataclass
class AbstractStep:
    """A decode graph that is asked how it must be called."""

    decode: OnnxFile
    left: int = MOST_NODES_IN_ALL

    def returns_caches(self, contract: CacheContract) -> bool | None:
        """Whether a step as the contract says returns caches of as many sequences, each longer by the new tokens.

        Tokens of one axis are those of all sequences behind each other. False where the graph cannot be computed, None
        where that takes too many nodes: then the question has no answer.
        """
        # Loaded here, with numpy: hardly any model comes to this question.
        from kvdoctor.analysis.abstract_run.values import Abstract, CannotRun, TooMuchWork, exactly
        from kvdoctor.decode.calls import Encoded, Past, Scenario, as_array
        from kvdoctor.decode.feeds import FeedBuilder
        from kvdoctor.decode.inputs import synthetic_cross_caches, synthetic_encoder_states

        if contract.graph("decode").stages or self.decode.graph.model.functions:
            return False
        rows = contract.fixed_batch or SEQUENCES
        scenario = Scenario(batch=rows, prompt=PAST, steps=TOKENS + 1)
        encoded = Encoded(synthetic_encoder_states(contract, scenario), synthetic_cross_caches(contract, scenario))
        builder = FeedBuilder(contract, scenario, encoded)
        past = Past({slot.past: builder.placeholder(slot, PAST) for slot in contract.slots}, PAST)
        try:
            fed = {name: as_array(value) for name, value in builder.decode(PAST, PAST + TOKENS, past).feeds.items()}
            feeds = {name: exactly(a) if a.dtype.kind in "iub" else Abstract(a.shape) for name, a in fed.items()}
            found = self._run(feeds)
        except TooMuchWork:
            return None
        except (CannotRun, ValueError, KeyError):
            return False
        returned = {name: value.shape for name, value in found.items() if value.shape is not None}
        expected = dict(_expect_presents(contract, rows))
        return bool(expected) and all(returned.get(name) == shape for name, shape in expected.items())

    def _run(self, feeds: "dict[str, Abstract]") -> "dict[str, Abstract]":
        """The outputs of a step; what it computes is taken from what is left for all."""
        budget = self._graph.budget
        budget.left = given = min(MOST_NODES, self.left)
        try:
            return self._graph.run(feeds)
        finally:
            self.left -= given - max(budget.left, 0)

    @cached_property
    def _graph(self) -> "AbstractGraph":
        from kvdoctor.analysis.abstract_run.graph_run import AbstractGraph, Budget

        return AbstractGraph(self.decode.graph, frozenset(), Budget(MOST_NODES))


def _expect_presents(contract: CacheContract, rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shape of each present behind a step on a past that grows."""
    sizes: dict[Axis, int] = {
        "batch": rows,
        "batch_heads": rows * (contract.heads or 1),
        "past": PAST + TOKENS,
    }
    for slot in contract.growing:
        if slot.present is not None and slot.growth != "delta":
            yield slot.present, slot.sized(sizes)
