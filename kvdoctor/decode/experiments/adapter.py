"""A LoRA adapter in a decoder that takes one as inputs: all other experiments run without an adapter."""

from dataclasses import replace

from kvdoctor.contract import CacheContract
from kvdoctor.decode.experiments import Calls, Experiment, Use, several_tokens
from kvdoctor.decode.feeds import FeedBuilder


def with_adapter(builder: FeedBuilder) -> Calls:
    """The loop with an adapter of noise in every call; without it the logits must be others."""
    adapted = replace(builder, adapted=True)
    expected = yield from adapted.whole()
    start = builder.scenario.prompt
    answer = yield adapted.prefill(start, expected[:, :start])
    past = adapted.carry(None, answer, "held")
    for position in range(start, builder.scenario.total):
        before, now = past, expected[:, position : position + 1]
        answer = yield adapted.decode(position, position + 1, past, now)
        past = adapted.carry(past, answer, "held")
    yield builder.decode(position, position + 1, before, now, kind="control", label="adapter left out")
    yield from adapted.controls(position, position + 1, before, expected)


def takes_adapter(contract: CacheContract) -> str | None:
    """A graph has inputs for the matrices of an adapter."""
    ports = (port for graph in contract.graphs.values() for port in graph.inputs)
    if not any(port.role == "adapter" for port in ports):
        return "no input takes an adapter"
    return several_tokens(contract)


EXPERIMENTS = (
    Experiment(
        "adapter",
        "the loop with an adapter of noise (LoRA)",
        with_adapter,
        applies=takes_adapter,
        use=Use("an adapter (LoRA)", severity="error"),
        changes_feeds=True,
        order=8,
    ),
)
