"""Runs to compare with a checkpoint: the whole sequence without a cache, the held loop, and the tokens it decodes."""

from dataclasses import replace
from typing import Any

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Array, Scenario, as_array
from kvdoctor.decode.experiments import Calls, Experiment, unjudged
from kvdoctor.decode.feeds import FeedBuilder

NAME = "against-checkpoint"
GREEDY = "greedy-against-checkpoint"
ENCODER_ROLES = ("encoder_input", "encoder_mask", "encoder_states")


def kept_steps(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The same, and the feeds of the longest call without a cache, `call.NAME`, of `called` tokens."""
    call = builder.reference() if len(whole_lengths(builder)) else builder.prefill(builder.scenario.prompt)
    found = kept(builder, logits) | {"called": np.array(call.new)}
    return found | {f"call.{name}": as_array(value) for name, value in call.feeds.items()}


def kept_greedy(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The same of the greedy loop, with the tokens that it chose, also where it ended early."""
    chosen = [step[:, -1].argmax(-1)[:, None] for step in logits[:-1]]
    tokens = np.concatenate([builder.tokens[:, : builder.scenario.prompt], *chosen], axis=1)
    return kept(builder, logits) | {"tokens": tokens, "wholes": np.array(0)}


def can_be_shared(contract: CacheContract) -> str | None:
    """The feeds must be such that a checkpoint takes the same."""
    if contract.graph("decode").port("token_ids") is None:
        return "it takes no token ids, and a checkpoint takes nothing else"
    if contract.codebooks > 1:
        return "its tokens have several codebooks"
    return None


@Experiment(
    NAME,
    "the whole sequence, then the held loop, compared with the checkpoint",
    Scenario(steps=9),
    can_be_shared,
    judged=False,
    why="the checkpoint computes the same feeds",
    on_request="reference",
    keeps=kept_steps,
    order=90,
)
def whole_and_loop(builder: FeedBuilder) -> Calls:
    """The whole sequence where a call takes several tokens, then the prefill and one token a step."""
    for stop in whole_lengths(builder):
        yield replace(builder.reference(stop), kind="step")
    past = yield from builder.begin()
    yield from builder.go_on(past, builder.scenario.prompt, builder.scenario.total)


@unjudged(
    GREEDY,
    "the tokens that the held loop decodes, compared with those of the checkpoint",
    Scenario(steps=9),
    can_be_shared,
    why="the checkpoint decodes the same tokens",
    on_request="reference",
    keeps=kept_greedy,
    order=91,
)
def greedy(builder: FeedBuilder) -> Calls:
    """The held loop that goes on from the likeliest token each time."""
    total, start = builder.scenario.total, builder.scenario.prompt
    builder = replace(builder, tokens=builder.tokens.copy())
    answer = yield builder.prefill(start)
    past = builder.carry(None, answer, "held")
    for position in range(start, total):
        builder.tokens[:, position] = answer.logits[:, -1].argmax(-1)
        answer = yield builder.decode(position, position + 1, past)
        past = builder.carry(past, answer, "held")


def whole_lengths(builder: FeedBuilder) -> range:
    """The lengths to run without a cache: all of them where only the last token's logits come back."""
    total = builder.scenario.total
    if builder.contract.new_tokens is not None:
        return range(0)
    return range(1 if builder.contract.last_logits_only else total, total + 1)


def kept(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The feeds by role, the encoder's states, the logits of each step, `step.N`; the first `wholes` have no cache."""
    found: dict[str, Any] = {"tokens": builder.tokens, "prompt": np.array(builder.scenario.prompt)}
    found["wholes"] = np.array(len(whole_lengths(builder)))
    if has_encoder(builder.contract):
        found["encoder"] = np.array(1)
        phase, fed = ("encode", builder.encoded.fed) if builder.encoded.fed else ("prefill", None)
        given = fed if fed is not None else builder.prefill(builder.scenario.prompt).feeds
        for port in builder.contract.graph(phase).inputs:  # type: ignore[arg-type]
            if port.role in ENCODER_ROLES:
                found[port.role] = as_array(given[port.name])
        if fed is not None and builder.encoded.states is not None:
            found["states"] = builder.encoded.states
    return found | {f"step.{number}": array for number, array in enumerate(logits)}


def has_encoder(contract: CacheContract) -> bool:
    """Whether something of an encoder goes into the decoder."""
    crossed = any(slot.kind in ("cross-attention", "encoder-states") for slot in contract.slots)
    return crossed or contract.has_encoder_states or "encode" in contract.phases
