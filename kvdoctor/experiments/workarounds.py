"""What desperate teams try when the plain loop fails, each with its outcome."""

from kvdoctor.experiments import Calls, Experiment
from kvdoctor.feeds import Deal

STEPS_WITHOUT_CACHE = 3


def same_cache(deal: Deal) -> Calls:
    """The cache of the prefill fed at every step, presents ignored."""
    expected = (yield deal.reference()).logits
    start = deal.scenario.prompt
    answer = yield deal.prefill(start, expected[:, :start])
    past = deal.carry(None, answer, "held")
    for position in range(start, deal.scenario.total):
        yield deal.decode(position, position + 1, past, expected[:, position : position + 1])


def all_ids(deal: Deal) -> Calls:
    """All ids so far at every step, with the cache as well."""
    expected = (yield deal.reference()).logits
    start = deal.scenario.prompt
    answer = yield deal.prefill(start, expected[:, :start])
    past = deal.carry(None, answer, "held")
    for position in range(start, deal.scenario.total):
        answer = yield deal.decode(0, position + 1, past, expected[:, position : position + 1])
        past = deal.carry(past, answer, "held")


def late_cache(deal: Deal) -> Calls:
    """No cache for the first steps, then the plain loop."""
    expected = (yield deal.reference()).logits
    start = deal.scenario.prompt + STEPS_WITHOUT_CACHE
    for stop in range(deal.scenario.prompt, start + 1):
        answer = yield deal.prefill(stop, expected[:, :stop])
    past = deal.carry(None, answer, "plain")
    for position in range(start, deal.scenario.total):
        answer = yield deal.decode(position, position + 1, past, expected[:, position : position + 1])
        past = deal.carry(past, answer, "plain")


EXPERIMENTS = (
    Experiment(
        "same-cache",
        "the cache of the prefill fed at every step",
        same_cache,
        judged=False,
        why="the cache never learns the new tokens",
        order=20,
    ),
    Experiment(
        "all-ids-with-cache",
        "all ids so far, with a cache",
        all_ids,
        judged=False,
        why="tokens in the cache count twice",
        order=21,
    ),
    Experiment(
        "late-cache",
        f"no cache for {STEPS_WITHOUT_CACHE} steps, then the plain loop",
        late_cache,
        judged=False,
        why="the same cache, only met later",
        order=22,
    ),
)
