"""The choice of an exporter and its flags: as asked for, else from the diagnosis, each with its reason."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvdoctor.records import record
from kvdoctor.repair.export.exporters.registry import Exporter, find_exporter, load
from kvdoctor.repair.export.source_model import SourceFacts
from kvdoctor.repair.request import ExportRequest
from kvdoctor.report.repair_record import ExportChoice

DTYPES = {"float": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""The element types of a cache by the names that exporters use."""
ASKED = "asked for"


@record
class ExportPlan:
    """An exporter with its flags, and the reasons for them."""

    exporter: Exporter
    opset: int | None
    dtype: str
    task: str | None
    flags: dict[str, Any]
    choices: tuple[ExportChoice, ...]


def list_plans(request: ExportRequest, source: SourceFacts) -> Iterator[ExportPlan]:
    """The plans for an export, the best first; the others are for the case that an exporter fails.

    The options of the user are the same in all of them.
    """
    exporter, why = _choose_exporter(request, source)
    first = _make_plan(request, source, exporter, why)
    yield first
    if first.opset is not None and request.opset is None:
        because = f"with the opset {first.opset} of {source.name} it fails"
        choices = tuple(
            c if c.what != "opset" else ExportChoice("opset", "the exporter's own", because) for c in first.choices
        )
        yield replace(first, opset=None, choices=choices)
    if request.exporter is None and request.task is None:
        for other in load():
            if other.name != exporter.name and not other.own_layout and _supports(other, request):
                yield _make_plan(request, source, other, f"{exporter.name} cannot export it")


def _choose_exporter(request: ExportRequest, source: SourceFacts) -> tuple[Exporter, str]:
    if request.exporter is not None:
        return find_exporter(request.exporter), ASKED
    for exporter in load():
        layout = next((layout for layout in source.layouts if layout.startswith(exporter.writes)), None)
        if layout is not None and _supports(exporter, request):
            return exporter, f"{source.name} has its layout, {layout}"
    default = next(exporter for exporter in load() if _supports(exporter, request))
    if source.layouts:
        return (
            default,
            f"no exporter writes the layout of {source.name}, {source.layouts[0]}; most loops know these names",
        )
    return default, "nothing else was asked for, and most loops know its names"


def _supports(exporter: Exporter, request: ExportRequest) -> bool:
    """Whether an exporter supports the options of the user."""
    fits = request.opset is None or (exporter.opsets is not None and request.opset in _span(exporter))
    return fits and (request.dtype is None or request.dtype in exporter.dtypes)


def _span(exporter: Exporter) -> range:
    return range(exporter.opsets[0], exporter.opsets[1] + 1) if exporter.opsets is not None else range(0)


def _make_plan(request: ExportRequest, source: SourceFacts, exporter: Exporter, why: str) -> ExportPlan:
    opset, opset_choice = _choose_opset(request, source, exporter)
    dtype, dtype_choice = _choose_dtype(request, source, exporter)
    flags, choices = exporter.flags(source)
    faults = f"; it has {', '.join(source.faults)}" if source.faults and why != ASKED else ""
    decided = (ExportChoice("exporter", exporter.name, why + faults), opset_choice, dtype_choice)
    task = (ExportChoice("task", request.task, ASKED),) if request.task is not None else ()
    return ExportPlan(exporter, opset, dtype, request.task, flags, (*decided, *task, *choices))


def _choose_opset(request: ExportRequest, source: SourceFacts, exporter: Exporter) -> tuple[int | None, ExportChoice]:
    if request.opset is not None:
        return request.opset, ExportChoice("opset", str(request.opset), ASKED)
    theirs = source.opset
    if theirs is not None and theirs in _span(exporter):
        return theirs, ExportChoice("opset", str(theirs), f"that of {source.name}")
    why = "nothing else was asked for"
    if theirs is not None:
        why = f"{source.name} has {theirs}, which {exporter.name} "
        why += "does not let you choose" if exporter.opsets is None else "cannot write"
    return None, ExportChoice("opset", "the exporter's own", why)


def _choose_dtype(request: ExportRequest, source: SourceFacts, exporter: Exporter) -> tuple[str, ExportChoice]:
    if request.dtype is not None:
        return request.dtype, ExportChoice("dtype", request.dtype, ASKED)
    theirs = DTYPES.get(source.dtype or "")
    if theirs is not None and theirs in exporter.dtypes:
        return theirs, ExportChoice("dtype", theirs, f"that of the cache of {source.name}")
    why = "nothing else was asked for"
    if source.dtype is not None:
        why = f"the cache of {source.name} is {source.dtype}, which {exporter.name} does not write"
    return "fp32", ExportChoice("dtype", "fp32", why)
