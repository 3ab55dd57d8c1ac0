"""Which exporter with which flags: as asked, else as the diagnosis says, each choice with what it was made from."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from kvdoctor.export.exporters import Exporter, load, named
from kvdoctor.export.wishes import Choice, Wishes

DTYPES = {"float": "fp32", "float16": "fp16", "bfloat16": "bf16"}
"""The element types of a cache, and what exporters call them."""
ASKED = "asked for"


@dataclass(frozen=True, slots=True)
class Plan:
    """One way to make the export."""

    exporter: Exporter
    opset: int | None
    dtype: str
    task: str | None
    flags: dict[str, Any]
    choices: tuple[Choice, ...]


def plans(wishes: Wishes) -> Iterator[Plan]:
    """The ways to make an export, the best first; the others are for when an exporter cannot do it.

    What the user asked for is the same in all of them.
    """
    exporter, why = _exporter(wishes)
    first = _plan(wishes, exporter, why)
    yield first
    if first.opset is not None and wishes.opset is None:
        because = f"with the opset {first.opset} of {wishes.sick.name} it fails"
        choices = tuple(
            c if c.what != "opset" else Choice("opset", "the exporter's own", because) for c in first.choices
        )
        yield replace(first, opset=None, choices=choices)
    if wishes.exporter is None and wishes.task is None:
        for other in load():
            if other.name not in (exporter.name, "genai") and _can(other, wishes):
                yield _plan(wishes, other, f"{exporter.name} cannot export it")


def _exporter(wishes: Wishes) -> tuple[Exporter, str]:
    sick = wishes.sick
    if wishes.exporter is not None:
        return named(wishes.exporter), ASKED
    for exporter in load():
        layout = next((layout for layout in sick.layouts if layout.startswith(exporter.writes)), None)
        if layout is not None and _can(exporter, wishes):
            return exporter, f"{sick.name} has its layout, {layout}"
    default = next(exporter for exporter in load() if _can(exporter, wishes))
    if sick.layouts:
        return (
            default,
            f"the layout of {sick.name}, {sick.layouts[0]}, is no exporter's here; these names most loops know",
        )
    return default, "nothing else was asked for, and its names most loops know"


def _can(exporter: Exporter, wishes: Wishes) -> bool:
    """Whether an exporter can do what was asked for."""
    fits = wishes.opset is None or (exporter.opsets is not None and wishes.opset in _span(exporter))
    return fits and (wishes.dtype is None or wishes.dtype in exporter.dtypes)


def _span(exporter: Exporter) -> range:
    return range(exporter.opsets[0], exporter.opsets[1] + 1) if exporter.opsets is not None else range(0)


def _plan(wishes: Wishes, exporter: Exporter, why: str) -> Plan:
    opset, opset_choice = _opset(wishes, exporter)
    dtype, dtype_choice = _dtype(wishes, exporter)
    flags, choices = exporter.flags(wishes)
    faults = f"; it has {', '.join(wishes.sick.faults)}" if wishes.sick.faults and why != ASKED else ""
    told = (Choice("exporter", exporter.name, why + faults), opset_choice, dtype_choice)
    task = (Choice("task", wishes.task, ASKED),) if wishes.task is not None else ()
    return Plan(exporter, opset, dtype, wishes.task, flags, (*told, *task, *choices))


def _opset(wishes: Wishes, exporter: Exporter) -> tuple[int | None, Choice]:
    if wishes.opset is not None:
        return wishes.opset, Choice("opset", str(wishes.opset), ASKED)
    theirs = wishes.sick.opset
    if theirs is not None and theirs in _span(exporter):
        return theirs, Choice("opset", str(theirs), f"that of {wishes.sick.name}")
    why = "nothing else was asked for"
    if theirs is not None:
        why = f"{wishes.sick.name} has {theirs}, which {exporter.name} "
        why += "does not let be chosen" if exporter.opsets is None else "cannot write"
    return None, Choice("opset", "the exporter's own", why)


def _dtype(wishes: Wishes, exporter: Exporter) -> tuple[str, Choice]:
    if wishes.dtype is not None:
        return wishes.dtype, Choice("dtype", wishes.dtype, ASKED)
    theirs = DTYPES.get(wishes.sick.dtype or "")
    if theirs is not None and theirs in exporter.dtypes:
        return theirs, Choice("dtype", theirs, f"that of the cache of {wishes.sick.name}")
    why = "nothing else was asked for"
    if wishes.sick.dtype is not None:
        why = f"the cache of {wishes.sick.name} is {wishes.sick.dtype}, which {exporter.name} does not write"
    return "fp32", Choice("dtype", "fp32", why)
