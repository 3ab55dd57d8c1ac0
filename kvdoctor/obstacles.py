"""Why decode steps cannot be run on a stack that is understood, or not wholly."""

from collections.abc import Iterator

from kvdoctor.contract import CacheContract
from kvdoctor.lacks import unfilled
from kvdoctor.stacks import StackFiles

COMPILED = "EPContext"
"""The operator that holds a graph in the binary form of a device. Source: ONNX Runtime, EP context design."""


def obstacles(stack: StackFiles, contract: CacheContract) -> Iterator[str]:
    """Why decode steps cannot be run on a stack; the first reason is the one to give."""
    for file in stack.files.values():
        if file.external_problems:
            yield f"external data of {file.name} cannot be read"
    empty = {*unfilled(contract)}
    if set(contract.missing) - empty or stack.kind == "unpaired" or not contract.slots:
        yield "the cache contract is not complete"
    yield from _undrivable(stack, contract)
    yield from _unfeedable(contract)


def _undrivable(stack: StackFiles, contract: CacheContract) -> Iterator[str]:
    """What is understood and still cannot be run step by step here."""
    if any(COMPILED in file.view.operators for file in stack.files.values() if file.view is not None):
        yield f"it was compiled for a device ({COMPILED}), and only the execution provider of that device can run it"
    if stack.operator is not None:
        yield f"the operator {stack.operator} runs the whole loop with the cache inside; there is nothing to feed back"
    if contract.slots and not contract.takes_tokens:
        yield "it takes no tokens and gives no logits: a decoder of frames, a streaming encoder, a pipeline stage"
    if contract.graph("decode").port("logits") is None:
        yield "the decoder returns tokens and no logits, so there is nothing to hold against a reference run"
    if any(slot.growth == "paged" for slot in contract.slots):
        yield "a paged cache is addressed by tables that the serving engine keeps"
    if any(unfilled(contract)):
        yield "a past has no present that fills it"
    from kvdoctor.experiments import frozen_past

    if contract.frozen_past is not None:
        if reason := frozen_past.can_be_filled(contract):
            yield reason
    elif contract.new_tokens not in (None, 1):
        yield f"the first step takes {contract.new_tokens} new tokens only, so there is no reference run"


def _unfeedable(contract: CacheContract) -> Iterator[str]:
    """Inputs of an element type that cannot be made up."""
    unknown = {port.dtype for graph in contract.graphs.values() for port in graph.inputs} - _feedable()
    if unknown:
        yield f"no feed can be made of element type {', '.join(sorted(unknown))}"


def _feedable() -> set[str]:
    from kvdoctor.calls import NUMPY_TYPES

    return set(NUMPY_TYPES)
