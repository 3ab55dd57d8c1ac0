"""What an exporter declares, and the list of all exporters: each module here that defines `EXPORTER`."""

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import field
from functools import cache
from typing import Any

from kvdoctor.records import record
from kvdoctor.repair.export.source_model import SourceFacts
from kvdoctor.report.repair_record import ExportChoice
from kvdoctor.runtime.environments import Requirements


@record
class Exporter:
    """One exporter.

    `writes` are the layouts of its exports, by the beginnings of their names. `opsets` are the lowest and the highest
    ONNX opset that it can write, None if the caller cannot choose one. `flags` gives the flags of its script for a
    model to be replaced, and the reason for each. `own_layout` says that its files are for a runtime of its own: it
    never stands in for another exporter that failed.
    """

    name: str
    summary: str
    script: str
    needs: Requirements
    writes: tuple[str, ...]
    dtypes: tuple[str, ...]
    opsets: tuple[int, int] | None
    flags: Callable[[SourceFacts], tuple[dict[str, Any], tuple[ExportChoice, ...]]]
    takes_task: bool = False
    own_layout: bool = False
    order: int = field(default=50)


@cache
def load() -> tuple[Exporter, ...]:
    """All exporters, the one to try first before the others."""
    package = importlib.import_module(__name__.rpartition(".")[0])
    modules = (importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__))
    found = (module.EXPORTER for module in modules if hasattr(module, "EXPORTER"))
    return tuple(sorted(found, key=lambda exporter: (exporter.order, exporter.name)))


def find_exporter(name: str) -> Exporter:
    """The exporter of that name.

    Raises:
        KeyError: there is none.
    """
    return {exporter.name: exporter for exporter in load()}[name]
