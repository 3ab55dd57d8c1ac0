"""Experiments: generators that put one question to a model, one file for each.

An experiment yields a `Call` and is sent the `Answer`, then decides the next. It needs no runtime: tests answer with
scripted steps. What a module of this package decorates with an `Experiment` is found. Standard library and numpy only.
"""

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, replace
from functools import cache, partial, wraps
from typing import Literal, ParamSpec, TypeVar

from kvdoctor.choices import Required
from kvdoctor.contract import CacheContract
from kvdoctor.decode.calls import Answer, Array, Asking, Call, Loop, Past, Scenario, T, Unanswered
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.decode.runs import Cause
from kvdoctor.records import record

Calls = Asking[None]
Decision = Asking[Cause | None]
"""An experiment that ends with the cause that it decided for."""
MakeCalls = Callable[[FeedBuilder], Calls | Decision]
Made = TypeVar("Made", bound=MakeCalls)
P = ParamSpec("P")


def always(contract: CacheContract) -> str | None:  # noqa: ARG001
    """Applies to every contract."""
    return None


def several_tokens(contract: CacheContract) -> str | None:
    """A reference run takes the whole sequence in one call."""
    fixed = contract.new_tokens
    return None if fixed is None else f"the first step takes {fixed} new token{'s' * (fixed > 1)} only"


def grows(contract: CacheContract) -> str | None:
    """The length of the past can be chosen only where the cache grows."""
    return None if contract.growing else "no past has a variable length"


@record
class Obstacle:
    """What in a contract stands in the way of a use: the inputs or outputs concerned, why, and a way round it."""

    names: tuple[str, ...]
    reason: str
    advice: str


Obstacles = Callable[[CacheContract], Iterable[Obstacle]]


@record
class Use:
    """A use of the model beyond one sequence, token by token. An experiment tries it with other sizes.

    A use that fails is a warning, since the loop that was asked for is right; `--require` makes it an error.

    Attributes:
        words: The use, as it follows `with`.
        severity: Of the finding where only this use fails.
        required: The choice of `--require` that demands it.
        after: Experiments that fail from the same cause, if they do.
        needed: The required use is proved only where this experiment passes; of the others one is enough.
        obstacles: Lists what in the contract stands in the way; each is a finding where the use is required.
    """

    words: str
    severity: Literal["warning", "error"] = "warning"
    required: Required | None = None
    after: tuple[str, ...] = ()
    needed: bool = False
    obstacles: Obstacles | None = None


def no_calls(builder: FeedBuilder) -> Calls:  # noqa: ARG001
    """Run nothing."""
    yield from ()


_FOUND: list["Experiment"] = []


@record
class Experiment:
    """One question put to a model; it decorates the function that makes its calls.

    Attributes:
        applies: Gives the reason why a contract does not allow the experiment, or None.
        judged: Findings rest on its runs, and its failures are located in the graph. The other experiments try common
            workarounds, and `why` says why they fail.
        shown: Listed in reports. One that is not serves another finding, and is listed only when everything is.
        thorough: Takes long or much memory; run only where the command asks for it.
        lengths: It visits lengths in turn: not run where a proof holds for all of them.
        use: The use of the model that it tries.
        explains: Experiments whose differences it explains; run only if one of them differs.
        unless_passed: The experiment whose success makes this one pointless.
        changes_feeds: Uses other rows or masks than those of the builder that it is given: no reference run of that
            builder can locate a difference.
        fresh: Run in a worker process that is started for it.
        on_request: Run only where this option or command needs it.
        with_features: Only for a model with an encoder of images or audio; it is not listed for others.
        one_token: Only for a graph that takes one token a call; it is not listed for others.
        keeps: What it leaves in the scratch file, given the builder and the logits of its steps; without it the logits
            of all steps in a row.
        order: Experiments run by increasing order, then by name.
    """

    name: str
    question: str
    scenario: Scenario = field(default_factory=Scenario)
    applies: Callable[[CacheContract], str | None] = several_tokens
    judged: bool = True
    shown: bool = True
    thorough: bool = False
    lengths: bool = False
    why: str = ""
    use: Use | None = None
    explains: tuple[str, ...] = ()
    unless_passed: str | None = None
    changes_feeds: bool = False
    fresh: bool = False
    on_request: Literal["", "reference", "loop", "generate"] = ""
    with_features: bool = False
    one_token: bool = False
    keeps: Callable[[FeedBuilder, list[Array]], dict[str, Array]] | None = None
    order: int = 50
    calls: MakeCalls = no_calls

    def __call__(self, calls: Made) -> Made:
        """Add the experiment with these calls to those that are run; gives the function back."""
        _FOUND.append(replace(self, calls=calls))
        return calls


