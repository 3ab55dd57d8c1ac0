"""The findings of a gate held against its baseline: what is known, and what of the baseline is to be mended.

An entry stands for the finding of its fingerprint in its own model, as `kvdoctor.baseline` says. What a model that was
not diagnosed, or a check that was not asked, leaves open makes no entry stale.
"""

import datetime as dt
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from kvdoctor.baseline import Baseline, Entry
from kvdoctor.findings import Finding, Known, Selection, find_check
from kvdoctor.plain import to_plain
from kvdoctor.report.document import Report, decide, is_open, means_incomplete


@dataclass(frozen=True, slots=True)
class Told:
    """A baseline after a gate: how many findings are known, and the entries that are to be looked at.

    `stale` are not found any more in a model that was checked, `expired` are found and count again, `moved` are taken
    for a model of another path, (entry, path).
    """

    file: str
    known: int = 0
    stale: tuple[Entry, ...] = ()
    expired: tuple[Entry, ...] = ()
    moved: tuple[tuple[Entry, str], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As the document of a gate holds it; without the digests, which are for the file alone."""
        told = {kind: [_named(entry) for entry in getattr(self, kind)] for kind in ("stale", "expired")}
        moved = [{**_named(entry), "to": path} for entry, path in self.moved]
        return {"file": self.file, "known": self.known, **told, "moved": moved}

    def lines(self) -> Iterator[str]:
        """One line for each entry that is to be looked at."""
        for entry in self.expired:
            yield f"{entry.words} was known until {entry.until}; it counts again: repair it, or give it another day"
        for entry in self.stale:
            yield f"{entry.words} is not found any more; `kvdoctor baseline --prune` takes it out"
        for entry, path in self.moved:
            yield f"{entry.words} was taken for {path}, which is the same; `kvdoctor baseline --prune` notes the move"


def _named(entry: Entry) -> dict[str, Any]:
    return {name: getattr(entry, name) for name in NAMED}


NAMED = ("model", "code", "where", "reason", "until", "fingerprint")


@dataclass(frozen=True, slots=True)
class Compared:
    """Reports with their known findings marked, and what is to be told of the baseline.

    `used` are the entries whose findings are there still, those that are over included.
    """

    reports: tuple[Report, ...]
    told: Told
    used: tuple[Entry, ...]


def compared(baseline: Baseline, reports: Sequence[Report], day: dt.date) -> Compared:
    """Mark what is known in the reports of a gate, and decide each anew. `day` is the one that entries end by."""
    places = [place_of(report, baseline.folder) for report in reports]
    moved = _moved(baseline, reports, places)
    used, stale, marked = dict[Entry, None](), dict[Entry, None](), []
    for number, report in enumerate(reports):
        mine = [e for e in baseline.entries if is_of(e, places[number]) or moved.get(e.model) == number]
        known = {entry.fingerprint: entry for entry in reversed(mine)}
        found = {finding.fingerprint for finding in report.findings if not means_incomplete(finding.code)}
        used |= {entry: None for fingerprint, entry in known.items() if fingerprint in found}
        stale |= {entry: None for entry in mine if _would_show(report, places[number], entry)}
        marked.append(_marked(report, known, day))
    told = Told(
        file=baseline.file,
        known=sum(finding.known is not None for report in marked for finding in report.findings),
        stale=tuple(entry for entry in stale if entry not in used),
        expired=tuple(entry for entry in used if entry.is_over(day)),
        moved=tuple((entry, places[moved[entry.model]]) for entry in used if entry.model in moved),
    )
    return Compared(tuple(marked), told, tuple(used))


def place_of(report: Report, folder: Path) -> str:
    """The path of a report's model, relative to a folder."""
    path = os.path.abspath(report.model.path)  # noqa: PTH100 - links are kept: their names are what people know
    try:
        return PurePath(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # another drive of Windows
        return PurePath(path).as_posix()


def shape_of(report: Report) -> str:
    """A digest of what the files of a model take and give; no name of a file, no size and no weight is in it."""
    files = sorted(json.dumps([to_plain(f.inputs), to_plain(f.outputs)], sort_keys=True) for f in report.model.files)
    return hashlib.sha256("\n".join(files).encode("utf-8", "replace")).hexdigest()[:16]


def _moved(baseline: Baseline, reports: Sequence[Report], places: list[str]) -> dict[str, int]:
    """Models of the baseline whose path is gone, and the report that each is taken for: of the same shape and fault.

    A report is taken for one model only, and for none where it has a place in the baseline of its own.
    """
    models = dict.fromkeys(entry.model for entry in baseline.entries)
    gone = [model for model in models if not os.path.lexists(baseline.folder / model)]
    free = [n for n, place in enumerate(places) if not any(is_of(entry, place) for entry in baseline.entries)]
    moved: dict[str, int] = {}
    for model in gone if free else ():
        wanted = {(entry.shape, entry.fingerprint) for entry in baseline.entries if entry.model == model}
        shared = {n: len(wanted & _traits(reports[n])) for n in free if n not in moved.values()}
        best = max(shared, key=lambda n: shared[n], default=None)
        if best is not None and shared[best]:
            moved[model] = best
    return moved


def _traits(report: Report) -> set[tuple[str, str]]:
    shape = shape_of(report)
    return {(shape, finding.fingerprint) for finding in report.findings}


def is_of(entry: Entry, place: str) -> bool:
    """Whether an entry is of the model at a place; a file in the folder of an export is a part of it."""
    return place == entry.model or _is_file_in(place, entry.model) or _is_file_in(entry.model, place)


def _is_file_in(file: str, folder: str) -> bool:
    parent = PurePath(file).parent
    return file.endswith(".onnx") and folder in (parent.as_posix(), _above_onnx(parent))


def _above_onnx(folder: PurePath) -> str | None:
    """The repository that an `onnx/` subfolder belongs to."""
    return folder.parent.as_posix() if folder.name == "onnx" else None


def _marked(report: Report, known: dict[str, Entry], day: dt.date) -> Report:
    findings = tuple(_with_known(finding, known.get(finding.fingerprint), day) for finding in report.findings)
    if report.verdict != "unhealthy":
        return replace(report, findings=findings)
    command = report.command if report.runs else "inspect"
    verdict = decide(command, findings, report.not_checked, report.arguments["fail_on"])
    return replace(report, findings=findings, verdict=verdict)


def _with_known(finding: Finding, entry: Entry | None, day: dt.date) -> Finding:
    if entry is None or entry.is_over(day) or means_incomplete(finding.code):
        return finding
    return replace(finding, known=Known(entry.reason, entry.until))


def looked_with(report: Report, code: str) -> tuple[str, ...]:
    """What of a run goes further than others, as far as the check of that code is concerned.

    The full context is among the experiments of a thorough run.
    """
    asked, check = report.arguments, find_check(code)
    thorough = bool(asked.get("thorough"))
    whole = thorough or "full-context" in asked.get("require", ())
    targets = asked.get("target", ()) if check is not None and "targets" in check.asks else ()
    words = {"thorough": thorough, "full-context": whole}
    return (*(word for word, so in words.items() if so), *(f"target {target}" for target in targets))


def _would_show(report: Report, place: str, entry: Entry) -> bool:
    """Whether the report would hold the finding of an entry, if the model still had it."""
    if is_open(report.findings, report.not_checked) or _is_file_in(place, entry.model):
        return False
    if not set(entry.found_with) <= set(looked_with(report, entry.code)):
        return False
    check = find_check(entry.code)
    if check is None:
        return True  # no version of kvdoctor that gave it up finds it again
    selection = Selection(tuple(report.arguments.get("select", ())), tuple(report.arguments.get("ignore", ())))
    left = (one.code.rstrip("*") for one in report.not_checked if "-" not in one.code)
    if not selection.takes(check.code, check.name) or any(map(check.code.startswith, left)):
        return False
    if "targets" in check.asks:
        return bool(report.targets)
    return bool(report.runs) or bool({"file", "contract"} & set(check.asks))
