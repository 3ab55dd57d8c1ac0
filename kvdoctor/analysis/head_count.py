"""How many heads a cache has whose first axis counts batch times heads.

A config may give the number, or none, or that of the queries where keys have fewer heads. The graph decides: for a
number of sequences, only the right number of heads fits to the new keys and values.
"""

from dataclasses import replace

from kvdoctor.analysis.abstract_step import AbstractStep
from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.contract import Axis, CacheContract, Graph

MOST_HEADS = 128
"""Heads of one layer that are tried: the largest models known have 128."""


def count_heads(contract: CacheContract, decode: OnnxFile) -> CacheContract:
    """The contract with the number of heads for which a decode step returns the caches that it must.

    That of a config is kept where it fits, and where no other one alone does.
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
    batches = {slot.shape[0] for slot in contract.growing if len(slot.axes) == 3 and slot.axes[0] == "batch"}
    return len(batches) == 1 and all(isinstance(size, str) and size != (tokens.shape or ())[0] for size in batches)


def _with_heads_in_rows(contract: CacheContract) -> CacheContract:
    """The contract with batch times heads as the rows of its caches of three axes."""
    taken = {slot.past for slot in contract.slots if len(slot.axes) == 3 and slot.axes[0] == "batch"}
    slots = tuple(replace(slot, axes=_in_rows(slot.axes)) if slot.past in taken else slot for slot in contract.slots)
    turned = [slot for slot in slots if slot.past in taken]
    names = {name for slot in turned for name in (slot.past, slot.present, slot.filled_by)}

    def turn(graph: Graph) -> Graph:
        inputs, outputs = (
            tuple(replace(port, axes=_in_rows(port.axes)) if port.name in names else port for port in ports)
            for ports in (graph.inputs, graph.outputs)
        )
        return replace(graph, inputs=inputs, outputs=outputs)

    return replace(contract, slots=slots, graphs={name: turn(graph) for name, graph in contract.graphs.items()})


def _in_rows(axes: tuple[Axis, ...]) -> tuple[Axis, ...]:
    return ("batch_heads", *axes[1:]) if axes[:1] == ("batch",) else axes
