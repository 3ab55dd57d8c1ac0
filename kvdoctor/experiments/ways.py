"""The same file run in other ways: lower levels of graph optimisation, bound inputs and outputs."""

from collections.abc import Callable
from dataclasses import replace

from kvdoctor.calls import Scenario, Way
from kvdoctor.experiments import Calls, Experiment
from kvdoctor.feeds import Deal


def by(way: Way) -> Callable[[Deal], Calls]:
    """The held loop in another way, against the reference run as it is usually run."""

    def loop(deal: Deal) -> Calls:
        expected = yield from deal.whole()
        start = deal.scenario.prompt
        answer = yield replace(deal.prefill(start, expected[:, :start]), via=way)
        past = deal.carry(None, answer, "held")
        for position in range(start, deal.scenario.total):
            call = deal.decode(position, position + 1, past, expected[:, position : position + 1])
            answer = yield replace(call, via=way)
            past = deal.carry(past, answer, "held")

    return loop


WAYS: dict[Way, str] = {
    "basic": "the held loop with basic graph optimisation only",
    "off": "the held loop without graph optimisation",
    "io-binding": "the held loop with bound inputs and outputs",
}

EXPERIMENTS = tuple(
    Experiment(f"way-{way}", question, by(way), Scenario(steps=4), thorough=True, order=35)
    for way, question in WAYS.items()
)
