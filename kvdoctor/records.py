"""Frozen dataclasses: `@record` defines them quickly, `to_plain` and `from_plain` turn them into JSON values and back.

A command defines 150 to 270 classes before it reads a model, and makes instances of a third of them. `dataclass`
compiles six functions for each (0.41 ms). Records share five of them, those of one form share the code of the
constructor, and a class becomes a dataclass when that is first looked at (0.03 ms before). In all else they are
dataclasses: `replace`, `fields` and `field` of the standard library apply.

Standard library only: the worker uses this module in environments that hold nothing but onnxruntime and numpy, which is
why it is not one of the libraries that do the same (msgspec, by which the gate reads its cache; pydantic, cattrs).
"""

import dataclasses
import functools
import inspect
import pathlib
import types
import typing
from collections.abc import Callable, Sequence
from operator import attrgetter
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Any:
        """Tell type checkers what `record` does; the standard library has it from Python 3.11 on."""
        return lambda function: function


T = TypeVar("T")

PLAIN = frozenset({str, int, float, bool, type(None)})
"""The types of which JSON has values."""
NONE = dataclasses.MISSING
COMPLETING = RLock()


@overload
def record(cls: type[T]) -> type[T]: ...
@overload
def record(*, slots: bool = True, kw_only: bool = False) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field,))
def record(cls: Any = None, *, slots: bool = True, kw_only: bool = False) -> Any:
    """Make a class a frozen dataclass. Two instances are equal if they are of one class and their fields are equal.

    Args:
        cls: The class.
        slots: False for a class with cached properties, which need a `__dict__`.
        kw_only: Whether all fields are given by keyword.
    """
    if cls is None:
        return functools.partial(record, slots=slots, kw_only=kw_only)
    cls.__eq__, cls.__hash__ = _are_equal, lambda one: hash(one.__compared__(one))
    if "__repr__" not in vars(cls):
        cls.__repr__ = _make_text
    cls.__setattr__ = cls.__delattr__ = _refuse_change
    if slots:  # otherwise an instance is restored by its `__dict__`
        cls.__getstate__, cls.__setstate__ = _get_state, _set_state
    made = _with_slots(cls) if slots else cls

    def complete() -> None:
        with COMPLETING:
            if isinstance(vars(made)["__compared__"], _Later):  # no other thread has done it
                _complete(cls, made, kw_only)

    def complete_first(one: Any, *args: Any, **kwargs: Any) -> None:
        complete()
        made.__init__(one, *args, **kwargs)

    for name in ("__dataclass_fields__", "__compared__"):
        setattr(made, name, _Later(name, made, complete))
    made.__init__ = complete_first
    return made


@dataclasses.dataclass(eq=False, repr=False)
class _Later:
    """An attribute of a record that is not a dataclass yet: reading it makes it one."""

    name: str
    made: Any
    complete: Callable[[], None]

    def __get__(self, _one: Any, _kind: Any) -> Any:
        self.complete()
        return getattr(self.made, self.name)


def _with_slots(cls: Any) -> Any:
    """The same class with slots for its fields. The first one still has their defaults."""
    names = inspect.get_annotations(cls)
    inherited = {name for base in cls.__mro__ for name in vars(base).get("__slots__", ())}
    body = {name: value for name, value in vars(cls).items() if name not in {*names, "__dict__", "__weakref__"}}
    body["__slots__"] = tuple(name for name in names if name not in inherited)
    made = type(cls)(cls.__name__, cls.__bases__, body)
    made.__qualname__ = cls.__qualname__
    return made


def _complete(cls: Any, made: Any, kw_only: bool) -> None:
    dataclasses.dataclass(init=False, eq=False, repr=False, kw_only=kw_only)(cls)
    fields: Sequence[Any] = sorted(dataclasses.fields(cls), key=lambda one: bool(one.kw_only))
    for name in ("__dataclass_fields__", "__dataclass_params__", "__match_args__"):
        setattr(made, name, getattr(cls, name))
    made.__init__ = _make_init(made, fields)
    made.__compared__ = attrgetter("__class__", *(one.name for one in dataclasses.fields(cls) if one.compare))


