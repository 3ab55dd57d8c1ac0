"""The baseline of a gate: findings that a team knows of and lives with, each with its reason, perhaps until a day.

The file is JSON, `kvdoctor/baseline/1`, in one order, with a line for each value, so that its changes can be reviewed.
A finding is known again by its fingerprint, which rests on what is wrong and where in the graph, not on names of files
or the order of findings. Two models of one exporter may well have the same fault, so an entry says whose it is:

- `model` is its path, relative to the folder of the baseline. It decides for as long as it fits: what was rewritten,
  re-exported or trained anew at its old place is the same model with the same known fault.
- `shape` is a digest of what its files take and give, without any name of a file. It decides only where the path is
  gone: a model that was moved or renamed is known again by it, and a second model never hides behind the entry of the
  first, which is still there.
"""

import datetime as dt
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdoctor.errors import UsageError
from kvdoctor.findings import find_check
from kvdoctor.plain import from_plain, to_plain

SCHEMA = "kvdoctor/baseline/1"
USUAL_NAME = "kvdoctor-baseline.json"
MOST_BYTES = 1 << 26
DAY = re.compile(r"\d{4}-\d{2}-\d{2}")


@dataclass(frozen=True, slots=True)
class Entry:
    """A known finding of a model. `until` is the last day on which it is known, as in 2026-12-31; null for no end.

    `code` is its check's, `where` the place in the graph as it was told; both are for the reader. `found_with` is
    what of the run that it was found in goes further than others: one that does not go so far may not show it.
    """

    model: str
    code: str
    where: str
    reason: str
    until: str | None
    fingerprint: str
    shape: str
    found_with: tuple[str, ...] = ()

    def is_over(self, today: dt.date) -> bool:
        """Whether its last day has passed."""
        return self.until is not None and dt.date.fromisoformat(self.until) < today

    @property
    def words(self) -> str:
        """The entry as it is named in a line."""
        return f"{self.code} of {self.model}"


@dataclass(frozen=True, slots=True)
class Baseline:
    """The known findings of a file, in the order of their models; `entries` name no finding of a model twice."""

    file: str
    entries: tuple[Entry, ...] = ()

    @property
    def folder(self) -> Path:
        """The folder that the paths of the entries are relative to."""
        return Path(self.file).absolute().parent


def in_order(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Entries in the order of the file, whatever order they were found in."""
    return tuple(sorted(entries, key=lambda entry: (entry.model, entry.code, entry.fingerprint)))


def document(entries: Iterable[Entry]) -> str:
    """The file: a line for each value; ASCII, so that no name in it can do harm where it is shown."""
    body = {"schema": SCHEMA, "entries": to_plain(in_order(entries))}
    return json.dumps(body, indent=2, ensure_ascii=True) + "\n"


def read_baseline(file: str) -> Baseline:
    """Read a baseline.

    Raises:
        UsageError: it cannot be read, is of another schema, or an entry is none; the message names it.
    """
    try:
        body = _parsed(Path(file))
    except OSError as error:
        raise UsageError(
            f"the baseline {file} cannot be read: {error.strerror or error}; `kvdoctor baseline` writes one"
        ) from None
    except RecursionError:
        raise UsageError(f"the baseline {file} cannot be read: it is nested too deeply") from None
    except ValueError as error:
        said = f"it is no JSON, {error}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UsageError(
            f"the baseline {file} cannot be read: {said}; mend it there, or take an earlier one from version control"
        ) from None
    schema = body.get("schema") if isinstance(body, dict) else None
    if schema != SCHEMA:
        raise UsageError(f"{file} is no baseline that this version of kvdoctor reads: {_of_another_schema(schema)}")
    more = sorted(set(body) - {"schema", "entries"})
    if more:
        raise UsageError(f"the baseline {file} has a key that is unknown: {more[0]!r}; it takes schema and entries")
    try:
        entries = from_plain(tuple[Entry, ...], body.get("entries"))
    except ValueError as error:
        said = str(error).removeprefix("tuple")
        raise UsageError(f"the baseline {file} holds no entries of {SCHEMA}: entries{said}; mend it there") from None
    _refuse_unfit(file, entries)
    return Baseline(file, entries)


def is_day(text: str) -> bool:
    """Whether a text is a day, as in 2026-12-31."""
    try:
        return DAY.fullmatch(text) is not None and bool(dt.date.fromisoformat(text))
    except ValueError:
        return False


def today() -> dt.date:
    """The day by which entries end, the same all over the world: that of UTC."""
    return dt.datetime.now(dt.timezone.utc).date()


def _parsed(file: Path) -> Any:
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"it is larger than {MOST_BYTES >> 20} MiB")
    text = file.read_text(encoding="utf-8-sig")
    return json.loads(text, object_pairs_hook=_once, parse_constant=_no_number)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object that names no key twice: of two reasons, one would be lost in silence."""
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise ValueError(f"the key {key!r} stands twice in one object")
        made[key] = value
    return made


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number")


def _of_another_schema(schema: Any) -> str:
    if isinstance(schema, str) and schema.startswith(SCHEMA.rpartition("/")[0]):
        return f"its schema is {schema!r}, this one reads {SCHEMA!r}; upgrade kvdoctor, or write the baseline anew"
    return f"its schema is {schema!r}, not {SCHEMA!r}"


def _refuse_unfit(file: str, entries: tuple[Entry, ...]) -> None:
    """Refuse what would hide something: an entry without a reason, of no check, for no day, or twice."""
    seen = set()
    for number, entry in enumerate(entries, 1):
        place = f"the baseline {file}, entry {number} ({entry.words})"
        check = find_check(entry.code)
        if check is None:
            raise UsageError(f"{place}: there is no check {entry.code!r}; `kvdoctor explain` lists all of them")
        if not entry.reason.strip():
            raise UsageError(f"{place} has no reason; say why the finding may stay")
        if entry.until is not None and not is_day(entry.until):
            raise UsageError(f"{place}: until takes a day, as in 2026-12-31, or null; got {entry.until!r}")
        if check.incomplete:
            raise UsageError(
                f"{place}: {check.name} says that the model could not be diagnosed; that can be no known finding, "
                "take the entry out"
            )
        if (entry.model, entry.fingerprint) in seen:
            raise UsageError(f"{place} stands twice; take one of the two out")
        seen.add((entry.model, entry.fingerprint))
