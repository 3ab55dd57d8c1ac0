"""Which axis of the tokens is the batch: [batch, new] in nearly every decoder.

In a few time comes first, [new, batch], or there is no batch at all: tokens [new] and caches [heads, past, width]. The
shapes raise the question: the caches have the name of the tokens' second axis as their batch, or tokens of one axis
come with caches whose first axis is a number. The graph answers it: on two sequences of three tokens, read the usual
way, it must return caches of two sequences, each longer by three.
"""

from collections.abc import Callable
from dataclasses import replace

from kvdoctor.analysis.abstract_step import AbstractStep
from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import Axis, CacheContract, Graph, Port, Slot

USUAL: tuple[Axis, ...] = ("batch", "new")


def order_tokens(contract: CacheContract, decode: OnnxFile) -> CacheContract:
    """The contract with the axes of tokens, logits and caches as the graph has them."""
    port = contract.graph("decode").port("token_ids") or contract.graph("decode").port("embeddings")
    if port is None or port.shape is None:
        return contract
    if _names_batch_second(port, contract) and not AbstractStep(decode).returns_caches(contract):
        return _put_time_first(contract, port)
    # One head and one sequence look alike: logits for each token are those of one sequence.
    if _takes_one_sequence(port, contract) and (
        _has_logits_of(port, contract) or not AbstractStep(decode).returns_caches(contract)
    ):
        return _leave_batch_out(contract, port)
    return contract


def _names_batch_second(port: Port, contract: CacheContract) -> bool:
    """Whether the caches have the name of the second axis of the tokens as their batch, and not that of the first."""
    if port.axes[:2] != USUAL or port.shape is None:
        return False
    first, second = port.shape[:2]
    batches = {slot.shape[slot.axes.index("batch")] for slot in contract.slots if "batch" in slot.axes}
    return isinstance(first, str) and isinstance(second, str) and second in batches and first not in batches


def _takes_one_sequence(port: Port, contract: CacheContract) -> bool:
    """Whether tokens have one axis, and what would be the batch of caches without heads is a number."""
    if port.axes != ("new",) or isinstance((port.shape or (1,))[0], int):
        return False
    return bool(contract.growing) and all(_is_headless(slot) for slot in contract.slots)


def _has_logits_of(tokens: Port, contract: CacheContract) -> bool:
    """Whether the logits [all tokens, vocabulary] have the one axis of the tokens in front."""
    logits = contract.graph("decode").port("logits")
    return logits is not None and len(logits.shape or ()) == 2 and (logits.shape or ())[:1] == tokens.shape


def _is_headless(slot: Slot) -> bool:
    return slot.size("batch") is not None and "kv_heads" not in slot.axes


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

    def name_axes(port: Port) -> Port:
        if port.role == "past":
            return replace(port, axes=_with_heads(port.axes))
        counts_tokens = port.role == "logits" and port.axes[:1] == ("batch",) and port.shape is not None
        if counts_tokens and "new" not in port.axes and (port.shape or ())[:1] == tokens.shape:
            return replace(port, axes=("new", *port.axes[1:]))
        return port

    slots = tuple(replace(slot, axes=_with_heads(slot.axes)) for slot in contract.slots)
    return _with_ports(replace(contract, slots=slots), name_axes, f"{tokens.name!r} and the cache have no batch axis")


def _with_heads(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return tuple("kv_heads" if axis == "batch" else axis for axis in axes)


def _with_ports(contract: CacheContract, change: Callable[[Port], Port], said: str) -> CacheContract:
    def change_all(graph: Graph) -> Graph:
        return replace(graph, inputs=tuple(map(change, graph.inputs)), outputs=tuple(map(change, graph.outputs)))

    graphs = {name: change_all(graph) for name, graph in contract.graphs.items()}
    return replace(contract, graphs=graphs, evidence=(*contract.evidence, said))
