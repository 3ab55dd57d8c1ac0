"""Speculative decoding: drafts are fed in groups, and the cache is cut back to those that were accepted.

Each group is the last token that is certain and two drafts. Of its rows of logits those up to the first wrong draft
count; what was fed behind it must leave no trace. Here one draft of the first group is accepted, none of the second,
and both of the last.
"""

from collections.abc import Iterator

from kvdoctor.contract import CacheContract
from kvdoctor.decode.experiments import Calls, Experiment, Obstacle, Use, several_tokens
from kvdoctor.decode.experiments.chunk import SHARED, takes_chunks
from kvdoctor.decode.experiments.multi_turn import can_be_cut, cut, find_uncut
from kvdoctor.decode.feeds import FeedBuilder

DRAFTS = 2
"""Drafts of a group."""
ACCEPTED = (1, 0, DRAFTS)
"""Drafts that are accepted, group by group."""
FAILING_ALIKE = ("chunk", "second-turn", "rewind", "unread-content", "chunks-near-thresholds")


def speculate(builder: FeedBuilder) -> Calls:
    """Groups of drafts on a prompt: each row must give what one call over the same tokens without a cache gives."""
    expected = yield from builder.whole()
    start, total = builder.scenario.prompt, builder.scenario.total
    answer = yield builder.prefill(start, expected[:, :start])
    past = builder.carry(None, answer, "held")
    for accepted in ACCEPTED:
        before, group, stop = past, builder, min(start + 1 + DRAFTS, total)
        kept = min(start + 1 + accepted, stop)
        if kept < stop:
            group = builder.with_other_tokens(kept)
        wanted = expected if group is builder else (yield from group.whole())
        answer = yield group.decode(start, stop, past, wanted[:, start:stop])
        past, start = cut(builder, builder.carry(past, answer, "held"), kept), kept
        if start >= total:
            break
    yield from group.controls(stop - 1 - DRAFTS, stop, before, wanted)


def find_obstacles(contract: CacheContract) -> Iterator[Obstacle]:
    """What stands in the way: missing rows of logits, and slots from which no token can be taken back."""
    if contract.last_logits_only:
        logits = contract.graph("decode").port("logits")
        yield Obstacle(
            (logits.name if logits else "logits",),
            "a call with several new tokens returns the logits of the last one alone, so no draft can be checked",
            "export again with the logits of every new token",
        )
    yield from find_uncut(contract)


EXPERIMENTS = (
    Experiment(
        "speculation",
        f"{DRAFTS} drafts with each token, of which {', '.join(map(str, ACCEPTED))} are accepted",
        speculate,
        SHARED,
        lambda contract: several_tokens(contract) or takes_chunks(contract) or can_be_cut(contract),
        thorough=True,
        use=Use(
            "drafts in groups, of which some are taken back",
            required="speculation",
            after=FAILING_ALIKE,
            needed=True,
            obstacles=find_obstacles,
        ),
        order=24,
    ),
)
