"""Several new tokens on top of a cache: chunked prefill, a second turn, speculation."""

from kvdoctor.calls import Answer, Past, Scenario
from kvdoctor.contract import CacheContract
from kvdoctor.experiments import Calls, Decision, Experiment
from kvdoctor.experiments.rows import disturbed, other_token, probe, same_logits
from kvdoctor.experiments.why import can_be_looked_into
from kvdoctor.experiments.workarounds import has_length
from kvdoctor.feeds import Deal
from kvdoctor.trace import Cause

CHUNK = 3
BEFORE = 5
"""Tokens in the cache before: more than the state of a convolution holds, which a shorter prompt may leave short."""
SHARED = Scenario(prompt=BEFORE, steps=Scenario().total - BEFORE + 1)
"""The sequence of the loops, so that the reference run is shared with them."""


def chunk(deal: Deal) -> Calls:
    """A prompt of 5 tokens, 3 more, and what is left of the sequence."""
    expected = yield from deal.whole()
    start = deal.scenario.prompt
    answer = yield deal.prefill(start, expected[:, :start])
    past = deal.carry(None, answer, "held")
    while start < deal.scenario.total:
        before, new = past, min(CHUNK, deal.scenario.total - start)
        answer = yield deal.decode(start, start + new, past, expected[:, start : start + new])
        past = deal.carry(past, answer, "held")
        start += new
    yield from deal.controls(start - new, start, before, expected)


def why_chunk(deal: Deal) -> Decision:
    """What the first of 3 new tokens attends to: all of the past, and nothing behind itself."""
    start, exactness = deal.scenario.prompt, deal.contract.exactness
    answer = yield probe(deal.prefill(start))
    if answer.failed:
        return None
    past = deal.carry(None, answer, "held")
    if deal.past_length(past) != start:
        return None  # what the lengths say has checks of its own
    base = yield probe(deal.decode(start, start + CHUNK, past))
    if base.failed:
        return None
    other = yield probe(deal.elsewhere(start + 1).decode(start, start + CHUNK, past))
    if not other.failed and not same_logits(other.logits[:, :1], base.logits[:, :1], exactness):
        return Cause(
            "mask-not-offset",
            f"of {CHUNK} new tokens on a past of {start}, the first one's logits change with the tokens behind it",
        )
    for place in range(start):
        answer = yield probe(deal.decode(start, start + CHUNK, disturbed(deal, past, [place])))
        if not answer.failed and same_logits(answer.logits[:, :1], base.logits[:, :1], exactness):
            return Cause(
                "mask-not-offset",
                f"of {CHUNK} new tokens on a past of {start}, the first one does not see entry {place} of the past",
            )
    return (yield from _blind_to_new(deal, past, base))


def _blind_to_new(deal: Deal, past: Past, base: Answer) -> Decision:
    """Each new token must see the new ones before it."""
    start = deal.scenario.prompt
    for place in range(CHUNK - 1):
        answer = yield probe(other_token(deal, start + place).decode(start, start + CHUNK, past))
        after = slice(place + 1, place + 2)
        if not answer.failed and same_logits(answer.logits[:, after], base.logits[:, after], deal.contract.exactness):
            return Cause(
                "mask-not-offset",
                f"of {CHUNK} new tokens on a past of {start}, number {place + 1} does not see the one before it",
            )
    return None


def takes_chunks(contract: CacheContract) -> str | None:
    """The decode graph must take several new tokens, and return what each of them gives."""
    if contract.last_logits_only:
        return "a call with several new tokens gives the logits of the last one alone"
    return has_length(contract)


EXPERIMENTS = (
    Experiment(
        "chunk",
        f"{CHUNK} new tokens at once on top of a cache",
        chunk,
        SHARED,
        takes_chunks,
        order=5,
    ),
    Experiment(
        "why-chunk",
        "what the first of several new tokens attends to",
        why_chunk,
        SHARED,
        can_be_looked_into,
        judged=False,
        shown=False,
        asks_why=("chunk",),
        order=41,
    ),
)
