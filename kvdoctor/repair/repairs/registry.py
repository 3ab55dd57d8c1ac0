"""What a repair declares, and the list of all repairs: the `REPAIRS` of each module here."""

import importlib
from collections.abc import Callable, Iterable
from functools import cache
from typing import Literal

from kvdoctor.errors import UsageError, did_you_mean
from kvdoctor.findings import find_modules
from kvdoctor.records import record
from kvdoctor.repair.workspace import RepairContext
from kvdoctor.report.repair_record import Change

PACKAGE = __name__.rpartition(".")[0]

Stage = Literal["file", "session", "ports", "slots", "axes", "values", "names", "weights", "side-cars"]
STAGES: tuple[Stage, ...] = ("file", "session", "ports", "slots", "axes", "values", "names", "weights", "side-cars")
"""Repairs are applied in this order.

file: order and names of nodes. session: causes that keep the runtime from loading the file. ports: which input or
output belongs to which slot. slots: the values that each slot returns. axes: frozen or baked-in sizes. values: wrong
computations. names: declared names and sizes. weights: duplicates. side-cars: the configs next to the model.
"""

Keeps = Literal["bits", "first-step", "reference", "own", "sizes"]
"""Which numbers of the original the repaired model must reproduce, besides parity of its own loops.

bits: the logits of the held loop, and of the plain loop if that passed before, bit for bit. first-step: the logits of
the first step bit for bit, for a fault that affects later steps only. reference: the logits of the first step within
the tolerance of the arithmetic, for a repair that changes the order of computation. own: none, because the fault
affects all of the original's numbers: the repair documents the rule by which its own are right. sizes: every output bit
for bit at the sizes that the original accepts, which the repair compares when it is applied; the loops run at other
sizes and need a reference run.
"""


@record
class Repair:
    """A change to the files of a stack.

    `checks` are the names of the checks whose findings call for it. `apply` changes the models and configs of the
    context in place and returns the changes, none if there is nothing to do (any more). It raises `CannotRepair` if its
    requirements are not met; its documentation says what it does, requires and ensures. `advice` is for users who
    cannot change the model. `title` says what the repair does where several share a function.
    """

    name: str
    checks: tuple[str, ...]
    stage: Stage
    keeps: Keeps
    apply: Callable[[RepairContext], tuple[Change, ...]]
    advice: tuple[str, ...] = ()
    title: str = ""

    @property
    def summary(self) -> str:
        """What the repair does, in one line."""
        return self.title or (self.apply.__doc__ or "").partition("\n")[0]


@cache
def load() -> tuple[Repair, ...]:
    """All repairs, in the order in which they are applied."""
    return _read_modules(find_modules(PACKAGE))


def load_for_check(check: str) -> tuple[Repair, ...]:
    """The repairs for one check, in the order in which they are applied.

    Only modules with the name of the check in their source are loaded: all of them together load numpy and onnx, which
    takes longer than the rest of an inspection.
    """
    return tuple(repair for repair in _read_modules(find_modules(PACKAGE, check)) if check in repair.checks)


def _read_modules(names: Iterable[str]) -> tuple[Repair, ...]:
    modules = map(importlib.import_module, names)
    repairs = (repair for module in modules for repair in getattr(module, "REPAIRS", ()))
    return tuple(sorted(repairs, key=lambda repair: (STAGES.index(repair.stage), repair.name)))


def refuse_unknown_repairs(names: tuple[str, ...]) -> None:
    """Refuse a repair that does not exist. Raises UsageError: with the nearest name, and all of them."""
    known = [repair.name for repair in load()]
    for name in names:
        if "=" in name:
            raise UsageError(f"--fix takes the names of repairs; sizes: kvdoctor convert PATH --sizes {name} -o OUT")
        if name not in known:
            parts = f"there is no repair {name!r};", did_you_mean(name, known, 0.4), "the repairs are"
            raise UsageError(f"{' '.join(filter(None, parts))} {', '.join(sorted(known))}")


def find_repair(name: str) -> Repair | None:
    """The repair of that name."""
    return next((repair for repair in load() if repair.name == name), None)
