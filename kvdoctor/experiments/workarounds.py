"""What desperate teams try when the plain loop fails, each with its outcome."""

from kvdoctor.contract import CacheContract
from kvdoctor.experiments import Calls, Experiment, grows, several_tokens
from kvdoctor.feeds import Deal

STEPS_WITHOUT_CACHE = 3


def same_cache(deal: Deal) -> Calls:
    """The cache of the prefill fed at every step, presents ignored."""
    expected = yield from deal.whole()
    start = deal.scenario.prompt
    answer = yield deal.prefill(start, expected[:, :start])
    past = deal.carry(None, answer, "held")
    for position in range(start, deal.scenario.total):
        yield deal.decode(position, position + 1, past, expected[:, position : position + 1])


def all_ids(deal: Deal) -> Calls:
    """All ids so far at every step, with the cache as well."""
    expected = yield from deal.whole()
    start = deal.scenario.prompt
    answer = yield deal.prefill(start, expected[:, :start])
    past = deal.carry(None, answer, "held")
    for position in range(start, deal.scenario.total):
        answer = yield deal.decode(0, position + 1, past, expected[:, position : position + 1])
        past = deal.carry(past, answer, "held")


def late_cache(deal: Deal) -> Calls:
    """No cache for the first steps, then the plain loop."""
    expected = yield from deal.whole()
    start = deal.scenario.prompt + STEPS_WITHOUT_CACHE
    for stop in range(deal.scenario.prompt, start + 1):
        answer = yield deal.prefill(stop, expected[:, :stop])
    past = deal.carry(None, answer, "plain")
    for position in range(start, deal.scenario.total):
        answer = yield deal.decode(position, position + 1, past, expected[:, position : position + 1])
        past = deal.carry(past, answer, "plain")


def has_length(contract: CacheContract) -> str | None:
    """These loops go wrong by the length of the past: a buffer of fixed size shows nothing of it."""
    ids = contract.graph("decode").port("token_ids")
    if ids is not None and ids.shape and isinstance(ids.shape[-1], int):
        return f"a decode step takes {ids.shape[-1]} new token only"
    return several_tokens(contract) or grows(contract)


EXPERIMENTS = (
    Experiment(
        "same-cache",
        "the cache of the prefill fed at every step",
        same_cache,
        applies=has_length,
        judged=False,
        unless_passed="plain-loop",
        why="the cache never learns the new tokens",
        order=20,
    ),
    Experiment(
        "all-ids-with-cache",
        "all ids so far, with a cache",
        all_ids,
        applies=has_length,
        judged=False,
        unless_passed="plain-loop",
        why="tokens in the cache count twice",
        order=21,
    ),
    Experiment(
        "late-cache",
        f"no cache for {STEPS_WITHOUT_CACHE} steps, then the plain loop",
        late_cache,
        judged=False,
        unless_passed="plain-loop",
        why="the same cache, only met later",
        order=22,
    ),
)
