"""The project's policy: its requirements for its models, written once in a file instead of at each call.

It is `[tool.kvdoctor]` of pyproject.toml, or kvdoctor.toml; its keys are those of `kvdoctor.options`. The nearest file
is used, from the working folder up to the root of the repository; in one folder kvdoctor.toml comes first. Outside a
repository only the working folder is searched: the folders above may belong to others. The folder of a model is data,
and is not searched.

Patterns match paths below the folder of the policy. `*`, `?` and `[...]` match within one part of a path, `**` matches
any number of folders. Names that begin with a dot are matched by patterns that have the dot. `**` does not follow links
to folders, so that it meets no loop of links.
"""

import functools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import field
from fnmatch import fnmatch
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NoReturn

from kvdoctor.choices import WrongValue
from kvdoctor.decode.side_files import read_side_file
from kvdoctor.errors import UsageError, did_you_mean
from kvdoctor.options import Options, options_of, policy_options, read_options
from kvdoctor.records import record

MAGIC = frozenset("*?[")
DEEP = "**"


def parts_of(pattern: str) -> tuple[str, ...]:
    """Return the parts of a pattern or a path; none of them is `.` or empty."""
    return tuple(part for part in PurePosixPath(pattern).parts if part != ".")


def fits(path: str, pattern: str) -> bool:
    """Return whether a pattern matches a path, or a folder that contains the path."""
    parts, wanted = parts_of(path), _once(parts_of(pattern))
    return any(_match(parts[:stop], wanted) for stop in range(len(parts) + 1))


def models_at(folder: Path, pattern: str) -> list[str]:
    """Return the models below a folder that a pattern matches, in order: folders, and files that are named `.onnx`.

    A pattern that ends in `**` matches every folder at any depth that holds an `.onnx` file itself.

    Raises:
        OSError: a folder cannot be read.
    """
    wanted = _once(parts_of(pattern))
    found = sorted({path.as_posix() for path in _expanded(folder, PurePosixPath(), wanted, set())})
    if wanted and wanted[-1] == DEEP:
        return [path for path in found if any(name.endswith(".onnx") for name in _names(folder / path))]
    named = not _has_magic(wanted[-1:])
    return [path for path in found if named or (folder / path).is_dir() or Path(path).suffix == ".onnx"]


