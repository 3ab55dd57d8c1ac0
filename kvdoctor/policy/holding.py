"""A policy as it is held: values, overrides, and what of them holds for a model."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from kvdoctor.errors import UsageError
from kvdoctor.policy.keys import KEYS
from kvdoctor.policy.patterns import fits, models_at

DEFAULT, SAID = "default", "command line"


@dataclass(frozen=True, slots=True)
class Override:
    """Values for the models that fit one of some patterns. `number` counts the overrides of a file from 1."""

    number: int
    models: tuple[str, ...]
    values: Mapping[str, Any]

    def fits(self, model: str) -> bool:
        """Whether a path, relative to the policy's folder, is meant."""
        return any(fits(model, pattern) for pattern in self.models)


@dataclass(frozen=True, slots=True)
class Value:
    """What holds for a key, and where it comes from."""

    value: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Policy:
    """What a project asks of its models. `file` is what to call it, None where nothing is asked.

    `folder` is the one that its patterns and paths are relative to, `table` that of a file which others share.
    """

    file: str | None = None
    folder: Path = field(default_factory=Path)
    table: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()

    @property
    def place(self) -> str:
        """The file, and its table where others share it."""
        return f"{self.file} [{self.table}]" if self.table else f"{self.file}"

    def effective(self, model: str | None, said: Mapping[str, Any]) -> dict[str, Value]:
        """What holds for a model; None is a model that no override fits.

        The command line comes first, then the last override that fits, the policy, and the defaults.
        """
        found = {key.name: Value(key.default, DEFAULT) for key in KEYS}
        found |= {name: Value(value, self.place) for name, value in self.values.items()}
        inside = None if model is None else self.relative(model)
        for override in self.overrides:
            if inside is not None and override.fits(inside):
                origin = f"{self.place}, override {override.number}"
                found |= {name: Value(value, origin) for name, value in override.values.items()}
        return found | {name: Value(value, SAID) for name, value in said.items()}

    def models(self) -> tuple[str, ...]:
        """The models that the patterns of `models` match, relative to the working folder, each once.

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
            found |= dict.fromkeys(_from_here(self.folder / path) for path in matched)
        return tuple(found)

    def baseline(self) -> str | None:
        """The baseline's file, relative to the working folder."""
        file = self.values.get("baseline")
        return None if file is None else _from_here(self.folder / file)

    def relative(self, model: str) -> str | None:
        """A path as patterns see it, relative to the policy's folder; None where it lies elsewhere."""
        given = os.path.abspath(model)  # noqa: PTH100 - links keep the names that people know
        followed = os.path.realpath(model), Path(os.path.realpath(self.folder))
        for path in (_relative(given, self.folder), _relative(*followed)):
            if path is not None and path != ".." and not path.startswith("../"):
                return path
        return None

    def unfitting(self, models: tuple[str, ...]) -> Iterator[Override]:
        """Overrides that fit none of the models."""
        inside = [path for model in models if (path := self.relative(model)) is not None]
        yield from (one for one in self.overrides if not any(map(one.fits, inside)))


def _from_here(path: Path) -> str:
    here = _relative(str(path), Path.cwd())
    return path.as_posix() if here is None else here


def _relative(path: str, folder: Path) -> str | None:
    try:
        return PurePath(os.path.relpath(path, folder)).as_posix()
    except ValueError:  # another drive of Windows
        return None
