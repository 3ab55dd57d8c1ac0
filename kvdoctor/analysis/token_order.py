"""Which axis of the tokens is the batch: [batch, new] in nearly every decoder, [new, batch] where time comes first.

The names of the axes raise the question, where the caches have the name of the tokens' second axis as their batch. The
graph answers it: with two sequences of three tokens, read the usual way, it must return caches of two sequences.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import Axis, CacheContract, Graph, Port

USUAL: tuple[Axis, ...] = ("batch", "new")
SEQUENCES, TOKENS, PAST = 2, 3, 5
"""Sizes of the call that answers, all different."""

MOST_NODES = 20_000
"""Nodes of the graph, at most: of a larger one the names are believed."""


def order_tokens(contract: CacheContract, decode: OnnxFile) -> CacheContract:
    """The contract with the axes of tokens, and of what has the same two axes in front, in the order of the graph."""
    port = contract.graph("decode").port("token_ids") or contract.graph("decode").port("embeddings")
    if port is None or not _names_batch_second(port, contract) or _runs_as_usual(contract, decode):
        return contract
    shape = (port.shape or ())[:2]

    def turn(one: Port) -> Port:
        same = one.axes[:2] == USUAL and (one.shape or ())[:2] == shape
        return replace(one, axes=("new", "batch", *one.axes[2:])) if same else one

    def turn_all(graph: Graph) -> Graph:
        return replace(graph, inputs=tuple(map(turn, graph.inputs)), outputs=tuple(map(turn, graph.outputs)))

    said = f"{port.name!r} has the new tokens in front of the batch"
    graphs = {name: turn_all(graph) for name, graph in contract.graphs.items()}
    return replace(contract, graphs=graphs, evidence=(*contract.evidence, said))


def _names_batch_second(port: Port, contract: CacheContract) -> bool:
    """Whether the caches have the name of the second axis of the tokens as their batch, and not that of the first."""
    if port.axes[:2] != USUAL or port.shape is None:
        return False
    first, second = port.shape[:2]
    batches = {slot.shape[slot.axes.index("batch")] for slot in contract.slots if "batch" in slot.axes}
    return isinstance(first, str) and isinstance(second, str) and second in batches and first not in batches


def _runs_as_usual(contract: CacheContract, decode: OnnxFile) -> bool:
    """Whether a step on tokens [batch, new] returns caches of as many sequences, each longer by the new tokens."""
    # Loaded here, with numpy: hardly any model comes to this question.
    from kvdoctor.analysis.abstract_run.graph_run import AbstractGraph, Budget
    from kvdoctor.analysis.abstract_run.values import Abstract, CannotRun, TooMuchWork, exactly
    from kvdoctor.decode.calls import Past, Scenario, as_array
    from kvdoctor.decode.feeds import FeedBuilder

    if contract.graph("decode").stages or decode.graph.model.functions:
        return False
    builder = FeedBuilder(contract, Scenario(batch=SEQUENCES, prompt=PAST, steps=TOKENS + 1))
    past = Past({slot.past: builder.placeholder(slot, PAST) for slot in contract.slots}, PAST)
    try:
        fed = {name: as_array(value) for name, value in builder.decode(PAST, PAST + TOKENS, past).feeds.items()}
        feeds = {name: exactly(a) if a.dtype.kind in "iub" else Abstract(a.shape) for name, a in fed.items()}
        found = AbstractGraph(decode.graph.model, frozenset(), Budget(MOST_NODES)).run(feeds)
    except (CannotRun, TooMuchWork, ValueError, KeyError):
        return False
    returned = {name: value.shape for name, value in found.items() if value.shape is not None}
    expected = dict(_expect_presents(contract))
    return bool(expected) and all(returned.get(name) == shape for name, shape in expected.items())


def _expect_presents(contract: CacheContract) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shape of each present behind a step on a past that grows."""
    for slot in contract.growing:
        if slot.present is not None and slot.growth != "delta":
            yield slot.present, slot.sized({"batch": SEQUENCES, "past": PAST + TOKENS})
