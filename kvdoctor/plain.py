"""Frozen dataclasses to plain JSON values and back, by their type hints.

Standard library only: the worker uses it in environments that hold nothing but onnxruntime and numpy, which is why
it is not one of the libraries that do the same (msgspec, pydantic, cattrs).
"""

import dataclasses
import functools
import types
import typing
from typing import Any, TypeVar

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Turn dataclasses, tuples and mappings into what `json.dumps` takes. Fields keep their order."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: to_plain(getattr(value, name)) for name in _hints(type(value))}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value


def from_plain(kind: type[T], data: Any, *, newer: bool = False) -> T:
    """Rebuild a value of the annotated type `kind` from plain JSON values.

    Where it may be `newer`, fields that are not known are passed over: those that later versions add.

    Raises:
        ValueError: a field is missing, unknown, or of the wrong type; the message names its place.
    """
    return typing.cast("T", _revive(kind, _pruned(kind, data) if newer else data, kind.__name__))


def _pruned(kind: Any, data: Any) -> Any:
    """The data without the fields of objects that their dataclass does not have."""
    arguments = typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(data, dict):
        hints = _hints(typing.cast("type", kind))
        return {name: _pruned(hints[name], item) for name, item in data.items() if name in hints}
    if isinstance(data, list) and arguments:
        return [_pruned(arguments[0], item) for item in data]
    if isinstance(data, dict) and typing.get_origin(kind) is dict:
        return {name: _pruned(arguments[1], item) for name, item in data.items()}
    known = [choice for choice in arguments if dataclasses.is_dataclass(choice)]
    return _pruned(known[0], data) if len(known) == 1 else data


def _revive(kind: Any, data: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return data
    if origin in (typing.Union, types.UnionType):
        return _revive_union(arguments, data, place)
    if origin is typing.Literal:
        return _expect(data in arguments, data, place, " or ".join(map(repr, arguments)))
    if origin is tuple:
        _expect(isinstance(data, list), data, place, "a list")
        return tuple(_revive(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(data))
    if origin is dict:
        _expect(isinstance(data, dict), data, place, "an object")
        return {key: _revive(arguments[1], item, f"{place}.{key}") for key, item in data.items()}
    if dataclasses.is_dataclass(kind):
        return _revive_dataclass(kind, data, place)
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    return _expect(type(data) is kind, data, place, kind.__name__)


def _revive_dataclass(kind: Any, data: Any, place: str) -> Any:
    _expect(isinstance(data, dict), data, place, "an object")
    hints = _hints(kind)
    unknown = sorted(set(data) - set(hints))
    if unknown:
        raise ValueError(f"{place}: unknown field {unknown[0]!r}; known are {', '.join(hints)}")
    given = {name: _revive(hints[name], data[name], f"{place}.{name}") for name in hints if name in data}
    try:
        return kind(**given)
    except TypeError:
        lacking = [f.name for f in dataclasses.fields(kind) if f.name not in given and _has_no_default(f)]
        raise ValueError(f"{place}: field {', '.join(lacking)} is missing") from None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, in their order: asked of it once, a report holds thousands of them."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _has_no_default(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _revive_union(choices: tuple[Any, ...], data: Any, place: str) -> Any:
    if data is None and type(None) in choices:
        return None
    failure: ValueError | None = None
    for choice in choices:
        if choice is type(None):
            continue
        try:
            return _revive(choice, data, place)
        except ValueError as error:
            failure = failure or error
    raise failure or ValueError(f"{place}: {data!r} does not fit")


def _expect(holds: bool, data: Any, place: str, wanted: str) -> Any:
    if not holds:
        raise ValueError(f"{place}: expected {wanted}, got {data!r}"[:300])
    return data
