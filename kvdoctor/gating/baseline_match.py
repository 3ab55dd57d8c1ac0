"""Compares the findings of a gate with its baseline, and updates the baseline.

An entry matches the finding with its fingerprint in its own model (`gating/baseline.py`). An entry is stale if its
finding is gone; a model that was not diagnosed, or a check that was not requested, makes no entry stale.
"""

import datetime as dt
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath

from kvdoctor.choices import RESTS_ON, FailOn
from kvdoctor.findings import KnownFinding, find_check, means_incomplete
from kvdoctor.gating.baseline import Baseline, BaselineEntry, sort_entries
from kvdoctor.gating.stored_reports import ReadOnDemand
from kvdoctor.records import record
from kvdoctor.report.document import Report, counts, decide, is_open
from kvdoctor.report.wording.finding import format_headline


@record
class BaselineStatus:
    """A baseline after a gate.

    Attributes:
        file: the path of the baseline.
        known: the number of findings that it covers.
        stale: entries whose finding is gone, in models that were checked.
        expired: entries whose finding is still found and counts again.
    """

    file: str
    known: int = 0
    stale: tuple[BaselineEntry, ...] = ()
    expired: tuple[BaselineEntry, ...] = ()

    def lines(self) -> Iterator[str]:
        """One line for each entry that needs attention."""
        again = "it counts again: repair it, or set another date"
        prune = "`kvdoctor baseline --prune`"
        yield from (f"{entry.label} was known until {entry.until}; {again}" for entry in self.expired)
        yield from (f"{entry.label} is not found any more; {prune} removes it" for entry in self.stale)


@record
class MatchedReports:
    """Reports with known findings marked, the status of the baseline, and its entries that are still found."""

    reports: Sequence[Report]
    status: BaselineStatus
    used: tuple[BaselineEntry, ...]


def match_baseline(baseline: Baseline, reports: Sequence[Report], day: dt.date) -> MatchedReports:
    """Mark the known findings in the reports of a gate, and decide each verdict again. `day` is the current date."""
    paths = [model_path(report, baseline.folder) for report in reports]
    used, stale = dict[BaselineEntry, None](), dict[BaselineEntry, None]()
    known: dict[int, dict[str, BaselineEntry]] = {}
    for number, report in enumerate(reports):
        own = [entry for entry in baseline.entries if belongs_to(entry, paths[number])]
        found = {finding.fingerprint for finding in report.findings if not means_incomplete(finding.code)}
        known[number] = {entry.fingerprint: entry for entry in reversed(own) if entry.fingerprint in found}
        used |= dict.fromkeys(known[number].values())
        stale |= {entry: None for entry in own if _would_find(report, paths[number], entry)}
    marked = ReadOnDemand(len(reports), lambda number: _mark_known(reports[number], known[number], day))
    status = BaselineStatus(
        file=baseline.file,
        known=sum(finding.known is not None for report in marked for finding in report.findings),
        stale=tuple(entry for entry in stale if entry not in used),
        expired=tuple(entry for entry in used if entry.is_expired(day)),
    )
    return MatchedReports(tuple(marked) if isinstance(reports, tuple | list) else marked, status, tuple(used))


