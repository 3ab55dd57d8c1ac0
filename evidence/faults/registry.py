"""Where faults are registered, each with the name that a diagnosis must give it."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from evidence.faults.base_models import Export
from kvdoctor.diagnose.context import Consumer
from kvdoctor.findings import Severity

Break = Callable[[Export], None]
SUBJECTS = (
    "positions",
    "masks",
    "presents",
    "mathematics",
    "batches",
    "sizes",
    "uses",
    "contracts",
    "files",
    "harmless",
)
"""The modules that hold faults."""


@dataclass(frozen=True)
class Fault:
    """One way to break an export.

    Attributes:
        check: The name that the leading finding must have; empty where nothing may be found.
        idea: What a colleague did wrong, in one line.
        bases: The exports that it is done to.
        harm: What does it.
        severity: Severity that the finding must have.
        consumer: The loop that is judged.
        thorough: Whether only the thorough experiments can show it.
    """

    name: str
    check: str
    idea: str
    bases: tuple[str, ...]
    harm: Break
    severity: Severity = "error"
    consumer: Consumer = "plain"
    thorough: bool = False


_FAULTS: dict[str, Fault] = {}


def fault(check: str, idea: str, bases: tuple[str, ...], **more: Any) -> Callable[[Break], Break]:
    """Register a function as a fault of that check; its name is that of the function, `more` as in `Fault`."""

    def register(harm: Break) -> Break:
        name = harm.__name__.replace("_", "-")
        assert name not in _FAULTS, name
        _FAULTS[name] = Fault(name, check, idea, bases, harm, **more)
        return harm

    return register


def harmless(idea: str, bases: tuple[str, ...]) -> Callable[[Break], Break]:
    """Register a change that hurts nobody."""
    return fault("", idea, bases)


def load() -> dict[str, Fault]:
    """All faults by name, in the order of the modules."""
    for subject in SUBJECTS:
        importlib.import_module(f"evidence.faults.{subject}")
    return dict(_FAULTS)
