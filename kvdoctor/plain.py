"""Frozen dataclasses to plain JSON values and back, by their type hints.

Standard library only: the worker uses it in environments that hold nothing but onnxruntime and numpy, which is why
it is not one of the libraries that do the same (msgspec, pydantic, cattrs).
"""

import dataclasses
import functools
import marshal
import types
import typing
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

EXACT = (str, int, bool)
"""Types whose values are taken as they are, where their type is this very one."""
MOST_SHARED = 10_000


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


def from_plain(kind: type[T], data: Any) -> T:
    """Rebuild a value of the annotated type `kind` from plain JSON values.

    Raises:
        ValueError: a field is missing, unknown, or of the wrong type; the message names its place.
    """
    try:
        return typing.cast("T", _reviver(typing.cast("Any", kind))(data))
    except _Unfit:
        # What was found on the quick way is looked for again, to name its place.
        return typing.cast("T", _revive(kind, data, kind.__name__))


class _Unfit(Exception):
    """Plain values are not what the type says."""


@functools.cache
def _reviver(kind: Any) -> Callable[[Any], Any]:
    """A function that rebuilds values of a type and raises _Unfit: the same rules as `_revive`, resolved once."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda data: data
    if origin in (typing.Union, types.UnionType):
        return _union_reviver(tuple(choice for choice in arguments if choice is not type(None)), arguments)
    if origin is typing.Literal:
        return _checked(lambda data: data in arguments)
    if origin is tuple:
        return _container(list, arguments[0], tuple, lambda data: data)
    if origin is dict:
        return _container(dict, arguments[1], dict, lambda data: data.values())
    if dataclasses.is_dataclass(kind):
        return _dataclass_reviver(kind)
    if kind is float:
        return _number
    return _checked(lambda data: type(data) is kind)


def _number(data: Any) -> float:
    if type(data) is float:
        return data
    if isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    raise _Unfit


def _checked(holds: Callable[[Any], bool]) -> Callable[[Any], Any]:
    def revive(data: Any) -> Any:
        if not holds(data):
            raise _Unfit
        return data

    return revive


def _container(
    kind: type, item: Any, rebuild: Callable[[Any], Any], items: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    """Of a list or an object; `rebuild` makes it of one whose items need not be looked at one by one."""
    plain, way = {item} if item in EXACT else None, _reviver(item)

    def revive(data: Any) -> Any:
        fits: bool = isinstance(data, kind)
        if not fits:
            raise _Unfit
        held = items(data)
        if plain is not None and plain.issuperset(map(type, held)):
            return rebuild(data)
        revived = map(way, held)
        return tuple(revived) if kind is list else dict(zip(data, revived, strict=True))

    return revive


def _union_reviver(choices: tuple[Any, ...], arguments: tuple[Any, ...]) -> Callable[[Any], Any]:
    ways, optional = [_reviver(choice) for choice in choices], type(None) in arguments

    def revive(data: Any) -> Any:
        if data is None and optional:
            return None
        for way in ways:
            try:
                return way(data)
            except _Unfit:
                continue
        raise _Unfit

    return revive


def _dataclass_reviver(kind: Any) -> Callable[[Any], Any]:
    # Resolved with the first value: a type may hold values of its own type.
    fields: dict[str, tuple[Any, Callable[[Any], Any]]] = {}
    same: dict[bytes, Any] = {}
    shared = _may_be_shared(kind)

    def revive(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _Unfit
        if not fields:
            fields.update((name, (hint, _reviver(hint))) for name, hint in _hints(kind).items())
        given = {}
        try:
            # The quickest exact identity that Python has; version 2 writes equal values alike.
            identity = marshal.dumps(data, 2) if shared else b""
            if shared and identity in same:
                return same[identity]
            for name, value in data.items():
                hint, way = fields[name]
                given[name] = value if type(value) is hint else way(value)
            if not shared:
                return kind(**given)
            if len(same) >= MOST_SHARED:
                same.clear()
            same[identity] = value = kind(**given)
            return value  # noqa: TRY300 - what follows is for what is no such value
        except (KeyError, TypeError, ValueError):
            raise _Unfit from None

    return revive


def _may_be_shared(kind: Any) -> bool:
    """Whether equal values of a dataclass may be one: it is frozen, and so is all that it holds, down to the bit.

    A report holds thousands of shapes, and few that differ.
    """
    frozen = kind.__dataclass_params__.frozen
    return frozen and all(hint in (str, int, bool) or hint == tuple[int, ...] for hint in _hints(kind).values())


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
