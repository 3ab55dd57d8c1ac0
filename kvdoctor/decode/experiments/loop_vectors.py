"""What a loop that was written for a model must decode: the likeliest token at each step of a given sequence.

The sequence is fixed, so that a model that is not trained gives other tokens at other steps too, and one step that goes
wrong does not change all steps after it. The expected tokens come from calls without a cache.
"""

from dataclasses import replace
from typing import Any

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Array, Scenario, as_array
from kvdoctor.decode.experiments import Calls, Experiment, always
from kvdoctor.decode.experiments.against_checkpoint import whole_lengths
from kvdoctor.decode.experiments.loops import has_exact_rows
from kvdoctor.decode.feeds import FeedBuilder

ONE, SEVERAL, PADDED = "loop-vectors", "loop-vectors-batch", "loop-vectors-padded"
SHORTER = 2
"""Tokens by which the second prompt of the padded sequences is shorter than the first."""
UNDECIDED = -1
"""In place of a token, where the likeliest ones lie closer together than rounding."""


def likeliest(builder: FeedBuilder) -> Calls:
    """The whole sequence without a cache; token by token, in the held loop, where a call takes one token only."""
    for stop in whole_lengths(builder):
        yield replace(builder.reference(stop), kind="step")
    if builder.contract.new_tokens is None:
        return
    past = None
    for position in range(builder.scenario.total):
        call = builder.prefill(1) if past is None else builder.decode(position, position + 1, past)
        answer = yield call
        past = builder.carry(past, answer, "held")


def kept(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The sequence int64[batch, total], the prompt's length, the tokens expected after each position, and the source.

    `expected` int64[batch, total - prompt + 1] are those after the prompt and after each token behind it.
    """
    return _kept(builder, np.concatenate([step[:, -1:] if len(logits) > 1 else step for step in logits], axis=1))


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


def likeliest_padded(builder: FeedBuilder) -> Calls:
    """Each of two sequences by itself, the second without its first tokens: in a batch it is padded there."""
    for alone in (builder.row(0), builder.row(1).without_first(SHORTER)):
        yield replace(alone.reference(), kind="step")


def kept_padded(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
    """The same as `kept`, with the padding of each row."""
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


def decide(logits: Array, tolerance: float) -> Array:
    """The likeliest token at each position, where the next one is further away than two errors can bring it."""
    best = np.sort(logits.astype(np.float64), axis=-1)
    margin = (best[..., -1] - best[..., -2]) / np.maximum(logits.std(axis=-1), 1e-12)
    chosen: Array = np.where(margin > 2 * tolerance, logits.argmax(-1), UNDECIDED)
    return chosen


EXPERIMENTS = (
    Experiment(
        ONE,
        "the likeliest tokens of one sequence, which a loop must find",
        likeliest,
        applies=always,
        judged=False,
        shown=False,
        why="a loop that was written must decode these",
        on_request="loop",
        keeps=kept,
        order=92,
    ),
    Experiment(
        PADDED,
        "the likeliest tokens of two sequences of unequal length, which a loop must find",
        likeliest_padded,
        Scenario(batch=2),
        takes_padding,
        judged=False,
        shown=False,
        why="a loop that was written must decode these",
        on_request="loop",
        keeps=kept_padded,
        order=94,
    ),
    Experiment(
        SEVERAL,
        "the likeliest tokens of two sequences, which a loop must find",
        likeliest,
        Scenario(batch=2),
        has_exact_rows,
        judged=False,
        shown=False,
        why="a loop that was written must decode these",
        on_request="loop",
        keeps=kept,
        order=93,
    ),
)