def model_path(report: Report, folder: Path) -> str:
    """The path of a report's model, relative to a folder."""
    path = os.path.abspath(report.model.path)  # noqa: PTH100 - links are not resolved: users know their names
    try:
        return PurePath(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # another drive of Windows
        return PurePath(path).as_posix()


def belongs_to(entry: BaselineEntry, path: str) -> bool:
    """Whether an entry is for the model at a path. A file in the folder of an export belongs to that model."""
    return path == entry.model or _is_file_in(path, entry.model) or _is_file_in(entry.model, path)


def _is_file_in(file: str, folder: str) -> bool:
    parent = PurePath(file).parent
    homes = (parent, parent.parent) if parent.name == "onnx" else (parent,)  # the repository of an `onnx/` folder
    return file.endswith(".onnx") and folder in {home.as_posix() for home in homes}


def _mark_known(report: Report, known: dict[str, BaselineEntry], day: dt.date) -> Report:
    findings = tuple(
        replace(finding, known=KnownFinding(entry.reason, entry.until))
        if (entry := known.get(finding.fingerprint)) and not (entry.is_expired(day) or means_incomplete(finding.code))
        else finding
        for finding in report.findings
    )
    verdict = report.verdict
    if verdict == "unhealthy":
        command = report.command if report.runs else "inspect"
        verdict = decide(command, findings, report.not_checked, report.fail_on)
    return replace(report, findings=findings, verdict=verdict)


def coverage_of(report: Report, code: str) -> tuple[str, ...]:
    """The options that extended a run and affect a check. A thorough run includes the full context.

    What stands in the way of a use that rests on another one is found only where it is required.
    """
    arguments, check = report.arguments, find_check(code)
    thorough = bool(arguments.get("thorough"))
    whole = thorough or "full-context" in arguments.get("require", ())
    targets = arguments.get("target", ()) if check is not None and "targets" in check.rounds else ()
    extended = {"thorough": thorough, "full-context": whole}
    extended |= {use: use in arguments.get("require", ()) for use in RESTS_ON}
    return (*(word for word, so in extended.items() if so), *(f"target {target}" for target in targets))


def _would_find(report: Report, path: str, entry: BaselineEntry) -> bool:
    """Whether the run would have found the finding of an entry, if the model still had it."""
    if is_open(report.findings, report.not_checked) or _is_file_in(path, entry.model):
        return False
    if not set(entry.found_with) <= set(coverage_of(report, entry.code)):
        return False
    check = find_check(entry.code)
    if check is None:
        return True  # the check was removed from kvdoctor, so the finding cannot come back
    unchecked = (one.code.rstrip("*") for one in report.not_checked if "-" not in one.code)
    if not report.selection.takes(check.code, check.name) or any(map(check.code.startswith, unchecked)):
        return False
    if "targets" in check.rounds:
        return bool(report.targets)
    return bool(report.runs) or bool({"file", "contract"} & set(check.rounds))


@record
class BaselineRequest:
    """A change to a baseline. `reason` adds the findings that count, `until` a date; `prune` removes stale entries."""

    reason: str | None = None
    until: str | None = None
    prune: bool = False


@record
class BaselineUpdate:
    """The new entries of a baseline.

    Attributes:
        entries: the entries to write.
        changes: a line for each change.
        left: a line for each finding that still counts, and each entry that is still stale.
        open: the models that could not be checked completely.
    """

    entries: tuple[BaselineEntry, ...]
    changes: tuple[str, ...]
    left: tuple[str, ...]
    open: tuple[str, ...]


def update_baseline(baseline: Baseline, found: MatchedReports, request: BaselineRequest) -> BaselineUpdate:
    """Update a baseline after a gate. Reasons and dates of known findings do not change."""
    entries = {(entry.model, entry.fingerprint): entry for entry in baseline.entries}
    changes, left = [], []
    for new, headline in _findings_that_count(baseline, found):
        if request.reason is None:
            left.append(f"counts: {new.model}: {headline}")
            continue
        same = [entry for entry in found.used if entry.fingerprint == new.fingerprint]
        replaced = [entry for entry in same if belongs_to(entry, new.model)]
        for entry in replaced:
            entries.pop((entry.model, entry.fingerprint), None)
        entries[new.model, new.fingerprint] = replace(new, reason=request.reason, until=request.until)
        changes.append(f"{'renewed' if replaced else 'added'}: {new.model}: {headline}")
    current = {*found.used, *found.status.stale}
    gone = [e for e in baseline.entries if e not in current and not os.path.lexists(baseline.folder / e.model)]
    for entry in (*found.status.stale, *gone):
        line = f"{entry.label}: {'not found any more' if entry in found.status.stale else 'the model is gone'}"
        if request.prune:
            del entries[entry.model, entry.fingerprint]
            changes.append(f"removed: {line}")
        else:
            left.append(f"stale: {line}")
    open_reports = (one for one in found.reports if is_open(one.findings, one.not_checked) and one.allowance is None)
    incomplete = tuple(report.model.path for report in open_reports)
    return BaselineUpdate(sort_entries(entries.values()), tuple(changes), tuple(left), incomplete)


def _findings_that_count(baseline: Baseline, found: MatchedReports) -> list[tuple[BaselineEntry, str]]:
    """The findings that count, as entries without a reason, each with its headline."""
    entries = []
    for report in found.reports:
        lowest: FailOn = "error" if report.fail_on == "never" else report.fail_on
        for one in (one for one in report.findings if counts(one, lowest) and not means_incomplete(one.code)):
            model = model_path(report, baseline.folder)
            known = (model, one.code, one.where, "", None, one.fingerprint, coverage_of(report, one.code))
            entries.append((BaselineEntry(*known), format_headline(one)))
    return entries
