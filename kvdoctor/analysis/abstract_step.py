"""One decode step computed with shapes alone, and what it answers: the number of heads, and the axes of the tokens.

Sizes that agree by chance would answer nothing: sequences, new tokens and the past have sizes of their own.

Heads: the first axis of a cache may count batch times heads. A config may give the number, or none, or that of the
queries where keys have fewer heads. For a number of sequences, only the right number of heads fits to the new keys and
values.

Tokens: [batch, new] in nearly every decoder. In a few time comes first, [new, batch], or there is no batch at all:
tokens [new] and caches [heads, past, width]. The shapes raise the question: the caches have the name of the tokens'
second axis as their batch, or tokens of one axis come with caches whose first axis is a number. On two sequences of
three tokens, read the usual way, the graph must return caches of two sequences, each longer by three.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import Axis, CacheContract, Port, Slot

if TYPE_CHECKING:
    from kvdoctor.analysis.abstract_run.graph_run import AbstractGraph
    from kvdoctor.analysis.abstract_run.values import Abstract


SEQUENCES, TOKENS, PAST = 2, 3, 5
"""Sizes of the step, all different."""
ANY = -1
"""A size that no rule gives: the length of a cache of which the graph cuts old entries off."""

MOST_NODES = 20_000
"""Nodes that are computed for one question, at most."""
MOST_NODES_IN_ALL = 100_000
"""Nodes that are computed for all questions about one graph, at most."""


@dataclass(eq=False, repr=False)
class AbstractStep:
    """A decode graph that is asked how it must be called."""

    decode: OnnxFile
    left: int = MOST_NODES_IN_ALL

    def returns_caches(self, contract: CacheContract) -> bool | None:
        """Whether a step as the contract says returns caches of as many sequences, each longer by the new tokens.

        Tokens of one axis are those of all sequences one after another. False where the graph cannot be computed, None
        where that takes too many nodes: then the question has no answer.
        """
        # Loaded here, with numpy: hardly any model comes to this question.
        from kvdoctor.analysis.abstract_run.values import CannotRun, TooMuchWork

        if contract.graph("decode").stages or self.decode.graph.model.functions:
            return False
        rows = contract.fixed_batch or SEQUENCES
        try:
            found = self._run(_feed_step(contract, rows))
        except TooMuchWork:
            return None
        except (CannotRun, ValueError, LookupError):  # an input that no call can feed among them
            return False
        returned = {name: value.shape for name, value in found.items()}
        expected = dict(_expect_presents(contract, rows))
        return bool(expected) and all(_has_sizes(returned.get(name), shape) for name, shape in expected.items())

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


def _feed_step(contract: CacheContract, rows: int) -> "dict[str, Abstract]":
    """What the contract feeds a step of several tokens on a cache: integers as they are, of floats the shape."""
    from kvdoctor.analysis.abstract_run.values import Abstract, exactly
    from kvdoctor.decode.calls import Encoded, Past, Scenario, as_array
    from kvdoctor.decode.feeds import FeedBuilder
    from kvdoctor.decode.inputs import synthetic_cross_caches, synthetic_encoder_states

    scenario = Scenario(batch=rows, prompt=PAST, steps=TOKENS + 1)
    encoded = Encoded(synthetic_encoder_states(contract, scenario), synthetic_cross_caches(contract, scenario))
    builder = FeedBuilder(contract, scenario, encoded)
    past = Past({slot.past: builder.placeholder(slot, PAST) for slot in contract.slots}, PAST)
    fed = {name: as_array(value) for name, value in builder.decode(PAST, PAST + TOKENS, past).feeds.items()}
    return {name: exactly(a) if a.dtype.kind in "iub" else Abstract(a.shape) for name, a in fed.items()}


def _has_sizes(shape: tuple[int, ...] | None, expected: tuple[int, ...]) -> bool:
    """Whether a shape is as expected, where ANY stands for each size."""
    if shape is None or len(shape) != len(expected):
        return False
    return all(size in (ANY, found) for found, size in zip(shape, expected, strict=True))


def _expect_presents(contract: CacheContract, rows: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shape of each present after a step on a past that grows, or that is a buffer of a declared size."""
    sizes: dict[Axis, int] = {"batch": rows, "batch_heads": rows * (contract.heads or 1), "past": PAST + TOKENS}
    growing = [slot for slot in contract.growing if slot.growth != "delta"]
    for slot in contract.slots:
        if slot.present is not None and slot.trimmed:
            yield slot.present, slot.sized({**sizes, "past": ANY})
    for slot in (*growing, *(slot for slot in _list_buffers(contract) if slot.size("capacity") is not None)):
        if slot.present is not None:
            yield slot.present, slot.sized(sizes)


def _list_buffers(contract: CacheContract) -> Iterator[Slot]:
    """The slots whose present is as long as their past."""
    return (slot for slot in contract.slots if slot.growth in ("static", "ring") and slot.carry == "feed-back")


MOST_HEADS = 128
"""Heads of one layer that are tried: the largest models known have 128."""


def count_heads(contract: CacheContract, decode: OnnxFile) -> CacheContract:
    """The contract with the number of heads for which a decode step returns the caches that it must.

    That of a config counts where it fits, and where no other one alone does.
    """
    rows = [slot for slot in contract.slots if "batch_heads" in slot.axes]
    if not rows and not _may_hold_heads(contract):
        return contract
    step = AbstractStep(decode)
    if (rows and not contract.heads) or step.returns_caches(contract) is False:
        fitting = _find_fitting(step, contract if rows else _with_heads_in_rows(contract))
        if len(fitting) == 1:
            said = (
                f"{fitting[0].heads} heads for each sequence: with no other number of 1 to {MOST_HEADS} do the sizes "
                "of a decode step agree"
            )
            return replace(fitting[0], evidence=(*contract.evidence, said))
    return contract


