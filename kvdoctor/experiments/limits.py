"""Lengths: a sweep over small ones, and the length that a config or a buffer promises."""

from dataclasses import replace

from kvdoctor.calls import Scenario
from kvdoctor.contract import CacheContract
from kvdoctor.experiments import Calls, Experiment, several_tokens
from kvdoctor.experiments.chunk import takes_chunks
from kvdoctor.feeds import Deal

LONGEST = 4096
"""Tokens; a reference run of more takes minutes and gigabytes on models that people really use."""
BEFORE_LIMIT = 3
PROMPTS, CHUNKS = (1, 2, 4, 9, 16), (1, 2, 7)


def at_limit(deal: Deal) -> Calls:
    """A prefill of nearly the whole context, and single tokens until it is full."""
    limit = deal.contract.usable_length or 0
    sizes = replace(deal.scenario, prompt=limit - BEFORE_LIMIT, steps=BEFORE_LIMIT + 1)
    full = Deal(deal.contract, sizes, deal.encoded, samples=deal.samples)
    expected = yield from full.whole()
    start = sizes.prompt
    answer = yield full.prefill(start, expected[:, :start])
    past = full.carry(None, answer, "held")
    for position in range(start, sizes.total):
        answer = yield full.decode(position, position + 1, past, expected[:, position : position + 1])
        past = full.carry(past, answer, "held")


def sweep(deal: Deal) -> Calls:
    """Every pair of a prompt and a number of new tokens on top of it."""
    expected = yield from deal.whole()
    for prompt in PROMPTS:
        answer = yield deal.prefill(prompt, expected[:, :prompt])
        past = deal.carry(None, answer, "held")
        for new in CHUNKS:
            yield deal.decode(prompt, prompt + new, past, expected[:, prompt : prompt + new])


def has_limit(contract: CacheContract) -> str | None:
    """There must be a promise, and one that can be tried."""
    limit = contract.usable_length
    if limit is None:
        return "no config and no buffer says how long a sequence may be"
    if not BEFORE_LIMIT < limit <= LONGEST:
        return f"{limit} tokens are promised; lengths up to {LONGEST} are tried"
    return several_tokens(contract)


EXPERIMENTS = (
    Experiment(
        "full-context",
        "the held loop until the context is full",
        at_limit,
        applies=has_limit,
        changes_deal=True,
        thorough=True,
        order=36,
    ),
    Experiment(
        "sweep",
        "prompts of 1 to 16 tokens, each with 1, 2 and 7 new tokens on top",
        sweep,
        Scenario(prompt=max(PROMPTS), steps=max(CHUNKS) + 1),
        takes_chunks,
        thorough=True,
        order=35,
    ),
)
