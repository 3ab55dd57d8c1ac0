"""Other ways to feed a cache: dummies or the cached branch on the first step, and workarounds for a loop that fails."""

from dataclasses import replace
from functools import partial

from kvdoctor.contract import CacheContract
from kvdoctor.decode.experiments import Calls, Experiment, grows, several_tokens
from kvdoctor.decode.feeds import FeedBuilder

STEPS_WITHOUT_CACHE = 3

workaround = partial(Experiment, judged=False, unless_passed="plain-loop")


def has_length(contract: CacheContract) -> str | None:
    """These loops go wrong by the length of the past: a buffer of fixed size shows nothing of it."""
    ids = contract.graph("decode").port("token_ids")
    if ids is not None and ids.shape and isinstance(ids.shape[-1], int):
        return f"a decode step takes {ids.shape[-1]} new token{'s' * (ids.shape[-1] > 1)} only"
    return several_tokens(contract) or grows(contract)


def takes_past(contract: CacheContract) -> str | None:
    """The graph of the first step must have past inputs."""
    if contract.first_step == "no-past-graph":
        return "the graph of the first step takes no past"
    return several_tokens(contract) or grows(contract)


@workaround(
    "same-cache",
    "the cache of the prefill fed at every step",
    applies=has_length,
    why="new tokens are never appended to the cache",
    order=20,
)
def same_cache(builder: FeedBuilder) -> Calls:
    """The cache of the prefill fed at every step, presents ignored."""
    expected = yield from builder.whole()
    past = yield from builder.begin(expected)
    for position in range(builder.scenario.prompt, builder.scenario.total):
        yield builder.decode(position, position + 1, past, expected[:, position : position + 1])


@workaround(
    "all-ids-with-cache",
    "all ids so far, with a cache",
    applies=has_length,
    why="tokens in the cache count twice",
    order=21,
)
def all_ids(builder: FeedBuilder) -> Calls:
    """All ids so far at every step, with the cache as well."""
    expected = yield from builder.whole()
    past = yield from builder.begin(expected)
    for position in range(builder.scenario.prompt, builder.scenario.total):
        answer = yield builder.decode(0, position + 1, past, expected[:, position : position + 1])
        past = builder.carry(past, answer, "held")


@workaround(
    "late-cache",
    f"no cache for {STEPS_WITHOUT_CACHE} steps, then the plain loop",
    why="it fails like the plain loop, at a later step",
    order=22,
)
def late_cache(builder: FeedBuilder) -> Calls:
    """No cache for the first steps, then the plain loop."""
    expected = yield from builder.whole()
    start = builder.scenario.prompt + STEPS_WITHOUT_CACHE
    for stop in range(builder.scenario.prompt, start + 1):
        answer = yield builder.prefill(stop, expected[:, :stop])
    past = builder.carry(None, answer, "plain")
    yield from replace(builder, loop="plain").go_on(past, start, builder.scenario.total, expected)


@Experiment("empty-past", "first step with past length 0", applies=takes_past, order=2)
def empty_past(builder: FeedBuilder) -> Calls:
    """Past length 0: what Optimum and transformers.js feed."""
    expected = yield from builder.whole()
    yield builder.prefill(builder.scenario.prompt, expected[:, : builder.scenario.prompt])


@Experiment(
    "dummy-past",
    "first step with a dummy past of length 1",
    applies=takes_past,
    judged=False,
    why="the dummy is attended to unless it is masked",
    order=11,
)
def dummy_past(builder: FeedBuilder) -> Calls:
    """A dummy past of length 1: what bindings that refuse empty tensors feed."""
    expected = yield from builder.whole()
    yield builder.prefill(builder.scenario.prompt, expected[:, : builder.scenario.prompt], dummy=1)


@Experiment(
    "dummy-past-runs",
    "whether the first step runs at all with a past of length 1",
    applies=takes_past,
    shown=False,
    unless_passed="empty-past",
    order=3,
)
def dummy_past_runs(builder: FeedBuilder) -> Calls:
    """The same calls with a dummy past of length 1: tells whether it is the length 0 that a first step fails on."""
    yield builder.prefill(builder.scenario.total, dummy=1)
    yield builder.prefill(builder.scenario.prompt, dummy=1)


@Experiment(
    "cached-branch-first",
    "cached branch on the first step",
    applies=lambda contract: None if contract.first_step == "no-past-branch" else "there is no branch switch",
    judged=False,
    why="the cached branch attends to the dummy past",
    order=12,
)
def cached_branch(builder: FeedBuilder) -> Calls:
    """The switch already true on the first step, over an empty cache."""
    expected = yield from builder.whole()
    prompt = builder.scenario.prompt
    yield builder.decode(0, prompt, builder.first_past(0), expected[:, :prompt])
