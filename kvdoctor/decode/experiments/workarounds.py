"""Common workarounds for a plain loop that fails, each with its outcome."""

from kvdoctor.contract import CacheContract
from kvdoctor.decode.experiments import Calls, Experiment, grows, several_tokens
from kvdoctor.decode.feeds import FeedBuilder

STEPS_WITHOUT_CACHE = 3


def same_cache(builder: FeedBuilder) -> Calls:
    """The cache of the prefill fed at every step, presents ignored."""
    expected = yield from builder.whole()
    start = builder.scenario.prompt
    answer = yield builder.prefill(start, expected[:, :start])
    past = builder.carry(None, answer, "held")
    for position in range(start, builder.scenario.total):
        yield builder.decode(position, position + 1, past, expected[:, position : position + 1])


def all_ids(builder: FeedBuilder) -> Calls:
    """All ids so far at every step, with the cache as well."""
    expected = yield from builder.whole()
    start = builder.scenario.prompt
    answer = yield builder.prefill(start, expected[:, :start])
    past = builder.carry(None, answer, "held")
    for position in range(start, builder.scenario.total):
        answer = yield builder.decode(0, position + 1, past, expected[:, position : position + 1])
        past = builder.carry(past, answer, "held")


def late_cache(builder: FeedBuilder) -> Calls:
    """No cache for the first steps, then the plain loop."""
    expected = yield from builder.whole()
    start = builder.scenario.prompt + STEPS_WITHOUT_CACHE
    for stop in range(builder.scenario.prompt, start + 1):
        answer = yield builder.prefill(stop, expected[:, :stop])
    past = builder.carry(None, answer, "plain")
    for position in range(start, builder.scenario.total):
        answer = yield builder.decode(position, position + 1, past, expected[:, position : position + 1])
        past = builder.carry(past, answer, "plain")


def has_length(contract: CacheContract) -> str | None:
    """These loops go wrong by the length of the past: a buffer of fixed size shows nothing of it."""
    ids = contract.graph("decode").port("token_ids")
    if ids is not None and ids.shape and isinstance(ids.shape[-1], int):
        return f"a decode step takes {ids.shape[-1]} new token{'s' * (ids.shape[-1] > 1)} only"
    return several_tokens(contract) or grows(contract)


EXPERIMENTS = (
    Experiment(
        "same-cache",
        "the cache of the prefill fed at every step",
        same_cache,
        applies=has_length,
        judged=False,
        unless_passed="plain-loop",
        why="new tokens are never appended to the cache",
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
        why="it fails like the plain loop, at a later step",
        order=22,
    ),
)
