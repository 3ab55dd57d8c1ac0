"""What every cache rests on: the same feed gives the same logits, and a token's logits do not know the next token."""

from kvdoctor.calls import Array, Scenario
from kvdoctor.contract import CacheContract
from kvdoctor.experiments import Calls, Decision, Experiment, several_tokens
from kvdoctor.experiments.rows import other_token, probe, same_logits
from kvdoctor.feeds import Deal
from kvdoctor.parity import measurable
from kvdoctor.trace import Cause


def same_feed(deal: Deal) -> Calls:
    """The reference run a second time, and one decode step twice."""
    expected = yield from deal.whole()
    if deal.contract.last_logits_only:
        expected = expected[:, -1:]
    if not measurable(expected):
        return  # two of them cannot be held against each other
    yield deal.prefill(deal.scenario.total, expected)
    start = deal.scenario.prompt
    answer = yield probe(deal.prefill(start))
    if answer.failed:
        return
    past = deal.carry(None, answer, "held")
    step = yield probe(deal.decode(start, start + 1, past))
    if not step.failed and measurable(step.logits):
        yield deal.decode(start, start + 1, past, step.logits)


def later_token(deal: Deal) -> Decision:
    """The reference run with another last token: nothing before it may change."""
    expected = yield from deal.whole()
    return (yield from looks_ahead(deal, expected))


def looks_ahead(deal: Deal, expected: Array) -> Decision:
    """Whether another last token changes the logits of those before it, without a cache."""
    if deal.contract.last_logits_only:
        return None
    other = yield probe(other_token(deal, -1).prefill(deal.scenario.total))
    if other.failed or same_logits(other.logits[:, :-1], expected[:, :-1], deal.contract.exactness):
        return None
    return Cause("not-causal", "without a cache, another last token changes the logits of the tokens before it")


def gives_all_logits(contract: CacheContract) -> str | None:
    """The logits of earlier tokens must be there, and must not be rounded by what stands behind them."""
    if contract.last_logits_only:
        return "only the last token's logits are given"
    if contract.exactness == "dynamic-quantisation":
        return "dynamic quantisation takes one scale from all tokens"
    return several_tokens(contract)


EXPERIMENTS = (
    Experiment("same-feed", "the same feed twice", same_feed, shown=False, order=6),
    Experiment(
        "later-token",
        "whether a token's logits change with the token behind it",
        later_token,
        Scenario(),
        gives_all_logits,
        shown=False,
        order=6,
    ),
)
