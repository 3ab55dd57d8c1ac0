"""The tokens that a loop written for a model, or another runtime, must decode.

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
from kvdoctor.decode.experiments.against_checkpoint import greedy, whole_lengths
from kvdoctor.decode.experiments.loops import has_exact_rows
from kvdoctor.decode.feeds import FeedBuilder

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
