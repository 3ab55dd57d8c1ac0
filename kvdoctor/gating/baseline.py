"""The baseline of a gate: a file with known findings, each with a reason and, optionally, an expiry date.

The file is JSON, `kvdoctor/baseline/1`, sorted, with one value per line, so that changes can be reviewed. An entry
matches a finding by its fingerprint, which depends on the fault and its location in the graph, not on file names or the
order of findings. Two models of one exporter may have the same fault, so an entry also identifies its model, by the
path relative to the folder of the baseline: a model that was exported or trained again at the same path is the same
model with the same known fault.
"""

import datetime as dt
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvdoctor.choices import Day, WrongValue
from kvdoctor.decode.side_files import read_side_file
from kvdoctor.errors import UsageError
from kvdoctor.findings import find_check
from kvdoctor.records import from_plain, record, to_plain

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