def _make_init(made: Any, fields: Sequence[Any]) -> Any:
    """The constructor of a record: that of its form, with its names."""
    makers = {f"make_{at}": one.default_factory for at, one in enumerate(fields) if one.default_factory is not NONE}
    code = _compile_init(len(made.__match_args__), len(fields), tuple(makers), hasattr(made, "__post_init__"))
    names = {f"_{at}": one.name for at, one in enumerate(fields)}
    variables = tuple(names.get(one, one) for one in code.co_varnames)
    constants = tuple(names.get(one, one) if isinstance(one, str) else one for one in code.co_consts)
    known = {"put": object.__setattr__, "NONE": NONE, **makers}
    init = types.FunctionType(code.replace(co_varnames=variables, co_consts=constants), known)
    optional = [one for at, one in enumerate(fields) if one.default is not NONE or f"make_{at}" in makers]
    init.__defaults__ = tuple(one.default for one in optional if not one.kw_only)
    init.__kwdefaults__ = {one.name: one.default for one in optional if one.kw_only}
    init.__qualname__ = f"{made.__qualname__}.__init__"  # stands in the text of a TypeError
    return init


@functools.cache
def _compile_init(positional: int, count: int, makers: tuple[str, ...], post: bool) -> types.CodeType:
    """The code of constructors of one form: the fields are `_0`, `_1`, ..., some with a maker of their default."""
    names = [f"_{at}" for at in range(count)]
    values = {name: f"make{name}() if {name} is NONE else {name}" for name in names if f"make{name}" in makers}
    parameters = ["self", *names[:positional], *(["*", *names[positional:]] if positional < count else [])]
    body = [*(f"put(self, {name!r}, {values.get(name, name)})" for name in names), *["self.__post_init__()"] * post]
    module = compile(f"def __init__({', '.join(parameters)}): {'; '.join(body or ['pass'])}", "<record>", "exec")
    return next(one for one in module.co_consts if isinstance(one, types.CodeType))


def _refuse_change(one: Any, name: str, _: Any = None) -> None:
    raise dataclasses.FrozenInstanceError(f"{type(one).__name__} cannot be changed: {name!r}")


def _get_state(one: Any) -> list[Any]:
    return [getattr(one, each.name) for each in dataclasses.fields(one)]


def _set_state(one: Any, state: list[Any]) -> None:
    for each, value in zip(dataclasses.fields(one), state, strict=True):
        object.__setattr__(one, each.name, value)


def _are_equal(one: Any, other: Any) -> Any:
    if one.__class__ is not other.__class__:
        return NotImplemented
    return one.__compared__(one) == one.__compared__(other)


def _make_text(one: Any) -> str:
    shown = (f"{each.name}={getattr(one, each.name)!r}" for each in dataclasses.fields(one) if each.repr)
    return f"{type(one).__qualname__}({', '.join(shown)})"


def to_plain(value: Any) -> Any:
    """Turn dataclasses, tuples and mappings into what `json.dumps` takes. Fields keep their order."""
    if value is None or isinstance(value, (str, int, float)):
        return value
    # What is plain already is not asked for by a call: a report on hundreds of slots holds hundreds of thousands.
    if isinstance(value, (list, tuple)):
        return [item if type(item) in PLAIN else to_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: item if type(item) in PLAIN else to_plain(item) for key, item in value.items()}
    names = _field_names(value.__class__)
    if names is None:
        if isinstance(value, Sequence):
            return [to_plain(item) for item in value]
        return str(value) if isinstance(value, pathlib.PurePath) else value
    items = ((name, getattr(value, name)) for name in names)
    return {name: item if type(item) in PLAIN else to_plain(item) for name, item in items}


def from_plain(kind: type[T], data: Any, *, newer: bool = False) -> T:
    """Rebuild a value of the annotated type `kind` from plain JSON values.

    Where it may be `newer`, fields that are not known are passed over: those that later versions add.

    Raises:
        ValueError: a field is missing, unknown, or of the wrong type; the message names its place.
    """
    try:
        return typing.cast("T", _reviver(typing.cast("Any", kind), newer)(data))
    except _Unfit as unfit:
        raise ValueError(f"{kind.__name__}{unfit.place}: {unfit}"[:300]) from None


class _Unfit(Exception):
    """Plain values are not what the type says. `place` leads to the value that is wrong, as in `.slots[0].carry`."""

    place = ""

    def within(self, step: str) -> "_Unfit":
        """The same, seen from one step further out."""
        self.place = step + self.place
        return self


