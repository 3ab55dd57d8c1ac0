"""The same file run in other ways: lower levels of graph optimization, bound inputs and outputs."""

from collections.abc import Callable
from dataclasses import replace

from kvdoctor.decode.calls import Scenario, Way
from kvdoctor.decode.experiments import Calls, Experiment, Use
from kvdoctor.decode.feeds import FeedBuilder


def run_in(mode: Way) -> Callable[[FeedBuilder], Calls]:
    """The held loop in another way, against the reference run as it is usually run."""

    def loop(builder: FeedBuilder) -> Calls:
        expected = yield from builder.whole()
        start = builder.scenario.prompt
        answer = yield replace(builder.prefill(start, expected[:, :start]), via=mode)
        past = builder.carry(None, answer, "held")
        for position in range(start, builder.scenario.total):
            call = builder.decode(position, position + 1, past, expected[:, position : position + 1])
            answer = yield replace(call, via=mode)
            past = builder.carry(past, answer, "held")

    return loop


MODES: dict[Way, tuple[str, Use]] = {
    "basic": ("the held loop with basic graph optimization only", Use("basic graph optimization only")),
    "off": ("the held loop without graph optimization", Use("graph optimization off", after=("way-basic",))),
    "io-binding": ("the held loop with bound inputs and outputs", Use("inputs and outputs bound")),
}

EXPERIMENTS = tuple(
    Experiment(f"way-{mode}", question, run_in(mode), Scenario(steps=4), thorough=True, use=use, order=35)
    for mode, (question, use) in MODES.items()
)
