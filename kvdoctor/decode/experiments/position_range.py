"""Positions that stop counting: the graph is wrong beyond some length, with the cache and without, in the same way."""

from dataclasses import replace

import numpy as np

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Scenario
from kvdoctor.decode.experiments import Decision, Experiment
from kvdoctor.decode.experiments.cache_entries import (
    as_probe,
    by_position,
    keeps_all,
    read_returned,
    same_entries,
    take_entries,
)
from kvdoctor.decode.experiments.causes import can_be_looked_into
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause

FEWEST = 4
"""Positions that must differ before some are equal."""


def numbering(builder: FeedBuilder) -> Decision:
    """One token at every place: in the first layer its keys tell the places apart everywhere, or nowhere."""
    total, slot = builder.scenario.total, by_position(builder.contract)[0]
    everywhere = np.repeat(builder.tokens[:, :1], total, axis=1)
    answer = yield as_probe(replace(builder, tokens=everywhere).prefill(total))
    if answer.failed:
        return None
    keys = read_returned(slot, answer, True)
    if not keeps_all(slot, answer) or keys.shape[slot.length_axis or 0] < total:
        return None
    entries = [take_entries(slot, keys, place, place + 1) for place in range(total)]
    last = entries[-1]
    same = [same_entries(entry, last, builder.tolerance) for entry in entries]
    end = same.index(True)
    if end < FEWEST or end == total - 1 or not all(same[end:]):
        return None
    return Cause("context-limit-fails", f"one token has the same {slot.filled_by} at every position from {end} on")


def is_all_attention(contract: CacheContract) -> str | None:
    """The first layer's keys must rest on the token and its position alone: no state of another kind before them."""
    if reason := can_be_looked_into(contract):
        return reason
    kinds = {slot.kind for slot in contract.slots}
    first = by_position(contract)[0]
    if kinds - {"self-attention", "cross-attention"} or first.layer != 0 or first.used_as == "value":
        return "the operations before the first attention are not known"
    return None


EXPERIMENTS = (
    Experiment(
        "numbering",
        "whether the model tells all positions apart",
        numbering,
        Scenario(prompt=49, steps=2),
        is_all_attention,
        shown=False,
        order=31,
    ),
)