unjudged = partial(Experiment, judged=False, shown=False)
"""An experiment on which no finding rests: it explains others, or leaves logits for a comparison."""


@cache
def load() -> tuple[Experiment, ...]:
    """All experiments, in the order in which they are run."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return tuple(sorted(_FOUND, key=lambda experiment: (experiment.order, experiment.name)))


@cache
def by_name() -> Mapping[str, Experiment]:
    """All experiments by their names."""
    return {experiment.name: experiment for experiment in load()}


@cache
def judged_names() -> frozenset[str]:
    """The names of the experiments on whose runs findings rest."""
    return frozenset(experiment.name for experiment in load() if experiment.judged)


@cache
def uses() -> dict[str, Use]:
    """The uses of a model, by the name of the experiment that tries them."""
    return {experiment.name: experiment.use for experiment in load() if experiment.use is not None}


def first_reason(obstacles: Iterable[Obstacle]) -> str | None:
    """The first obstacle, as the reason why an experiment is not run; None where there is none."""
    return next((f"{one.names[0]}: {one.reason}" for one in obstacles), None)


@cache
def find_explaining(use: str) -> str | None:
    """The name of the experiment that explains the differences of a use; None where there is none."""
    return next((one.name for one in load() if use in uses() and use in one.explains), None)


def as_probe(call: Call) -> Call:
    """The call as one that may fail; of a reference call the logits and the slots that grow alone are answered."""
    return replace(call, kind="trial" if call.kind == "reference" else "probe", expected=None)


def ask(*calls: Call) -> Asking[list[Answer]]:
    """The answers of calls that may fail. Raises Unanswered: one of them does; the experiment then ends undecided."""
    answers = list[Answer]()
    for call in calls:
        answers.append((yield as_probe(call)))
    if any(answer.failed for answer in answers):
        raise Unanswered
    return answers


def undecided(decide: Callable[P, Asking[T]]) -> Callable[P, Asking[T | None]]:
    """A question that is one of several: where a call of it fails, the others are still asked."""

    @wraps(decide)
    def decide_if_answered(*args: P.args, **named: P.kwargs) -> Asking[T | None]:
        try:
            return (yield from decide(*args, **named))
        except Unanswered:
            return None

    return decide_if_answered


def one_step(builder: FeedBuilder, position: int, past: Past | None, expected: Array | None = None) -> Call:
    """The call for one token; the first one where there is no past."""
    if past is None:
        return builder.prefill(1, expected)
    return builder.decode(position, position + 1, past, expected)


def prefill(builder: FeedBuilder, stop: int) -> Asking[tuple[Answer, Past]]:
    """The answer of a prefill of `stop` tokens, and the past of the held loop after it. Raises Unanswered: it fails."""
    (answer,) = yield from ask(builder.prefill(stop))
    return answer, builder.carry(None, answer, "held")


def walk(
    builder: FeedBuilder, start: int, stop: int, past: Past | None = None, loop: Loop = "plain"
) -> Asking[tuple[list[Past | None], list[Answer]]]:
    """Token by token: the past before each step and after the last one, and the answers, up to a step that fails."""
    pasts, answers = [past], list[Answer]()
    for position in range(start, stop):
        answer = yield as_probe(one_step(builder, position, pasts[-1]))
        if answer.failed:
            break
        answers.append(answer)
        pasts.append(builder.carry(pasts[-1], answer, loop))
    return pasts, answers
