"""The baseline of a gate: a file with known findings, each with a reason and, optionally, an expiry date.

The file is JSON, `kvdoctor/baseline/1`, sorted, with one value per line, so that changes can be reviewed. An entry
matches a finding by its fingerprint, which depends on the fault and its location in the graph, not on file names or the
order of findings. Two models of one exporter may have the same fault, so an entry also identifies its model, by the
path relative to the folder of the baseline: a model that was exported or trained again at the same path is the same
model with the same known fault. An entry is stale if its finding is gone; a model that was not diagnosed, or a check
that was not requested, makes no entry stale.
"""

import datetime as dt
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from kvdoctor.choices import RESTS_ON, Day, FailOn, WrongValue
from kvdoctor.decode.side_files import read_side_file
from kvdoctor.errors import UsageError
from kvdoctor.findings import KnownFinding, find_check, means_incomplete
from kvdoctor.gating.stored_reports import ReadOnDemand
from kvdoctor.options import BaselineChoices
from kvdoctor.records import from_plain, record, to_plain
from kvdoctor.report.document import Report, counts, decide, is_open
from kvdoctor.report.wording.finding import format_headline

SCHEMA = "kvdoctor/baseline/1"
DEFAULT_NAME = "kvdoctor-baseline.json"
MAX_BYTES = 1 << 26


@record
class BaselineEntry:
    """A known finding of a model.

    Attributes:
        model: the path of the model, relative to the folder of the baseline.
        code: the code of the check; for the reader.
        where: the location in the graph as reported; for the reader.
        reason: why the finding is accepted.
        until: the last day on which it is known, as in 2026-12-31; null for no expiry.
        fingerprint: the fingerprint of the finding.
        found_with: options that extended the run which found it; a run without them may not find it.
    """

    model: str
    code: str
    where: str
    reason: str
    until: str | None
    fingerprint: str
    found_with: tuple[str, ...] = ()

    def is_expired(self, today: dt.date) -> bool:
        """Whether its last day has passed."""
        return self.until is not None and dt.date.fromisoformat(self.until) < today

    @property
    def label(self) -> str:
        """The name of the entry in messages."""
        return f"{self.code} of {self.model}"


@record
class Baseline:
    """The known findings of a file, sorted by model. No two entries are for the same finding of a model."""

    file: str
    entries: tuple[BaselineEntry, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder that the model paths are relative to."""
        return Path(self.file).absolute().parent


def sort_entries(entries: Iterable[BaselineEntry]) -> tuple[BaselineEntry, ...]:
    """The entries in the order of the file."""
    return tuple(sorted(entries, key=lambda entry: (entry.model, entry.code, entry.fingerprint)))


def render_baseline(entries: Iterable[BaselineEntry]) -> str:
    """The content of the file: one value per line; ASCII, so that names cannot contain control sequences."""
    body = {"schema": SCHEMA, "entries": to_plain(sort_entries(entries))}
    return json.dumps(body, indent=2, ensure_ascii=True) + "\n"


def read_baseline(file: str) -> Baseline:
    """Read a baseline.

    Raises:
        UsageError: it cannot be read, has another schema, or has an invalid entry, which the message names.
    """
    try:
        body = _parse(Path(file))
    except OSError as error:
        why = f"{error.strerror or error}; `kvdoctor baseline` writes one"
        raise UsageError(f"the baseline {file} cannot be read: {why}") from None
    except RecursionError:
        raise UsageError(f"the baseline {file} cannot be read: it is nested too deeply") from None
    except ValueError as error:
        reason = f"it is not JSON, {error}" if isinstance(error, json.JSONDecodeError) else str(error)
        why = f"{reason}; correct it, or restore it from version control"
        raise UsageError(f"the baseline {file} cannot be read: {why}") from None
    schema = body.get("schema") if isinstance(body, dict) else None
    if schema != SCHEMA:
        newer = isinstance(schema, str) and schema.startswith(SCHEMA.rpartition("/")[0])
        hint = f"this one reads {SCHEMA!r}; upgrade kvdoctor, or write a new baseline" if newer else f"not {SCHEMA!r}"
        raise UsageError(f"{file} is not a baseline for this version of kvdoctor: its schema is {schema!r}, {hint}")
    unknown = sorted(set(body) - {"schema", "entries"})
    if unknown:
        raise UsageError(f"the baseline {file} has an unknown key {unknown[0]!r}; its keys are schema and entries")
    try:
        entries = from_plain(tuple[BaselineEntry, ...], body.get("entries"))
    except ValueError as error:
        place = f"entries{str(error).removeprefix('tuple')}"
        raise UsageError(f"the baseline {file} has an invalid entry for {SCHEMA}: {place}; correct it") from None
    _refuse_invalid(file, entries)
    return Baseline(file, entries)


def today() -> dt.date:
    """The date by which entries expire: that of UTC, the same everywhere."""
    return dt.datetime.now(dt.timezone.utc).date()


def _parse(file: Path) -> Any:
    text = read_side_file(file, MAX_BYTES).decode("utf-8-sig")
    return json.loads(text, object_pairs_hook=_refuse_duplicates, parse_constant=_refuse_constant)


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object without duplicate keys: of two reasons, one would be lost without notice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} occurs twice in one object")
        found[key] = value
    return found


def _refuse_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a number")


def _refuse_invalid(file: str, entries: tuple[BaselineEntry, ...]) -> None:
    """Refuse an entry that would hide something: without a reason, a valid check or date, or a duplicate."""
    seen = set()
    for number, entry in enumerate(entries, 1):
        name = f"the baseline {file}, entry {number} ({entry.label})"
        check = find_check(entry.code)
        if check is None:
            raise UsageError(f"{name}: there is no check {entry.code!r}; `kvdoctor explain` lists all of them")
        if not entry.reason.strip():
            raise UsageError(f"{name} has no reason; say why the finding is accepted")
        try:
            Day().read("2026-12-31" if entry.until is None else entry.until)
        except WrongValue:
            raise UsageError(f"{name}: until takes a date, as in 2026-12-31, or null; got {entry.until!r}") from None
        if check.incomplete:
            why = "says that the model could not be diagnosed, which cannot be a known finding; remove the entry"
            raise UsageError(f"{name}: {check.name} {why}")
        if (entry.model, entry.fingerprint) in seen:
            raise UsageError(f"{name} occurs twice; remove one of the two")
        seen.add((entry.model, entry.fingerprint))


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


def update_baseline(baseline: Baseline, found: MatchedReports, choices: BaselineChoices) -> BaselineUpdate:
    """Update a baseline after a gate. Reasons and dates of known findings do not change."""
    entries = {(entry.model, entry.fingerprint): entry for entry in baseline.entries}
    changes, left = [], []
    for new, headline in _findings_that_count(baseline, found):
        if choices.reason is None:
            left.append(f"counts: {new.model}: {headline}")
            continue
        same = [entry for entry in found.used if entry.fingerprint == new.fingerprint]
        replaced = [entry for entry in same if belongs_to(entry, new.model)]
        for entry in replaced:
            entries.pop((entry.model, entry.fingerprint), None)
        entries[new.model, new.fingerprint] = replace(new, reason=choices.reason, until=choices.until)
        changes.append(f"{'renewed' if replaced else 'added'}: {new.model}: {headline}")
    current = {*found.used, *found.status.stale}
    gone = [e for e in baseline.entries if e not in current and not os.path.lexists(baseline.folder / e.model)]
    for entry in (*found.status.stale, *gone):
        line = f"{entry.label}: {'not found any more' if entry in found.status.stale else 'the model is gone'}"
        if choices.prune:
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
