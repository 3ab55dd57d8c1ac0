"""What every cache rests on: the same feed gives the same logits, and a token's logits do not know the next token."""

from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Array, Scenario
from kvdoctor.decode.experiments import Calls, Decision, Experiment, several_tokens
from kvdoctor.decode.experiments.cache_entries import as_probe, change_token, same_logits
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.parity import measurable
from kvdoctor.decode.runs import Cause


def same_feed(builder: FeedBuilder) -> Calls:
    """The reference run a second time, and one decode step twice."""
    expected = yield from builder.whole()
    if builder.contract.last_logits_only:
        expected = expected[:, -1:]
    if not measurable(expected):
        return  # two of them cannot be compared
    yield builder.prefill(builder.scenario.total, expected)
    start = builder.scenario.prompt
    answer = yield as_probe(builder.prefill(start))
    if answer.failed:
        return
    past = builder.carry(None, answer, "held")
    step = yield as_probe(builder.decode(start, start + 1, past))
    if not step.failed and measurable(step.logits):
        yield builder.decode(start, start + 1, past, step.logits)


def later_token(builder: FeedBuilder) -> Decision:
    """The reference run with another last token: nothing before it may change."""
    expected = yield from builder.whole()
    return (yield from looks_ahead(builder, expected))


def looks_ahead(builder: FeedBuilder, expected: Array) -> Decision:
    """Whether another last token changes the logits of those before it, without a cache."""
    if builder.contract.last_logits_only:
        return None
    other = yield as_probe(change_token(builder, -1).prefill(builder.scenario.total))
    if other.failed or same_logits(other.logits[:, :-1], expected[:, :-1], builder.tolerance):
        return None
    return Cause("not-causal", "without a cache, another last token changes the logits of the tokens before it")


def gives_all_logits(contract: CacheContract) -> str | None:
    """The logits of earlier tokens must be there, and must not be rounded by what stands behind them."""
    if contract.last_logits_only:
        return "only the last token's logits are returned"
    if contract.exactness == "dynamic-quantization":
        return "dynamic quantization takes one scale from all tokens"
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
