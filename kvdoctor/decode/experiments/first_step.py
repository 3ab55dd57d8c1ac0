"""What the first step may be fed: a past of length 0, a dummy of length 1, the cached branch."""

from kvdoctor.contract import CacheContract
from kvdoctor.decode.experiments import Calls, Experiment, grows, several_tokens
from kvdoctor.decode.feeds import FeedBuilder


def empty_past(builder: FeedBuilder) -> Calls:
    """Past length 0: what Optimum and transformers.js feed."""
    expected = yield from builder.whole()
    yield builder.prefill(builder.scenario.prompt, expected[:, : builder.scenario.prompt])


def dummy_past(builder: FeedBuilder) -> Calls:
    """A dummy past of length 1: what bindings that refuse empty tensors feed."""
    expected = yield from builder.whole()
    yield builder.prefill(builder.scenario.prompt, expected[:, : builder.scenario.prompt], dummy=1)


def dummy_past_runs(builder: FeedBuilder) -> Calls:
    """The same calls with a dummy past of length 1: tells whether it is the length 0 that a first step fails on."""
    yield builder.prefill(builder.scenario.total, dummy=1)
    yield builder.prefill(builder.scenario.prompt, dummy=1)


def cached_branch(builder: FeedBuilder) -> Calls:
    """The switch already true on the first step, over an empty cache."""
    expected = yield from builder.whole()
    prompt = builder.scenario.prompt
    yield builder.decode(0, prompt, builder.first_past(0), expected[:, :prompt])


def takes_past(contract: CacheContract) -> str | None:
    """The graph of the first step must have past inputs."""
    if contract.first_step == "no-past-graph":
        return "the graph of the first step takes no past"
    return several_tokens(contract) or grows(contract)


def has_switch(contract: CacheContract) -> str | None:
    """Only a merged decoder has a cached branch to choose."""
    return None if contract.first_step == "no-past-branch" else "there is no branch switch"


EXPERIMENTS = (
    Experiment("empty-past", "first step with past length 0", empty_past, applies=takes_past, order=2),
    Experiment(
        "dummy-past-runs",
        "whether the first step runs at all with a past of length 1",
        dummy_past_runs,
        applies=takes_past,
        shown=False,
        unless_passed="empty-past",
        order=3,
    ),
    Experiment(
        "dummy-past",
        "first step with a dummy past of length 1",
        dummy_past,
        applies=takes_past,
        judged=False,
        why="the dummy is attended to unless it is masked",
        order=11,
    ),
    Experiment(
        "cached-branch-first",
        "cached branch on the first step",
        cached_branch,
        applies=has_switch,
        judged=False,
        why="the cached branch attends to the dummy past",
        order=12,
    ),
)
