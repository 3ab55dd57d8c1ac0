"""The values of a policy: which of command line, overrides, policy and defaults applies to a model."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import field
from pathlib import Path, PurePath
from typing import Any

from kvdoctor.errors import UsageError
from kvdoctor.gating.policy.patterns import fits, models_at
from kvdoctor.options import Options, options_of, policy_options, read_options
from kvdoctor.records import record

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
        """Read the options of a model: those given, else the policy's, as far as the command takes them.

        Raises:
            UsageError: an option does not take a value.
        """
        known = {option.keyword for option in options_of(command)}
        return read_options(Options, {k: v for k, v in self.complete(model, given).items() if k in known})

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
            try:
                matched = models_at(self.folder, pattern)
            except OSError as error:
                raise UsageError(f"{self.file}: models: {pattern!r}: {error.strerror or error}") from None
            if not matched:
                raise UsageError(f"{self.file}: models: {pattern!r} matches no folder and no .onnx file")
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
    here = _relative(str(path), Path.cwd())
    return path.as_posix() if here is None else here


def _relative(path: str, folder: Path) -> str | None:
    try:
        return PurePath(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # another drive of Windows
        return None
