"""Experiments: generators that put one question to a model, one file for each.

An experiment yields a `Call` and is sent the `Answer`, then decides the next. It needs no runtime: tests answer with
scripted steps. A module of this package that defines `EXPERIMENTS` is found by itself. Standard library and numpy only.
"""

import importlib
import pkgutil
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from kvdoctor.calls import Answer, Array, Call, Scenario
from kvdoctor.contract import CacheContract
from kvdoctor.feeds import Deal
from kvdoctor.trace import Cause

Calls = Generator[Call, Answer, None]
Decision = Generator[Call, Answer, Cause | None]
"""An experiment that ends with the cause that it decided for."""


def always(contract: CacheContract) -> str | None:  # noqa: ARG001
    """Applies to every contract."""
    return None


def several_tokens(contract: CacheContract) -> str | None:
    """A reference run takes the whole sequence in one call."""
    fixed = contract.new_tokens
    return None if fixed is None else f"the first step takes {fixed} new token{'s' * (fixed > 1)} only"


def grows(contract: CacheContract) -> str | None:
    """The length of the past can be chosen only where the cache grows."""
    return None if contract.growing else "no past has a length to choose"


@dataclass(frozen=True, slots=True)
class Experiment:
    """One question put to a model.

    `applies` gives the reason why a contract does not allow it, or None. Runs of a `judged` experiment are what
    findings rest on, and are located when they fail; the others show what teams try and what becomes of it, with `why`.
    A `thorough` one takes long or much memory, and is run only when it was asked for.
    One that is not `shown` serves another finding or figure, and people see it only when they ask for everything. Where
    `asks_why` names experiments, it looks for the cause of their differences, and is run only if one of them differs.
    What follows from the success of another experiment is not run after it: `unless_passed`.
    One that `changes_deal` makes calls of other rows or masks than those of the deal it is given: there is no reference
    run of that deal to find the place of a difference by.
    One `on_request` is run only where the command asks for it. `keeps` says what it leaves in the scratch file, given
    the deal and the logits of its steps; without it that is the logits in a row.
    """

    name: str
    question: str
    calls: Callable[[Deal], Calls | Decision]
    scenario: Scenario = field(default_factory=Scenario)
    applies: Callable[[CacheContract], str | None] = several_tokens
    judged: bool = True
    shown: bool = True
    thorough: bool = False
    why: str = ""
    asks_why: tuple[str, ...] = ()
    unless_passed: str | None = None
    changes_deal: bool = False
    on_request: bool = False
    keeps: Callable[[Deal, list[Array]], dict[str, Array]] | None = None
    order: int = 50


def load() -> tuple[Experiment, ...]:
    """All experiments, in the order in which they are run."""
    found: list[Experiment] = []
    for module in pkgutil.iter_modules(__path__):
        found += getattr(importlib.import_module(f"{__name__}.{module.name}"), "EXPERIMENTS", ())
    return tuple(sorted(found, key=lambda experiment: (experiment.order, experiment.name)))
