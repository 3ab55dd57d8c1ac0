"""Finds and reads the policy of a project: `[tool.kvdoctor]` of pyproject.toml, or kvdoctor.toml.

The nearest file is used, from the working folder up to the root of the repository; in one folder kvdoctor.toml comes
first. Outside a repository only the working folder is searched: the folders above may belong to others. The folder of a
model is data, and is not searched.
"""

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from kvdoctor.choices import WrongValue
from kvdoctor.errors import UsageError, did_you_mean
from kvdoctor.gating.policy.patterns import leads_out
from kvdoctor.gating.policy.precedence import Override, Policy
from kvdoctor.options import policy_options

OWN, SHARED, TABLE = "kvdoctor.toml", "pyproject.toml", "tool.kvdoctor"
REPOSITORIES = (".git", ".hg", ".svn", ".jj")
MOST_BYTES = 1 << 20
OVERRIDES = "overrides"
OTHER_WORDS = {"target": "targets", "model": "models", "override": OVERRIDES, "tolerance": "tolerances"}
HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
KEY = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*[=.]""")


def find_policy(start: Path | None = None) -> Policy:
    """Find the policy of the project of a folder, by default the working folder; an empty one if there is none.

    Raises:
        UsageError: the file cannot be read, or has a key or a value that no policy has.
    """
    here = (start or Path()).absolute()
    for folder in _upwards(here):
        for name in (OWN, SHARED):
            file = folder / name
            if os.path.lexists(file):
                policy = read_policy(_as_seen_from(file, here), file)
                if policy is not None:
                    return policy
    return Policy()


def read_policy(shown: str, file: Path | None = None) -> Policy | None:
    """Read the policy of a file; None for a pyproject.toml without one. `shown` is the name of the file in messages.

    Raises:
        UsageError: the file cannot be read, or has a key or a value that no policy has.
    """
    file = file or Path(shown)
    text = _text(shown, file)
    if file.name == SHARED and "kvdoctor" not in text:
        return None  # nothing for kvdoctor, broken or not
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{shown} cannot be read: it is nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{shown} is not valid TOML: {error}") from None
    table = ""
    if file.name == SHARED:
        tool = document.get("tool")
        if not isinstance(tool, dict) or "kvdoctor" not in tool:
            return None
        document, table = tool["kvdoctor"], TABLE
        if not isinstance(document, dict):
            raise UsageError(f"{shown}: [{TABLE}] must be a table")
    return _Reader(shown, text, table).policy(file, document)


def _upwards(here: Path) -> Iterator[Path]:
    """Return the folder and those above it, up to the root of its repository; without a repository the folder alone."""
    folders = (here, *here.parents)
    root = next((n for n, folder in enumerate(folders) if any((folder / name).exists() for name in REPOSITORIES)), 0)
    return iter(folders[: root + 1])


def _as_seen_from(file: Path, here: Path) -> str:
    try:
        return Path(os.path.relpath(file, here)).as_posix()
    except ValueError:  # another drive of Windows
        return file.as_posix()


def _text(shown: str, file: Path) -> str:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{shown} is not a regular file; give another with --config, or --no-config")
        if status.st_size > MOST_BYTES:
            raise UsageError(f"{shown} is larger than {MOST_BYTES >> 20} MiB, the limit for a policy")
        return file.read_text(encoding="utf-8-sig")
    except (OSError, RuntimeError) as error:  # a loop of links is one or the other
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{shown} cannot be read: {reason}; give another with --config, or --no-config") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown} is not UTF-8 text (byte {error.start})") from None


class _Reader:
    """The reader of one file; it has the text, so that a refusal can name the line."""

    def __init__(self, shown: str, text: str, table: str) -> None:
        self.shown, self.text, self.table = shown, text, table

    def policy(self, file: Path, document: dict[str, Any]) -> Policy:
        overrides = document.pop(OVERRIDES, [])
        if not isinstance(overrides, list) or not all(isinstance(one, dict) for one in overrides):
            self.refuse(OVERRIDES, f"{OVERRIDES} takes tables, as in [[overrides]]")
        self.check(document, 0)
        overridden = tuple(self.override(number, one) for number, one in enumerate(overrides, 1))
        return Policy(self.shown, file.absolute().parent, self.table, document, overridden)

    def override(self, number: int, table: dict[str, Any]) -> Override:
        self.check(table, number)
        models = table.pop("models", [])
        if not models:
            raise UsageError(f"{self.place('', number)}: it has no models; add them, as in models = ['exports/t5*']")
        return Override(number, tuple(models), table)

    def check(self, table: Mapping[str, Any], number: int) -> None:
        keys = {option.key: option for option in policy_options()}
        for name, value in table.items():
            option = keys.get(name)
            if option is None:
                self.refuse(name, f"there is no key {name!r}; {_nearest(name, number)}", number)
            if number and option.once and name != "models":
                self.refuse(name, f"{name} is set once for all models, above the overrides", number)
            try:
                option.kind.check_toml(value)
            except WrongValue as reason:
                self.refuse(name, f"{name}: {reason}", number)
        for pattern in table.get("models", ()):
            if leads_out(pattern):
                self.refuse("models", f"models: {pattern!r} leaves the folder of the policy", number)

    def refuse(self, key: str, words: str, number: int = 0) -> NoReturn:
        raise UsageError(f"{self.place(key, number)}: {words}")

    def place(self, key: str, number: int) -> str:
        table = ".".join(filter(None, (self.table, OVERRIDES if number else "")))
        line = line_of(self.text, table, key, number)
        where = f"{self.shown}:{line}" if line is not None else self.shown
        return f"{where}, override {number}" if number else where


def _nearest(name: str, number: int) -> str:
    known = [option.key for option in policy_options() if not option.once or option.key == "models" or not number]
    known += [] if number else [OVERRIDES]
    meant = OTHER_WORDS.get(name)
    if meant in known:
        return f"did you mean {meant!r}?"
    return did_you_mean(name.replace("_", "-"), known) or f"it takes {', '.join(known)}"


def line_of(text: str, table: str, key: str, number: int = 0) -> int | None:
    """Return the line of a key of a table, counted from 1, if exactly one line matches: tomllib gives no lines.

    `number` selects one of several tables of that name, counted from 1.
    """
    seen: dict[str, int] = {}
    here, found = "", []
    for place, line in enumerate(text.splitlines(), 1):
        if header := HEADER.match(line):
            here = re.sub(r"[\"'\s]", "", header[2])
            seen[here] = seen.get(here, 0) + 1
            # [tool.kvdoctor.tolerances] is the key `tolerances` of [tool.kvdoctor]
            if here == ".".join(filter(None, (table, key))) and number in (0, seen.get(table, 0)):
                found.append(place)
        elif here == table and number in (0, seen.get(here, 0)):
            named = KEY.match(line)
            found += [place] if named and key in (named[1], named[2], named[3]) else []
    return found[0] if len(found) == 1 else None
