"""What decoding without the cache costs: one step with it against one without, after 5 and after 50 tokens."""

from dataclasses import replace

from kvdoctor.experiments import Calls, Experiment
from kvdoctor.feeds import Deal, Scenario

LENGTHS = (5, 50)
"""Tokens so far, the new one included."""


def no_cache(deal: Deal) -> Calls:
    """Time the last token of each length both ways."""
    for length in LENGTHS:
        if length > deal.scenario.total:
            return
        answer = yield deal.prefill(length - 1)
        past = deal.carry(None, answer, "held")
        yield deal.decode(length - 1, length, past, kind="timing", label=f"cached:{length}")
        yield replace(deal.prefill(length), kind="timing", label=f"uncached:{length}")


EXPERIMENTS = (
    Experiment(
        "no-cache-cost",
        "the cache switched off: one step at 5 and at 50 tokens",
        no_cache,
        Scenario(prompt=1, steps=50),
        judged=False,
        shown=False,
        why="without a cache every step computes all tokens again",
        order=30,
    ),
)
