"""Repairs on the graph: one file each, with what it requires and what it ensures.

A module of this package that defines `REPAIR` is found by itself. A repair is applied only where a check that calls
for it fired, and is not believed: the repaired model is diagnosed again.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from kvdoctor.patient import CannotRepair, Patient
from kvdoctor.report.document import Change

__all__ = ("CannotRepair", "Change", "Patient", "Repair", "load", "named")

Stage = Literal["file", "session", "ports", "slots", "axes", "values", "names", "weights", "side-cars"]
STAGES: tuple[Stage, ...] = ("file", "session", "ports", "slots", "axes", "values", "names", "weights", "side-cars")
"""Repairs are applied in this order.

The file as such (sorted, named); what keeps the runtime from opening it; which input or output is which slot; what
comes back of each; axes that are frozen or baked in; what is computed; declared names and sizes; weights, hoisted and
merged; the configs beside it.
"""

Keeps = Literal["bits", "first-step", "reference", "own"]
"""What of the original's numbers the repaired model must still give, besides parity of its own loops.

bits: the logits of the held loop, and of the plain loop where that passed before, bit for bit. first-step: those of the
first step bit for bit, for a fault that spoils what comes after. reference: those of the first step within the noise of
the arithmetic, for a repair that computes another way. own: nothing, since the fault is in all of the original's
numbers: the repair must say by which rule its own are right.
"""


@dataclass(frozen=True, slots=True)
class Repair:
    """A change to the files of a stack.

    `mends` are the names of the checks that call for it. `apply` changes the models and configs of the patient, in
    place, and tells what it did; nothing, where there is nothing to do (any more). It raises `CannotRepair` where what
    it requires does not hold. `advice` is for those who cannot change the model.
    """

    name: str
    mends: tuple[str, ...]
    stage: Stage
    keeps: Keeps
    apply: Callable[[Patient], tuple[Change, ...]]
    advice: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The first line of its module's documentation."""
        documentation = importlib.import_module(self.apply.__module__).__doc__ or ""
        return documentation.partition("\n")[0]


@cache
def load() -> tuple[Repair, ...]:
    """All repairs, in the order in which they are applied."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    found = [module.REPAIR for module in modules if hasattr(module, "REPAIR")]
    return tuple(sorted(found, key=lambda repair: (STAGES.index(repair.stage), repair.name)))


def named(name: str) -> Repair | None:
    """The repair of that name."""
    return next((repair for repair in load() if repair.name == name), None)
