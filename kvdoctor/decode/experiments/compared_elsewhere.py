"""Runs that something else repeats: a checkpoint, a loop that was written for the model, or another runtime.

With the checkpoint the whole sequence is compared, the held loop, and the tokens that it decodes. An export may lose
what begins at a length only (a window, the second set of rotary factors): one more call goes over the lengths that the
graph and config.json name. A written loop is given a fixed sequence, so that a model that is not trained gives other
tokens at other steps too, and one wrong step does not change all after it; its tokens come from calls without a cache.
Another runtime generates from prompts of several lengths, and is fed the features that are saved with them.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kvdoctor.contract import CacheContract, PhaseName
from kvdoctor.decode.calls import Array, Scenario, as_array
from kvdoctor.decode.experiments import Calls, Experiment, always, as_probe, unjudged
from kvdoctor.decode.experiments.each_length import AFTER, FAR_LENGTH, MOST_LENGTH, visited
from kvdoctor.decode.experiments.loops import has_exact_rows
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.inputs import random_tokens

NAME = "against-checkpoint"
ENCODER_ROLES = ("encoder_input", "encoder_mask", "encoder_states")
MOST_LOGITS, LAST = 1 << 27, 16
"""The numbers in the logits of the longer call, at most; of its tokens so many are compared, the last ones."""


def kept_steps(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The same, and the feeds of the longest short call without a cache, `call.NAME`, of `called` tokens."""
    call = builder.reference() if len(whole_lengths(builder)) else builder.prefill(builder.scenario.prompt)
    found, longer = _kept_feeds(builder, logits), go_over_thresholds(builder)
    if longer is not None and len(logits) > len(whole_lengths(builder)) + builder.scenario.steps:
        found |= {"tokens": longer.tokens, f"step.{len(logits) - 1}": logits[-1][:, -LAST:]}
        call = longer.reference() if longer.scenario.total <= MOST_LENGTH else call
    found["called"] = np.array(call.new)
    return found | {f"call.{name}": as_array(value) for name, value in call.feeds.items()}


def can_be_shared(contract: CacheContract) -> str | None:
    """The feeds must be such that a checkpoint, or another runtime, takes the same."""
    if contract.graph("decode").port("token_ids") is None:
        return "it takes no token ids, and nothing else can be fed to both"
    return "its tokens have several codebooks" if contract.codebooks > 1 else None


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


def _kept_feeds(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The feeds by role, the encoder's states, the logits of each step, `step.N`; the first `wholes` have no cache."""
    found: dict[str, Any] = {"tokens": builder.tokens, "prompt": np.array(builder.scenario.prompt)}
    found |= {"wholes": np.array(len(whole_lengths(builder))), "total": np.array(builder.scenario.total)}
    if has_encoder(builder.contract):
        found |= {"encoder": np.array(1), **_encoder_feeds(builder)}
        if builder.encoded.fed and builder.encoded.states is not None:
            found["states"] = builder.encoded.states
    return found | {f"step.{number}": array for number, array in enumerate(logits)}


def _encoder_feeds(builder: FeedBuilder) -> dict[str, Array]:
    """What an encoder was fed, or the first step in place of one, by role."""
    phase: PhaseName = "encode" if builder.encoded.fed else "prefill"
    feeds = builder.encoded.fed or builder.prefill(builder.scenario.prompt).feeds
    ports = (port for port in builder.contract.graph(phase).inputs if port.role in ENCODER_ROLES)
    return {port.role: as_array(feeds[port.name]) for port in ports}


def has_encoder(contract: CacheContract) -> bool:
    """Whether something of an encoder goes into the decoder."""
    crossed = any(slot.kind in ("cross-attention", "encoder-states") for slot in contract.slots)
    return crossed or contract.has_encoder_states or "encode" in contract.phases


ONE, SEVERAL, PADDED = "loop-vectors", "loop-vectors-batch", "loop-vectors-padded"
SHORTER, UNDECIDED = 2, -1
"""Tokens that the second padded prompt lacks; what stands for a token where the likeliest ones nearly tie."""


vector = partial(unjudged, why="a loop that was written must decode these", on_request="loop")


def kept_vectors(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The sequence int64[batch, total], the prompt's length, the tokens expected after each position, and the source.

    `expected` int64[batch, total - prompt + 1] are those after the prompt and after each later token.
    """
    return _kept(builder, np.concatenate([step[:, -1:] if len(logits) > 1 else step for step in logits], axis=1))


def kept_padded(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The expected tokens of `kept_vectors`, with the padding of each row."""
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


@vector(
    ONE, "the likeliest tokens of one sequence, which a loop must find", applies=always, keeps=kept_vectors, order=92
)
@vector(
    SEVERAL,
    "the likeliest tokens of two sequences, which a loop must find",
    Scenario(batch=2),
    has_exact_rows,
    keeps=kept_vectors,
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
    fed = _encoder_feeds(builder)
    sources = [fed[role] for role in ("encoder_input", "encoder_states") if role in fed]
    return found | ({"source": sources[0]} if sources else {})


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


for name, length in PROMPTS.items():
    unjudged(
        name,
        f"the tokens that the held loop generates from a prompt of {length}",
        Scenario(prompt=length, steps=COUNT),
        can_be_shared,
        why="another runtime must generate the same",
        on_request="generate",
        keeps=kept_generated,
        order=95,
    )(greedy)
