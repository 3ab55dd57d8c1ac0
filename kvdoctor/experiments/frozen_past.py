"""A past whose length is a number: how far does a loop come?"""

from kvdoctor.calls import Scenario
from kvdoctor.contract import CacheContract
from kvdoctor.experiments import Calls, Experiment
from kvdoctor.feeds import Deal

NAME = "frozen-past"


def beyond(deal: Deal) -> Calls:
    """A prefill of as many tokens as the past is long, one step that takes them, and the step after it."""
    fits = deal.contract.frozen_past or 0
    answer = yield deal.prefill(fits)
    past = deal.carry(None, answer, "held")
    for position in (fits, fits + 1):
        answer = yield deal.decode(position, position + 1, past)
        past = deal.carry(past, answer, "held")


def can_be_filled(contract: CacheContract) -> str | None:
    """The first step must take no past, and as many tokens as the past of the next one has places."""
    fits = contract.frozen_past
    if fits is None:
        return "the past length is no number"
    if contract.first_step == "empty-past" or contract.new_tokens not in (None, fits):
        return f"the past length is fixed at {fits}, and no first step fills it"
    return None


EXPERIMENTS = (
    Experiment(
        NAME, "the loop until the past is longer than declared", beyond, Scenario(steps=3), can_be_filled, order=1
    ),
)
