"""What to hold against a checkpoint: the whole sequence without a cache, the held loop, and the words it decodes."""

from dataclasses import replace
from typing import Any

import numpy as np

from kvdoctor.calls import Array, Scenario, as_array
from kvdoctor.contract import CacheContract
from kvdoctor.experiments import Calls, Experiment
from kvdoctor.feeds import Deal

NAME = "against-checkpoint"
GREEDY = "greedy-against-checkpoint"
ENCODER_ROLES = ("encoder_input", "encoder_mask", "encoder_states")


def whole_and_loop(deal: Deal) -> Calls:
    """The whole sequence where a call takes several tokens, then the prefill and one token a step."""
    total, start = deal.scenario.total, deal.scenario.prompt
    for stop in _stops(deal):
        yield replace(deal.reference(stop), kind="step")
    answer = yield deal.prefill(start)
    past = deal.carry(None, answer, "held")
    for position in range(start, total):
        answer = yield deal.decode(position, position + 1, past)
        past = deal.carry(past, answer, "held")


def greedy(deal: Deal) -> Calls:
    """The held loop that goes on from the likeliest word each time."""
    total, start = deal.scenario.total, deal.scenario.prompt
    deal = replace(deal, tokens=deal.tokens.copy())
    answer = yield deal.prefill(start)
    past = deal.carry(None, answer, "held")
    for position in range(start, total):
        deal.tokens[:, position] = answer.logits[:, -1].argmax(-1)
        answer = yield deal.decode(position, position + 1, past)
        past = deal.carry(past, answer, "held")


def _stops(deal: Deal) -> range:
    """The lengths to run without a cache: all of them where only the last token's logits come back."""
    total = deal.scenario.total
    if deal.contract.new_tokens is not None:
        return range(0)
    return range(1 if deal.contract.last_logits_only else total, total + 1)


def kept(deal: Deal, logits: list[Array]) -> dict[str, Array]:
    """The feeds by role, the encoder's states, the logits of each step, `step.N`; the first `wholes` have no cache."""
    found: dict[str, Any] = {"tokens": deal.tokens, "prompt": np.array(deal.scenario.prompt)}
    found["wholes"] = np.array(len(_stops(deal)))
    if has_encoder(deal.contract):
        found["encoder"] = np.array(1)
        phase, fed = ("encode", deal.encoded.fed) if deal.encoded.fed else ("prefill", None)
        given = fed if fed is not None else deal.prefill(deal.scenario.prompt).feeds
        for port in deal.contract.graph(phase).inputs:  # type: ignore[arg-type]
            if port.role in ENCODER_ROLES:
                found[port.role] = as_array(given[port.name])
        if fed is not None and deal.encoded.states is not None:
            found["states"] = deal.encoded.states
    return found | {f"step.{number}": array for number, array in enumerate(logits)}


def kept_greedy(deal: Deal, logits: list[Array]) -> dict[str, Array]:
    """The same of the greedy loop, whose tokens are those that it chose, as far as it came."""
    chosen = [step[:, -1].argmax(-1)[:, None] for step in logits[:-1]]
    tokens = np.concatenate([deal.tokens[:, : deal.scenario.prompt], *chosen], axis=1)
    return kept(deal, logits) | {"tokens": tokens, "wholes": np.array(0)}


def has_encoder(contract: CacheContract) -> bool:
    """Whether something of an encoder goes into the decoder."""
    crossed = any(slot.kind in ("cross-attention", "encoder-states") for slot in contract.slots)
    return crossed or contract.has_encoder_states or "encode" in contract.phases


def can_be_shared(contract: CacheContract) -> str | None:
    """The feeds must be such that a checkpoint takes the same."""
    if contract.graph("decode").port("token_ids") is None:
        return "it takes no token ids, and a checkpoint is fed nothing else"
    if contract.codebooks > 1:
        return "its tokens have several codebooks"
    return None


EXPERIMENTS = (
    Experiment(
        NAME,
        "the whole sequence, then the held loop, against the checkpoint",
        whole_and_loop,
        Scenario(steps=9),
        can_be_shared,
        judged=False,
        why="the checkpoint computes the same feeds",
        on_request=True,
        keeps=kept,
        order=90,
    ),
    Experiment(
        GREEDY,
        "the words that the held loop decodes, against those of the checkpoint",
        greedy,
        Scenario(steps=9),
        can_be_shared,
        judged=False,
        shown=False,
        why="the checkpoint decodes the same words",
        on_request=True,
        keeps=kept_greedy,
        order=91,
    ),
)
