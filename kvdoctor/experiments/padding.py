"""Rows of different lengths in one batch: padding on the left of the tokens, on the right of the encoder states."""

from collections.abc import Generator
from dataclasses import replace

import numpy as np

from kvdoctor.calls import Answer, Array, Call, Encoded, Scenario
from kvdoctor.contract import CacheContract, PhaseName
from kvdoctor.experiments import Calls, Experiment
from kvdoctor.experiments.loops import has_exact_rows, takes_encoder_states
from kvdoctor.experiments.rows import probe, same_logits
from kvdoctor.feeds import Deal

PADDING = (2, 1, 0)
"""Tokens of padding before each row of the batch."""
ENCODER_PADDING = (4, 2, 0)
"""Encoder states of padding behind those of each row."""


def left(deal: Deal) -> Calls:
    """The held loop, two rows padded behind a mask: each row must give what it gives alone without padding."""
    alone = []
    for row, pads in enumerate(PADDING):
        logits = yield from deal.row(row).behind(pads).whole()
        alone.append(logits[:, max(PADDING) - pads :])
    yield from _loop(replace(deal, padding=PADDING), deal, np.concatenate(alone))


def two_lengths(deal: Deal) -> Calls:
    """The held loop, two rows with fewer encoder states and a mask that says so: each row as it is alone."""
    states = deal.encoded.states
    assert states is not None  # noqa: S101 - applies says that there is an encoder
    padded = replace(deal, encoder_padding=ENCODER_PADDING)
    if (control := (yield from _counts_something_else(deal, padded))) is not None:
        yield control
        return
    alone = []
    for row, pads in enumerate(ENCODER_PADDING):
        own = Encoded(states[row : row + 1, : states.shape[1] - pads])
        alone.append((yield from replace(deal.row(row), encoded=own).whole()))
    yield from _loop(padded, deal, np.concatenate(alone))


def _counts_something_else(deal: Deal, padded: Deal) -> "Generator[Call, Answer, Call | None]":
    """The control that shows no effect, where the mask has one and is yet no mask over states (but over samples)."""
    start, exactness = deal.scenario.prompt, deal.contract.exactness
    states = deal.encoded.states
    assert states is not None  # noqa: S101 - applies says that there is an encoder
    blank = replace(deal, encoder_padding=(states.shape[1],) * deal.scenario.batch)
    seen = yield probe(deal.prefill(start))
    hidden = yield probe(padded.prefill(start))
    nothing = yield probe(blank.prefill(start))
    if seen.failed or hidden.failed or not same_logits(hidden.logits, seen.logits, exactness):
        return None
    if nothing.failed or same_logits(nothing.logits, seen.logits, exactness):
        return None  # the graph does not look at its mask
    return replace(padded.prefill(start, seen.logits), kind="control", label="a mask over the last encoder states")


def _loop(padded: Deal, unpadded: Deal, expected: Array) -> Calls:
    """The held loop against the logits that all rows have; the control shows the padding."""
    start, total = padded.scenario.prompt, padded.scenario.total
    words = expected.shape[1] - (total - start)  # of the prompt, in the row that has the fewest
    answer = yield padded.prefill(start, expected[:, :words])
    past = padded.carry(None, answer, "held")
    for position in range(start, total):
        before = past
        wanted = expected[:, words + position - start : words + position - start + 1]
        answer = yield padded.decode(position, position + 1, past, wanted)
        past = padded.carry(past, answer, "held")
    yield unpadded.decode(total - 1, total, before, wanted, kind="control", label="a mask without the padding")


def takes_left_padding(contract: CacheContract) -> str | None:
    """A mask with a column for each token must hide the padding, in every graph; an operator that counts cannot."""
    if any(slot.growth in ("shared", "ring") or slot.trimmed for slot in contract.slots):
        return "its attention counts the entries of the cache, and cannot leave out the first ones"
    if any(slot.kind in ("conv-state", "recurrent-state") for slot in contract.slots):
        return "what a state has seen cannot be masked later"
    return has_exact_rows(contract) or _has_mask(contract, "attention_mask", "total")


def takes_encoder_padding(contract: CacheContract) -> str | None:
    """The decoder must take encoder states and a mask over them."""
    if any(slot.filled_in == "encode" for slot in contract.slots):
        return "the encoder makes the cross-attention cache itself"
    if reason := takes_encoder_states(contract) or has_exact_rows(contract):
        return reason
    return _has_mask(contract, "encoder_mask", "encoder")


def _has_mask(contract: CacheContract, role: str, axis: str) -> str | None:
    phases: tuple[PhaseName, ...] = ("prefill", "decode")
    for phase in phases:
        graph = contract.graph(phase)
        masks = [port for port in graph.inputs if port.role == role and port.axes == ("batch", axis)]
        if not masks:
            return f"{graph.file} takes no {role} of [batch, {axis}]"
    return None


EXPERIMENTS = (
    Experiment(
        "left-padding",
        "the held loop with batch 3, rows with 2, 1 and 0 tokens of padding on the left",
        left,
        Scenario(batch=len(PADDING), prompt=5, steps=3),
        takes_left_padding,
        changes_deal=True,
        order=7,
    ),
    Experiment(
        "encoder-padding",
        "the held loop with batch 3, rows with 4, 2 and 0 encoder states less",
        two_lengths,
        Scenario(batch=len(ENCODER_PADDING), encoder=11, steps=3),
        takes_encoder_padding,
        changes_deal=True,
        order=7,
    ),
)
