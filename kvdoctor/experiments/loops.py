"""The two loops that people write: does decoding with the cache give the logits of the reference run?"""

from dataclasses import replace

import numpy as np

from kvdoctor.calls import Answer, Array, Loop, Past, Scenario, Value
from kvdoctor.contract import CacheContract
from kvdoctor.experiments import Calls, Experiment, always, several_tokens
from kvdoctor.experiments.rows import growing
from kvdoctor.feeds import Deal

FEW = 3
"""Decode steps of an experiment that repeats the loop with other sizes."""


def plain(deal: Deal) -> Calls:
    """Feed every returned slot back."""
    yield from decode_loop(deal, "plain") if deal.contract.new_tokens is None else replayed(deal)


def held(deal: Deal) -> Calls:
    """Feed back what grows, hold what the contract holds."""
    yield from decode_loop(deal, "held")


def held_shortly(deal: Deal) -> Calls:
    """The held loop for a few steps of the sequence, which is enough where the whole loop was run before."""
    yield from decode_loop(deal, "held", FEW)


def decode_loop(deal: Deal, loop: Loop, most: int | None = None) -> Calls:
    """Prefill, then one token a step; each step held against the reference run. Ends with the positive controls.

    The cache after the last token is held against that of the reference run.
    """
    expected, whole = yield from deal.whole_answer()
    start = deal.scenario.prompt
    if deal.contract.exactness == "dynamic-quantisation":
        yield from own_noise(deal, expected)
    answer = yield deal.prefill(start, expected[:, :start])
    past = deal.carry(None, answer, loop)
    before_last, last = past, deal.scenario.total - 1
    if most is not None:
        last = min(last, start + most - 1)
    for position in range(start, last + 1):
        before_last = past
        slots = same_slots(deal.contract, whole) if position == deal.scenario.total - 1 else {}
        answer = yield deal.decode(position, position + 1, past, expected[:, position : position + 1], slots=slots)
        past = deal.carry(past, answer, loop)
    yield from deal.controls(last, last + 1, before_last, expected)


def same_slots(contract: CacheContract, whole: Answer) -> dict[str, Value]:
    """What the presents of the last step must be, by name: the slots that one call over the same tokens fills."""
    pairs = ((slot.present or "", slot.filled_by or "") for slot in growing(contract))
    return {present: whole.outputs[made] for present, made in pairs if made in whole.outputs}


def replayed(deal: Deal) -> Calls:
    """Without a reference run: the same tokens one by one, twice from an empty state, must give the same logits.

    The control shows that what is carried matters. More cannot be told from a graph that takes one token at a time.
    """
    logits: list[Array] = []
    for again in (False, True):
        past: Past | None = None
        for position in range(deal.scenario.total):
            before, expected = past, logits[position] if again else None
            if past is None:
                answer = yield deal.prefill(1, expected)
            else:
                answer = yield deal.decode(position, position + 1, past, expected)
            logits += [] if again else [answer.logits]
            past = deal.carry(past, answer, "plain")
    assert before is not None  # noqa: S101 - a scenario has two steps or more
    last = deal.scenario.total - 1
    yield from deal.controls(last, last + 1, before, np.concatenate(logits, axis=1))


def own_noise(deal: Deal, expected: Array) -> Calls:
    """Shorter sequences without any cache: what they differ by from the whole one is no fault of a cache."""
    for stop in range(deal.scenario.prompt, deal.scenario.total):
        yield replace(deal.prefill(stop), expected=expected[:, stop - 1 : stop], kind="noise")


def rows_alone(deal: Deal) -> Calls:
    """Each row of a batch by itself, without a cache, held against what it gives beside its neighbour."""
    together = yield from deal.whole()
    for row, expected in enumerate(np.split(together, deal.scenario.batch)):
        yield replace(deal.row(row).reference(), kind="step", expected=expected)


def has_exact_rows(contract: CacheContract) -> str | None:
    """Dynamic quantisation has one scale for all rows: they interact by design."""
    if contract.exactness == "dynamic-quantisation":
        return "dynamic quantisation takes one scale from all rows"
    return takes_any_batch(contract)


def has_something_to_hold(contract: CacheContract) -> str | None:
    """The held loop differs from the plain one only where a returned slot is to be held."""
    if any(slot.present is not None for slot in contract.held):
        return several_tokens(contract)
    return "no returned slot is to be held: the same as the plain loop"


def takes_encoder_states(contract: CacheContract) -> str | None:
    """Encoder lengths can be varied only where there is an encoder, and where its length is not a number."""
    if several_tokens(contract) or not contract.has_encoder_states:
        return several_tokens(contract) or "the decoder takes no encoder states"
    if contract.encoder_length is not None:
        return "the encoder length is a fixed number"
    if "encode" in contract.phases and not any(
        "encoder_input" in port.axes and not isinstance((port.shape or ())[port.axes.index("encoder_input")], int)
        for port in contract.graph("encode").inputs
    ):
        return "the encoder takes one length only"
    return None


def takes_any_batch(contract: CacheContract) -> str | None:
    """The batch can be varied only where no decoder input declares it as a number."""
    ports = [port for phase in contract.phases.values() for port in contract.graphs[phase.graph].inputs]
    if several_tokens(contract):
        return several_tokens(contract)
    for port in ports:
        if "batch" in port.axes and isinstance((port.shape or ())[port.axes.index("batch")], int):
            return f"the batch of {port.name!r} is a fixed number"
    return None


EXPERIMENTS = (
    Experiment("plain-loop", "every returned slot fed back, one token a step", plain, applies=always, order=1),
    Experiment("held-loop", "cross-attention cache of the prefill held", held, applies=has_something_to_hold, order=2),
    Experiment("batch", "the held loop with batch 2", held_shortly, Scenario(batch=2), takes_any_batch, order=3),
    Experiment(
        "batch-rows",
        "each row of a batch of 2 against the same row alone, without a cache",
        rows_alone,
        Scenario(batch=2),
        applies=has_exact_rows,
        changes_deal=True,
        order=3,
    ),
    Experiment(
        "one-token-prompt",
        "the held loop after a prompt of one token",
        held_shortly,
        Scenario(prompt=1, steps=Scenario().total),
        order=3,
    ),
    Experiment(
        "other-encoder-length",
        "the held loop with encoder length 11",
        held_shortly,
        Scenario(encoder=11),
        applies=takes_encoder_states,
        order=4,
    ),
)
