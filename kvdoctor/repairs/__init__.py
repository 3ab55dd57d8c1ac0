"""Repairs on the graph: one file each, with what it requires and what it ensures.

A module of this package that defines `REPAIR` is found by itself. A repair is applied only where the check that calls
for it fired, and is not believed: the repaired model is diagnosed again.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass

import onnx

from kvdoctor.contract import CacheContract
from kvdoctor.report.document import Change


@dataclass(frozen=True, slots=True)
class Repair:
    """A change to the graph.

    `mends` is the name of the check that calls for it. `apply` changes the model it is given, whose external data is
    not loaded, and tells what it did; nothing, where what it requires does not hold. `advice` is for those who cannot
    change the model.
    """

    name: str
    mends: str
    apply: Callable[[onnx.ModelProto, CacheContract], tuple[Change, ...]]
    advice: tuple[str, ...]


def load() -> tuple[Repair, ...]:
    """All repairs, by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__))
    return tuple(sorted((module.REPAIR for module in modules), key=lambda repair: str(repair.name)))
