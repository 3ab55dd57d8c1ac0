"""Finds and reads the policy of a project: `[tool.kvdoctor]` of pyproject.toml, or kvdoctor.toml.

The nearest file is taken, from the working folder upwards as far as the repository goes; of two in one folder
kvdoctor.toml. Outside a repository only the working folder is looked into: what lies above may be anybody's. The folder
of a model is data, and is never looked into for its own sake.
"""

import difflib
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from kvdoctor.errors import UsageError
from kvdoctor.policy.holding import Override, Policy
from kvdoctor.policy.keys import BY_NAME, OVERRIDES
from kvdoctor.policy.lines import line_of
from kvdoctor.policy.patterns import leads_out

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OWN, SHARED, TABLE = "kvdoctor.toml", "pyproject.toml", "tool.kvdoctor"
REPOSITORIES = (".git", ".hg", ".svn", ".jj")
MOST_BYTES = 1 << 20
OTHER_WORDS = {"target": "targets", "model": "models", "override": OVERRIDES, "tolerance": "tolerances"}


def find_policy(start: Path | None = None) -> Policy:
    """The policy of the project that a folder lies in, the working folder if none is given; an empty one without any.

    Raises:
        UsageError: the file cannot be read, or says what no policy can.
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
    """The policy of a file; None where it is a pyproject.toml that has none. `shown` is what to call it.

    Raises:
        UsageError: the file cannot be read, or says what no policy can.
    """
    file = file or Path(shown)
    text = _text(shown, file)
    try:
        document = tomllib.loads(text)
    except RecursionError:
        raise UsageError(f"{shown} cannot be read: it is nested too deeply") from None
    except tomllib.TOMLDecodeError as error:
        if file.name == SHARED and "kvdoctor" not in text:
            return None  # broken, and not for us
        raise UsageError(f"{shown} is no TOML: {error}") from None
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
    """The folder and those above it, up to the root of its repository; without a repository the folder alone."""
    folders = (here, *here.parents)
    root = next((n for n, folder in enumerate(folders) if any((folder / name).exists() for name in REPOSITORIES)), 0)
    return iter(folders[: root + 1])


def _as_seen_from(file: Path, here: Path) -> str:
    return Path(os.path.relpath(file, here)).as_posix()


def _text(shown: str, file: Path) -> str:
    try:
        status = file.stat()
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{shown} is no regular file; give another with --config, or --no-config")
        if status.st_size > MOST_BYTES:
            raise UsageError(f"{shown} is larger than {MOST_BYTES >> 20} MiB, which no policy is")
        return file.read_text(encoding="utf-8-sig")
    except (OSError, RuntimeError) as error:  # a loop of links is one or the other
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{shown} cannot be read: {reason}; give another with --config, or --no-config") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{shown} is no UTF-8 text (byte {error.start})") from None


class _Reader:
    """One file under reading: it knows its text, so that what is refused has a line."""

    def __init__(self, shown: str, text: str, table: str) -> None:
        self.shown, self.text, self.table = shown, text, table

    def policy(self, file: Path, document: dict[str, Any]) -> Policy:
        overrides = document.pop(OVERRIDES, [])
        if not isinstance(overrides, list) or not all(isinstance(one, dict) for one in overrides):
            self.refuse(OVERRIDES, f"{OVERRIDES} takes tables, as in [[overrides]]")
        self.check(document, 0)
        made = tuple(self.override(number, one) for number, one in enumerate(overrides, 1))
        return Policy(self.shown, file.absolute().parent, self.table, document, made)

    def override(self, number: int, table: dict[str, Any]) -> Override:
        self.check(table, number)
        models = table.pop("models", [])
        if not models:
            raise UsageError(
                f"{self.place('', number)}: it does not say for which models it is, as in models = ['exports/t5*']"
            )
        return Override(number, tuple(models), table)

    def check(self, table: Mapping[str, Any], number: int) -> None:
        for name, value in table.items():
            key = BY_NAME.get(name)
            if key is None:
                self.refuse(name, f"there is no key {name!r}; {_nearest(name, number)}", number)
            if number and not key.by_model and name != "models":
                self.refuse(name, f"{name} is said once for all models, above the overrides", number)
            reason = key.refuse(value)
            if reason is not None:
                self.refuse(name, f"{name}: {reason}" if reason else f"{name} takes {key.takes}; got {value!r}", number)
        for pattern in table.get("models", ()):
            if leads_out(pattern):
                self.refuse("models", f"models: {pattern!r} leads out of the folder of the policy", number)

    def refuse(self, key: str, words: str, number: int = 0) -> NoReturn:
        raise UsageError(f"{self.place(key, number)}: {words}")

    def place(self, key: str, number: int) -> str:
        table = ".".join(filter(None, (self.table, OVERRIDES if number else "")))
        line = line_of(self.text, table, key, number)
        where = f"{self.shown}:{line}" if line is not None else self.shown
        return f"{where}, override {number}" if number else where


def _nearest(name: str, number: int) -> str:
    known = [key.name for key in BY_NAME.values() if key.by_model or key.name == "models" or not number]
    known += [] if number else [OVERRIDES]
    close = difflib.get_close_matches(name.replace("_", "-"), known, 1)
    word = OTHER_WORDS.get(name, close[0] if close else "")
    return f"did you mean {word!r}?" if word in known else f"it takes {', '.join(known)}"
