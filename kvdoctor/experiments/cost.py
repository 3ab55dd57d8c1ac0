"""One step after 5 and after 50 tokens, with the cache and without: the same logits, and at what cost?"""

from dataclasses import replace

from kvdoctor.calls import Scenario
from kvdoctor.experiments import Calls, Experiment
from kvdoctor.feeds import Deal

LENGTHS = (5, 50)
"""Tokens so far, the new one included."""


def long_past(deal: Deal) -> Calls:
    """Judge and time the last token of each length both ways; the noise of dynamic quantisation leaves no judgement."""
    for length in LENGTHS:
        if length > deal.scenario.total:
            return
        expected = yield from deal.whole(length)
        exact = deal.contract.exactness != "dynamic-quantisation"
        answer = yield deal.prefill(length - 1, expected[:, :-1] if exact else None)
        past = deal.carry(None, answer, "held")
        step = deal.decode(length - 1, length, past, expected[:, -1:] if exact else None)
        yield step
        yield replace(step, kind="timing", label=f"cached:{length}")
        yield replace(deal.prefill(length), kind="timing", label=f"uncached:{length}")


EXPERIMENTS = (
    Experiment("long-past", "one step after 4 and after 49 tokens", long_past, Scenario(prompt=1, steps=50), order=30),
)
