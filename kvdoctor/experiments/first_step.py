"""What the first step may be fed: a past of length 0, a dummy of length 1, the cached branch."""

from kvdoctor.contract import CacheContract
from kvdoctor.experiments import Calls, Experiment, grows, several_tokens
from kvdoctor.feeds import Deal


def empty_past(deal: Deal) -> Calls:
    """Past length 0: what Optimum and transformers.js feed."""
    expected = yield from deal.whole()
    yield deal.prefill(deal.scenario.prompt, expected[:, : deal.scenario.prompt])


def dummy_past(deal: Deal) -> Calls:
    """A dummy past of length 1: what bindings that refuse empty tensors feed."""
    expected = yield from deal.whole()
    yield deal.prefill(deal.scenario.prompt, expected[:, : deal.scenario.prompt], dummy=1)


def dummy_past_runs(deal: Deal) -> Calls:
    """The same calls with a dummy past of length 1: tells whether it is the length 0 that a first step fails on."""
    yield deal.prefill(deal.scenario.total, dummy=1)
    yield deal.prefill(deal.scenario.prompt, dummy=1)


def cached_branch(deal: Deal) -> Calls:
    """The switch already true on the first step, over an empty cache."""
    expected = yield from deal.whole()
    prompt = deal.scenario.prompt
    yield deal.decode(0, prompt, deal.first_past(0), expected[:, :prompt])


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
        why="the dummy is attended to, unless masked",
        order=11,
    ),
    Experiment(
        "cached-branch-first",
        "cached branch on the first step",
        cached_branch,
        applies=has_switch,
        judged=False,
        why="it attends to the dummy past",
        order=12,
    ),
)
