"""Runs to compare with a checkpoint: the whole sequence without a cache, the held loop, and the tokens it decodes.

An export may lose what begins at a length only: a window, the second set of rotary factors. One more call without a
cache goes over the lengths that the graph and config.json name.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Array, Scenario, as_array
from kvdoctor.decode.experiments import Calls, Experiment, unjudged
from kvdoctor.decode.experiments.cache_entries import as_probe
from kvdoctor.decode.experiments.each_length import AFTER, FAR_LENGTH, MOST_LENGTH, visited
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.inputs import random_tokens

NAME = "against-checkpoint"
GREEDY = "greedy-against-checkpoint"
ENCODER_ROLES = ("encoder_input", "encoder_mask", "encoder_states")
MOST_LOGITS, LAST = 1 << 27, 16
"""The numbers in the logits of the longer call, at most; of its tokens so many are compared, the last ones."""


def kept_steps(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The same, and the feeds of the longest short call without a cache, `call.NAME`, of `called` tokens."""
    call = builder.reference() if len(whole_lengths(builder)) else builder.prefill(builder.scenario.prompt)
    found, longer = kept(builder, logits), go_over_thresholds(builder)
    if longer is not None and len(logits) > len(whole_lengths(builder)) + builder.scenario.steps:
        found |= {"tokens": longer.tokens, f"step.{len(logits) - 1}": logits[-1][:, -LAST:]}
        call = longer.reference() if longer.scenario.total <= MOST_LENGTH else call
    found["called"] = np.array(call.new)
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
    "the whole sequence, the held loop, and a longer call, compared with the checkpoint",
    Scenario(steps=9),
    can_be_shared,
    judged=False,
    why="the checkpoint computes the same feeds",
    on_request="reference",
    keeps=kept_steps,
    order=90,
)
def whole_and_loop(builder: FeedBuilder) -> Calls:
    """The whole sequence where a call takes several tokens, the prefill and one token a step, then the longer call."""
    for stop in whole_lengths(builder):
        yield replace(builder.reference(stop), kind="step")
    past = yield from builder.begin()
    yield from builder.go_on(past, builder.scenario.prompt, builder.scenario.total)
    longer = go_over_thresholds(builder)
    if longer is not None and not (yield as_probe(longer.reference())).failed:
        yield replace(longer.reference(), kind="step")


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


def go_over_thresholds(builder: FeedBuilder) -> FeedBuilder | None:
    """The same sequence with more tokens, up to the last threshold in reach; None where there is none."""
    contract, sizes = builder.contract, builder.scenario
    longest = min(FAR_LENGTH + AFTER, MOST_LOGITS // (contract.vocabulary or 1))
    lengths = [*visited(builder.thresholds, contract.usable_length, longest, len(builder.thresholds))]
    total = max(lengths, default=0) + AFTER
    if not lengths or total <= sizes.total or contract.new_tokens is not None:
        return None
    more = random_tokens(contract, (len(builder.tokens), total), sizes.seed)[:, builder.tokens.shape[1] :]
    tokens = np.concatenate([builder.tokens, more], axis=1)
    return replace(builder, scenario=replace(sizes, steps=total - sizes.prompt + 1), tokens=tokens)


def kept(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The feeds by role, the encoder's states, the logits of each step, `step.N`; the first `wholes` have no cache."""
    found: dict[str, Any] = {"tokens": builder.tokens, "prompt": np.array(builder.scenario.prompt)}
    found |= {"wholes": np.array(len(whole_lengths(builder))), "total": np.array(builder.scenario.total)}
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
