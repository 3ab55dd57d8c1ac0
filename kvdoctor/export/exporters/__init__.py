"""Exporters: one file each, which says what one needs, what it writes and how it is told what to do.

A module of this package that defines `EXPORTER` is found by itself. None of them imports a framework: what is traced is
traced by `../scripts/run.py`, in a Python of its own, with the script named here.
"""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from kvdoctor.export.environments import Needs
from kvdoctor.export.wishes import Choice, Wishes


@dataclass(frozen=True, slots=True)
class Exporter:
    """One exporter.

    `writes` are the layouts that its exports are read as, by the beginnings of their names. `opsets` are the lowest and
    the highest ONNX opset that it can write, None where that is not the caller's to choose. `flags` gives what its
    script is told, and why: it is asked with what is wished for.
    """

    name: str
    summary: str
    script: str
    needs: Needs
    writes: tuple[str, ...]
    dtypes: tuple[str, ...]
    opsets: tuple[int, int] | None
    flags: Callable[[Wishes], tuple[dict[str, Any], tuple[Choice, ...]]]
    takes_task: bool = False
    order: int = field(default=50)


@cache
def load() -> tuple[Exporter, ...]:
    """All exporters, the one to try first before the others."""
    modules = (importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__))
    return tuple(sorted((module.EXPORTER for module in modules), key=lambda one: (one.order, one.name)))


def named(name: str) -> Exporter:
    """The exporter of that name.

    Raises:
        KeyError: there is none.
    """
    return {one.name: one for one in load()}[name]
