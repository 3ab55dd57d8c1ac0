"""Images and audio in the prompt: the rows of an encoder in the places of placeholder tokens."""

from dataclasses import replace

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Scenario
from kvdoctor.decode.experiments import Calls, Decision, Experiment, Use, several_tokens
from kvdoctor.decode.experiments.loops import FEW, decode_loop
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import ROWS_DIFFER, Cause
from kvdoctor.errors import CannotCheck

MOST_ROWS = 64
"""Rows in the prompt of the loop: an image may have a thousand, and all of them are one prefill."""


def has_rows(contract: CacheContract) -> str | None:
    """There must be an encoder of images or audio, and a graph that makes the embeddings of the other tokens."""
    if not contract.features:
        return "no encoder makes rows for the embeddings"
    if "embed" not in contract.phases:
        return "no graph makes the embeddings of the other tokens"
    return several_tokens(contract)


@Experiment(
    "encoder-rows",
    "whether each encoder returns one row per placeholder",
    applies=has_rows,
    with_features=True,
    order=6,
)
def count_rows(builder: FeedBuilder) -> Decision:
    """Each encoder once: as many rows as the prompt has placeholders for one image or one audio clip."""
    yield from ()
    made = builder.count_rows() if builder.count_rows is not None else {}
    declared = [one for one in builder.contract.features if one.rows is not None and one.phase in made]
    for one in declared:
        if made[one.phase] != one.rows:
            file = builder.contract.graph(one.phase).file
            thing = "an image" if one.phase == "vision" else "an audio clip"
            returned = f"{file} returns {made[one.phase]} rows for {thing}"
            return Cause(ROWS_DIFFER, f"{returned}, and the prompt has {one.rows} placeholders ({one.declared})")
    if not declared:
        raise CannotCheck("no config gives the number of placeholders")
    return None


@Experiment(
    "rows-in-prompt",
    "the held loop after a prompt with the rows of the encoders",
    Scenario(prompt=MOST_ROWS + 2, steps=FEW),
    applies=has_rows,
    use=Use("the rows of an encoder in the prompt", "error"),
    changes_feeds=True,
    with_features=True,
    order=6,
)
def loop_with_rows(builder: FeedBuilder) -> Calls:
    """The held loop after a prompt with the rows between two tokens; without the rows the logits must be others."""
    made = builder.count_rows() if builder.count_rows is not None else {}
    rows = min(sum(made.values()), MOST_ROWS)
    limit = builder.contract.usable_length
    if limit is not None:
        rows = min(rows, limit - FEW - 2)
    if rows < 1:
        raise CannotCheck("there is no room for the rows of an encoder")
    scenario = replace(builder.scenario, prompt=rows + 2, steps=FEW)
    text = replace(builder, scenario=scenario, tokens=builder.tokens[:, :0])
    tokens = text.tokens.copy()
    tokens[:, 1 : rows + 1] = -1 - np.arange(rows)
    mixed = replace(text, tokens=tokens)
    yield from decode_loop(mixed, "held")
    expected = yield from mixed.whole(scenario.prompt)
    yield replace(text.prefill(scenario.prompt, expected), kind="control", label="rows of the encoder left out")
