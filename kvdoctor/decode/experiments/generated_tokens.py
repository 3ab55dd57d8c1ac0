"""The tokens that a model generates from prompts of several lengths: what another runtime must generate as well.

An encoder is fed the same features for it, which are kept with the tokens.
"""

from typing import Any

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Array, Scenario
from kvdoctor.decode.experiments import Experiment
from kvdoctor.decode.experiments.against_checkpoint import greedy
from kvdoctor.decode.experiments.loop_vectors import decide
from kvdoctor.decode.feeds import FeedBuilder

PROMPTS = {f"generated-tokens-{length}": length for length in (1, 3, 8)}
"""Tokens of the prompt, by the name of the experiment."""
COUNT = 12
"""Tokens that are generated."""


def kept(builder: FeedBuilder, logits: list[Array]) -> dict[str, Array]:
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


EXPERIMENTS = tuple(
    Experiment(
        name,
        f"the tokens that the held loop generates from a prompt of {length}",
        greedy,
        Scenario(prompt=length, steps=COUNT),
        takes_one_row,
        judged=False,
        shown=False,
        why="another runtime must generate the same",
        on_request="generate",
        keeps=kept,
        order=95,
    )
    for name, length in PROMPTS.items()
)