def _once(wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Return the pattern with one `**` in place of several in a row."""
    return tuple(part for at, part in enumerate(wanted) if part != DEEP or wanted[at - 1 : at] != (DEEP,))


@functools.cache
def _match(parts: tuple[str, ...], wanted: tuple[str, ...]) -> bool:
    if not wanted:
        return not parts
    if wanted[0] == DEEP:
        return _match(parts, wanted[1:]) or (bool(parts) and _match(parts[1:], wanted))
    return bool(parts) and fnmatch(parts[0], wanted[0]) and _match(parts[1:], wanted[1:])


def _expanded(
    folder: Path, path: PurePosixPath, wanted: tuple[str, ...], seen: set[tuple[PurePosixPath, int]]
) -> Iterator[PurePosixPath]:
    """Yield the paths that match; no folder is searched twice for the same rest of a pattern."""
    if (path, len(wanted)) in seen:
        return
    seen.add((path, len(wanted)))
    if not wanted:
        yield path
    elif wanted[0] == DEEP:
        yield from _expanded(folder, path, wanted[1:], seen)
        for name in _names(folder / path):
            below = folder / path / name
            if not name.startswith(".") and below.is_dir() and not below.is_symlink():
                yield from _expanded(folder, path / name, wanted, seen)
    elif not _has_magic(wanted[:1]):
        if os.path.lexists(folder / path / wanted[0]):
            yield from _expanded(folder, path / wanted[0], wanted[1:], seen)
    else:
        for name in _names(folder / path):
            if fnmatch(name, wanted[0]) and (not name.startswith(".") or wanted[0].startswith(".")):
                yield from _expanded(folder, path / name, wanted[1:], seen)


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def _has_magic(parts: tuple[str, ...]) -> bool:
    return any(MAGIC & set(part) for part in parts)


DEFAULT, SAID = "default", "command line"
FILES = ("baseline", "against")
"""Keys that name a file: relative to the folder of the policy."""


@record
class Override:
    """Values for the models that match one of some patterns. `number` counts the overrides of a file from 1."""

    number: int
    models: tuple[str, ...]
    values: Mapping[str, Any]

    def fits(self, model: str) -> bool:
        """Return whether it applies to a path, relative to the policy's folder."""
        return any(fits(model, pattern) for pattern in self.models)


@record
class EffectiveValue:
    """The value of a key, and where it comes from."""

    value: Any
    origin: str


@record
class Policy:
    """The requirements of a project for its models. `file` is the name to show, None for a policy without a file.

    Patterns and paths are relative to `folder`. `table` is the TOML table, for a file that other tools share.
    """

    file: str | None = None
    folder: Path = field(default_factory=Path)
    table: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()

    @property
    def place(self) -> str:
        """The file, and its table if other tools share it."""
        return f"{self.file} [{self.table}]" if self.table else f"{self.file}"

    def effective(self, model: str | None, said: Mapping[str, Any]) -> dict[str, EffectiveValue]:
        """Return the value of each key for a model, and where it comes from; None is a model that no override fits.

        The command line comes first, then the last override that fits, the policy, and the defaults. `said` holds the
        values of the command line by key.
        """
        found = {}
        for option in policy_options():
            default = option.default if option.default is None else option.kind.to_plain(option.default)
            found[option.key] = EffectiveValue(default, DEFAULT)
        return found | self._own_values(model) | {name: EffectiveValue(value, SAID) for name, value in said.items()}

    def complete(self, model: str | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return keyword arguments for a model: those given, completed by the policy. None counts as not given."""
        values = {name.replace("-", "_"): value.value for name, value in self._own_values(model).items()}
        for key in FILES:
            if key in values:
                values[key] = _relative_to_cwd(self.folder / values[key])
        return values | {name: value for name, value in given.items() if value is not None} | {"policy": self.file}

    def read_options(self, command: str, model: str | None, given: Mapping[str, Any]) -> Options:
        """Read the options of a model: those given, else the policy's that the command takes.

        Raises:
            UsageError: an option does not take a value.
        """
        known = {option.keyword for option in options_of(command)}
        values = {k: v for k, v in self.complete(model, given).items() if k in known}
        return read_options(Options, values, command)

    def _own_values(self, model: str | None) -> dict[str, EffectiveValue]:
        found = {name: EffectiveValue(value, self.place) for name, value in self.values.items()}
        inside = None if model is None else self.relative(model)
        for override in self.overrides:
            if inside is not None and override.fits(inside):
                origin = f"{self.place}, override {override.number}"
                found |= {name: EffectiveValue(value, origin) for name, value in override.values.items()}
        return found

    def models(self) -> tuple[str, ...]:
        """Return the models that the patterns of `models` match, relative to the working folder, each once.

        Raises:
            UsageError: a pattern matches no model.
        """
        found: dict[str, None] = {}
        for pattern in self.values.get("models", ()):
            matched, why = [], " matches no folder and no .onnx file"
            try:
                matched = models_at(self.folder, pattern)
            except OSError as error:
                why = f": {error.strerror or error}"
            if not matched:
                raise UsageError(f"{self.file}: models: {pattern!r}{why}")
            found |= dict.fromkeys(_relative_to_cwd(self.folder / path) for path in matched)
        return tuple(found)

    def relative(self, model: str) -> str | None:
        """Return a path relative to the policy's folder, as patterns match it; None if it lies outside."""
        given = os.path.abspath(model)  # noqa: PTH100 - links keep the names that people know
        followed = os.path.realpath(model), Path(os.path.realpath(self.folder))
        for path in (_relative(given, self.folder), _relative(*followed)):
            if path is not None and path != ".." and not path.startswith("../"):
                return path
        return None

    def unfitting(self, models: tuple[str, ...]) -> Iterator[Override]:
        """Yield the overrides that match none of the models."""
        inside = [path for model in models if (path := self.relative(model)) is not None]
        yield from (one for one in self.overrides if not any(map(one.fits, inside)))


def _relative_to_cwd(path: Path) -> str:
    return _relative(str(path), Path.cwd()) or path.as_posix()


def _relative(path: str, folder: Path) -> str | None:
    try:
        return PurePath(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # another drive of Windows
        return None


OWN, SHARED, TABLE = "kvdoctor.toml", "pyproject.toml", "tool.kvdoctor"
REPOSITORIES = (".git", ".hg", ".svn", ".jj")
MOST_BYTES = 1 << 20
OVERRIDES = "overrides"
OTHER_WORDS = {
    "target": "targets",
    "provider": "providers",
    "model": "models",
    "override": OVERRIDES,
    "tolerance": "tolerances",
}
HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(#.*)?$")
KEY = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*[=.]""")


def find_policy(start: Path | None = None) -> Policy:
    """Find the policy of the project of a folder, by default the working folder; an empty one if there is none.

    Raises:
        UsageError: the file cannot be read, or has a key or a value that no policy has.
    """
    here = (start or Path()).absolute()
    folders = (here, *here.parents)
    root = next((n for n, folder in enumerate(folders) if any((folder / name).exists() for name in REPOSITORIES)), 0)
    for file in (folder / name for folder in folders[: root + 1] for name in (OWN, SHARED)):
        if os.path.lexists(file):
            policy = read_policy(_relative(str(file), here) or file.as_posix(), file)
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
    if file.name == SHARED and not re.search(r"tool\W+kvdoctor|tool\W*[]=]", text):
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


def _text(shown: str, file: Path) -> str:
    try:
        return read_side_file(file, MOST_BYTES).decode("utf-8-sig")
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
                known = [key for key, one in keys.items() if not one.once or key == "models" or not number]
                known += [] if number else [OVERRIDES]
                meant = OTHER_WORDS.get(name)
                hint = did_you_mean(name.replace("_", "-"), known) or f"it takes {', '.join(known)}"
                hint = f"did you mean {meant!r}?" if meant in known else hint
                self.refuse(name, f"there is no key {name!r}; {hint}", number)
            if number and option.once and name != "models":
                self.refuse(name, f"{name} is set once for all models, above the overrides", number)
            try:
                option.kind.check_toml(value)
            except WrongValue as reason:
                self.refuse(name, f"{name}: {reason}", number)
        for pattern in table.get("models", ()):
            absolute = Path(pattern).is_absolute() or PurePosixPath(pattern).is_absolute()
            if absolute or ".." in parts_of(pattern):
                self.refuse("models", f"models: {pattern!r} leaves the folder of the policy", number)

    def refuse(self, key: str, words: str, number: int = 0) -> NoReturn:
        raise UsageError(f"{self.place(key, number)}: {words}")

    def place(self, key: str, number: int) -> str:
        table = ".".join(filter(None, (self.table, OVERRIDES if number else "")))
        line = line_of(self.text, table, key, number)
        where = f"{self.shown}:{line}" if line is not None else self.shown
        return f"{where}, override {number}" if number else where


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