def _find_fitting(step: AbstractStep, contract: CacheContract) -> list[CacheContract]:
    """The contract with each number of heads that fits, up to two; none unless all numbers could be tried."""
    fitting: list[CacheContract] = []
    for heads in range(1, MOST_HEADS + 1):
        tried = replace(contract, heads=heads)
        fits = step.returns_caches(tried)
        if fits is None:
            return []
        if fits:
            fitting.append(tried)
        if len(fitting) > 1:
            break
    return fitting


def _may_hold_heads(contract: CacheContract) -> bool:
    """Whether caches of three axes have another name for their batch than the tokens."""
    tokens = contract.graph("decode").port("token_ids") or contract.graph("decode").port("embeddings")
    if tokens is None or tokens.axes[:1] != ("batch",) or not isinstance((tokens.shape or (1,))[0], str):
        return False
    slots = (*contract.growing, *_list_buffers(contract), *(slot for slot in contract.slots if slot.trimmed))
    batches = {slot.shape[0] for slot in slots if len(slot.axes) == 3 and slot.axes[0] == "batch"}
    return len(batches) == 1 and all(isinstance(size, str) and size != (tokens.shape or ())[0] for size in batches)


def _with_heads_in_rows(contract: CacheContract) -> CacheContract:
    """The contract with batch times heads as the rows of its caches of three axes."""
    taken = {slot.past: slot for slot in contract.slots if len(slot.axes) == 3 and slot.axes[0] == "batch"}
    names = {name for slot in taken.values() for name in (slot.past, slot.present, slot.filled_by)}
    slots = [replace(s, axes=("batch_heads", *s.axes[1:])) if s.past in taken else s for s in contract.slots]

    def turn(port: Port) -> Port:
        turned = port.name in names and port.axes[:1] == ("batch",)
        return replace(port, axes=("batch_heads", *port.axes[1:])) if turned else port

    return _with_ports(replace(contract, slots=tuple(slots)), turn)


USUAL: tuple[Axis, ...] = ("batch", "new")


def order_tokens(contract: CacheContract, decode: OnnxFile) -> CacheContract:
    """The contract with the axes of tokens, logits and caches as the graph has them."""
    graph = contract.graph("decode")
    port, logits = graph.port("token_ids") or graph.port("embeddings"), graph.port("logits")
    if port is None or port.shape is None:
        return contract
    first, second, *_ = (*port.shape, None, None)
    batches = {slot.shape[slot.axes.index("batch")] for slot in contract.slots if "batch" in slot.axes}
    if port.role == "token_ids" and port.axes == ("new",) and batches == {first} != {1}:
        return _with_ports(
            contract,
            lambda one: replace(one, axes=("batch",)) if one.name == port.name else one,
            f"{port.name!r} has one token of each sequence: its one axis is the batch of the states",
        )
    named = port.axes[:2] == USUAL and isinstance(first, str) and isinstance(second, str)
    if named and second in batches and first not in batches and not AbstractStep(decode).returns_caches(contract):
        return _put_time_first(contract, port)
    # One head and one sequence look the same: logits for each token are those of one sequence.
    headless = all(slot.size("batch") is not None and "kv_heads" not in slot.axes for slot in contract.slots)
    if port.axes == ("new",) and not isinstance(first, int) and contract.growing and headless:
        shape = logits.shape or () if logits is not None else ()
        if (len(shape) == 2 and shape[:1] == port.shape) or not AbstractStep(decode).returns_caches(contract):
            return _leave_batch_out(contract, port)
    return contract


def _put_time_first(contract: CacheContract, tokens: Port) -> CacheContract:
    """The contract with time first in the tokens, and in all that has the same two axes in front."""
    shape = (tokens.shape or ())[:2]

    def turn(port: Port) -> Port:
        same = port.axes[:2] == USUAL and (port.shape or ())[:2] == shape
        return replace(port, axes=("new", "batch", *port.axes[2:])) if same else port

    said = f"{tokens.name!r} has the new tokens in front of the batch"
    return _with_ports(contract, turn, said)


def _leave_batch_out(contract: CacheContract, tokens: Port) -> CacheContract:
    """The contract of one sequence: the first axis of the caches counts heads, that of the logits tokens."""

    def with_heads(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
        return tuple("kv_heads" if axis == "batch" else axis for axis in axes)

    def name_axes(port: Port) -> Port:
        if port.role == "past":
            return replace(port, axes=with_heads(port.axes))
        counts_tokens = port.role == "logits" and port.axes[:1] == ("batch",) and port.shape is not None
        if counts_tokens and "new" not in port.axes and (port.shape or ())[:1] == tokens.shape:
            return replace(port, axes=("new", *port.axes[1:]))
        return port

    slots = tuple(replace(slot, axes=with_heads(slot.axes)) for slot in contract.slots)
    return _with_ports(replace(contract, slots=slots), name_axes, f"{tokens.name!r} and the cache have no batch axis")


def _with_ports(contract: CacheContract, change: Callable[[Port], Port], *said: str) -> CacheContract:
    graphs = {
        name: replace(graph, inputs=tuple(map(change, graph.inputs)), outputs=tuple(map(change, graph.outputs)))
        for name, graph in contract.graphs.items()
    }
    return replace(contract, graphs=graphs, evidence=(*contract.evidence, *said))
