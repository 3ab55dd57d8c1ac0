"""What other loops are compared with: a checkpoint, a loop written for a model, or another runtime.

A loop is given a fixed sequence, so that a model that is not trained gives other tokens at other steps too, and one
step that goes wrong does not change all steps after it. The expected tokens come from calls without a cache. Another
runtime generates tokens from prompts of several lengths; its encoder is fed the features that are saved with them.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Array, Scenario, as_array
from kvdoctor.decode.experiments import Calls, Experiment, always, unjudged
from kvdoctor.decode.experiments.loops import has_exact_rows
from kvdoctor.decode.feeds import FeedBuilder

CHECKPOINT = "against-checkpoint"
GREEDY = "greedy-against-checkpoint"
ENCODER_ROLES = ("encoder_input", "encoder_mask", "encoder_states")


def kept_steps(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The same, and the feeds of the longest call without a cache, `call.NAME`, of `called` tokens."""
    call = builder.reference() if len(whole_lengths(builder)) else builder.prefill(builder.scenario.prompt)
    found = kept_samples(builder, logits) | {"called": np.array(call.new)}
    return found | {f"call.{name}": as_array(value) for name, value in call.feeds.items()}


def kept_greedy(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The same of the greedy loop, with the tokens that it chose, also where it ended early."""
    chosen = [step[:, -1].argmax(-1)[:, None] for step in logits[:-1]]
    tokens = np.concatenate([builder.tokens[:, : builder.scenario.prompt], *chosen], axis=1)
    return kept_samples(builder, logits) | {"tokens": tokens, "wholes": np.array(0)}


def can_be_shared(contract: CacheContract) -> str | None:
    """The feeds must be such that a checkpoint takes the same."""
    if contract.graph("decode").port("token_ids") is None:
        return "it takes no token ids, and a checkpoint takes nothing else"
    if contract.codebooks > 1:
        return "its tokens have several codebooks"
    return None


@Experiment(
    CHECKPOINT,
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


def kept_samples(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
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


ONE, SEVERAL, PADDED = "loop-vectors", "loop-vectors-batch", "loop-vectors-padded"
SHORTER = 2
"""Tokens by which the second prompt of the padded sequences is shorter than the first."""
UNDECIDED = -1
"""In place of a token, where the likeliest ones lie closer together than rounding."""


vector = partial(unjudged, why="a loop that was written must decode these", on_request="loop")


def kept(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The sequence int64[batch, total], the prompt's length, the tokens expected after each position, and the source.

    `expected` int64[batch, total - prompt + 1] are those after the prompt and after each later token.
    """
    return _kept(builder, np.concatenate([step[:, -1:] if len(logits) > 1 else step for step in logits], axis=1))


def kept_padded(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The expected tokens of `kept`, with the padding of each row."""
    shortest = min(rows.shape[1] for rows in logits)
    together = np.concatenate([rows[:, -shortest:] for rows in logits])
    return _kept(builder, together) | {"padding": np.array([0, SHORTER])}


def takes_padding(contract: CacheContract) -> str | None:
    """Whole sequences are needed, each with the logits of all its tokens, and a mask that can hide padding."""
    if contract.last_logits_only:
        return "a call gives the logits of its last token alone"
    if contract.graph("prefill").port("attention_mask") is None:
        return "it takes no mask of its tokens"
    return has_exact_rows(contract)


@vector(ONE, "the likeliest tokens of one sequence, which a loop must find", applies=always, keeps=kept, order=92)
@vector(
    SEVERAL,
    "the likeliest tokens of two sequences, which a loop must find",
    Scenario(batch=2),
    has_exact_rows,
    keeps=kept,
    order=93,
)
def likeliest(builder: FeedBuilder) -> Calls:
    """The whole sequence without a cache; token by token, in the held loop, where a call takes one token only."""
    for stop in whole_lengths(builder):
        yield replace(builder.reference(stop), kind="step")
    if builder.contract.new_tokens is None:
        return
    past = yield from builder.begin(stop=1)
    yield from builder.go_on(past, 1, builder.scenario.total)


def _kept(builder: FeedBuilder, logits: Array) -> dict[str, Array]:
    """The same from logits float[batch, ..., vocabulary] whose last ones are those of the steps."""
    start = builder.scenario.prompt
    found: dict[str, Any] = {"tokens": builder.tokens, "prompt": np.array(start)}
    found["expected"] = decide(logits[:, start - builder.scenario.total - 1 :], builder.tolerance.fails)
    phase, fed = ("encode", builder.encoded.fed) if builder.encoded.fed else ("prefill", builder.prefill(start).feeds)
    for port in builder.contract.graph(phase).inputs:  # type: ignore[arg-type]
        if port.role == "encoder_input" or (phase == "prefill" and port.role == "encoder_states"):
            found["source"] = as_array(fed[port.name])
    return found


@vector(
    PADDED,
    "the likeliest tokens of two sequences of unequal length, which a loop must find",
    Scenario(batch=2),
    takes_padding,
    keeps=kept_padded,
    order=94,
)
def likeliest_padded(builder: FeedBuilder) -> Calls:
    """Each of two sequences by itself, the second without its first tokens: in a batch it is padded there."""
    for alone in (builder.row(0), builder.row(1).without_first(SHORTER)):
        yield replace(alone.reference(), kind="step")


def decide(logits: Array, tolerance: float) -> Array:
    """The likeliest token at each position, where the next one is further away than two errors can bring it."""
    best = np.sort(logits.astype(np.float64), axis=-1)
    margin = (best[..., -1] - best[..., -2]) / np.maximum(logits.std(axis=-1), 1e-12)
    chosen: Array = np.where(margin > 2 * tolerance, logits.argmax(-1), UNDECIDED)
    return chosen


PROMPTS = {f"generated-tokens-{length}": length for length in (1, 3, 8)}
"""Tokens of the prompt, by the name of the experiment."""
COUNT = 12
"""Tokens that are generated."""


def kept_generated(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The prompt int64[n], the chosen tokens int64[steps], the decided ones, and float[steps, vocabulary].

    `decided` has UNDECIDED in place of a token that another one comes as close to as rounding. `features` is what the
    encoder was fed, where it takes one input.
    """
    if not logits:
        return {}
    rows = np.stack([step[0, -1] for step in logits])
    found: dict[str, Any] = {"prompt": builder.tokens[0, : builder.scenario.prompt], "logits": rows}
    if len(builder.encoded.fed) == 1:
        found["features"] = next(iter(builder.encoded.fed.values()))
    return found | {"tokens": rows.argmax(-1), "decided": decide(rows, builder.tolerance.fails)}


def takes_one_row(contract: CacheContract) -> str | None:
    """Generation feeds one row of token ids for each sequence."""
    if contract.graph("decode").port("token_ids") is None:
        return "it takes no token ids"
    return "its tokens have several codebooks" if contract.codebooks > 1 else None


def generate(builder: FeedBuilder) -> Calls:
    """The held loop that goes on from the likeliest token each time."""
    return greedy(builder)


for name, length in PROMPTS.items():
    Experiment(
        name,
        f"the tokens that the held loop generates from a prompt of {length}",
        Scenario(prompt=length, steps=COUNT),
        takes_one_row,
        judged=False,
        shown=False,
        why="another runtime must generate the same",
        on_request="generate",
        keeps=kept_generated,
        order=95,
    )(generate)