@functools.cache
def _reviver(kind: Any, newer: bool) -> Callable[[Any], Any]:
    """A function that rebuilds values of a type: what the type says is resolved once, a report holds thousands."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return lambda data: data
    if origin in (typing.Union, types.UnionType):
        return _union_reviver(arguments, newer)
    if origin is typing.Literal:
        return _checked(lambda data: data in arguments, " or ".join(map(repr, arguments)))
    if origin is tuple:
        return _list_reviver(arguments[0], newer)
    if origin is dict:
        return _object_reviver(arguments[1], newer)
    if dataclasses.is_dataclass(kind):
        return _dataclass_reviver(kind, newer)
    if kind is pathlib.Path:
        return lambda data: pathlib.Path(_reviver(str, newer)(data))
    exact = _checked(lambda data: type(data) is kind, kind.__name__)
    if kind is float:
        return lambda data: float(data) if type(data) is int else exact(data)
    return exact


def _checked(holds: Callable[[Any], bool], wanted: str) -> Callable[[Any], Any]:
    def revive(data: Any) -> Any:
        if not holds(data):
            raise _mismatch(wanted, data)
        return data

    return revive


def _mismatch(wanted: str, data: Any) -> _Unfit:
    return _Unfit(f"got {repr(data)[:200]}, expected {wanted}")


def _list_reviver(item: Any, newer: bool) -> Callable[[Any], Any]:
    way = _reviver(item, newer)

    def revive(data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list):
            raise _mismatch("a list", data)
        if item in (int, str) and all(type(one) is item for one in data):
            return tuple(data)  # the shape of a tensor: most lists of a report
        made: list[Any] = []
        try:
            for one in data:
                made.append(way(one))  # noqa: PERF401 - how many came tells the place
        except _Unfit as unfit:
            raise unfit.within(f"[{len(made)}]") from None
        return tuple(made)

    return revive


def _object_reviver(item: Any, newer: bool) -> Callable[[Any], Any]:
    way = _reviver(item, newer)

    def revive(data: Any) -> dict[str, Any]:
        if not isinstance(data, dict):
            raise _mismatch("an object", data)
        return {key: _revive_at(key, way, one) for key, one in data.items()}

    return revive


def _union_reviver(choices: tuple[Any, ...], newer: bool) -> Callable[[Any], Any]:
    ways = [_reviver(choice, newer) for choice in choices if choice is not type(None)]
    optional = type(None) in choices

    def revive(data: Any) -> Any:
        if data is None and optional:
            return None
        failure: _Unfit | None = None
        for way in ways:
            try:
                return way(data)
            except _Unfit as unfit:
                failure = failure or unfit
        raise failure or _mismatch("nothing", data)

    return revive


def _dataclass_reviver(kind: Any, newer: bool) -> Callable[[Any], Any]:
    # Resolved with the first value: a type may hold values of its own type.
    fields: dict[str, Callable[[Any], Any]] = {}

    def revive(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _mismatch("an object", data)
        if not fields:
            fields.update((name, _reviver(hint, newer)) for name, hint in _hints(kind).items())
        return _build(kind, _revive_fields(data, fields, newer))

    return revive


def _revive_fields(data: dict[str, Any], fields: dict[str, Callable[[Any], Any]], newer: bool) -> dict[str, Any]:
    given = {}
    for name, value in data.items():
        if name not in fields:
            if newer:
                continue
            raise _Unfit(f"unknown field {name!r}; known are {', '.join(fields)}")
        given[name] = _revive_at(name, fields[name], value)
    return given


def _revive_at(name: str, way: Callable[[Any], Any], value: Any) -> Any:
    try:
        return way(value)
    except _Unfit as unfit:
        raise unfit.within(f".{name}") from None


def _build(kind: Any, given: dict[str, Any]) -> Any:
    try:
        return kind(**given)
    except TypeError as error:
        none, absent = dataclasses.MISSING, [f for f in dataclasses.fields(kind) if f.name not in given]
        lacking = [f.name for f in absent if f.default is none and f.default_factory is none]
        raise _Unfit(f"field {', '.join(lacking)} is missing" if lacking else str(error)) from None


@functools.cache
def _field_names(kind: type) -> tuple[str, ...] | None:
    """The fields of a dataclass in their order; None for another type."""
    return tuple(_hints(kind)) if dataclasses.is_dataclass(kind) else None


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, in their order: asked of it once, a report holds thousands of them."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}
