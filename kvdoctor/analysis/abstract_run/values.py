"""Values of an abstract run: true shapes, with numbers in which feature axes are collapsed; a node with its inputs."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any, TypeVar
from zlib import crc32

import numpy as np

from kvdoctor.decode.calls import NUMPY_TYPES, Array
from kvdoctor.model.node_sizes import NodeSizes, Sizes, find_unequal, shape_from
from kvdoctor.model.operator_axes import axes_of, read_equation
from kvdoctor.model.operators import operator_of
from kvdoctor.model.proto import AttributeProto, NodeProto, TensorProto
from kvdoctor.model.traverse import find_attribute
from kvdoctor.model.view import ELEMENT_TYPES

MOST_ELEMENTS = 1 << 20
"""Numbers of one value that are computed; a larger value is unknown."""

ROUNDING, RELATIVE_ROUNDING = 1e-12, 1e-9
"""Numbers that differ by less are equal."""

LARGE = 1e4
"""A constant beyond it is part of a mask, not a weight."""


class CannotRun(Exception):
    """Two sizes cannot agree, or an index is beyond an axis: at these lengths no runtime can run the graph."""

    def __init__(self, words: str, node: str = "", op: str = "") -> None:
        super().__init__(words)
        self.words, self.node, self.op = words, node, op

    def __str__(self) -> str:
        """The reason with its node."""
        return f'{self.op} "{self.node}": {self.words}' if self.op else self.words


class NotKnown(Exception):
    """What an operator needs is not known. Of its outputs at most the given shapes are, the first one's first."""

    def __init__(self, *shapes: Sequence[int] | None) -> None:
        super().__init__()
        self.outputs = [unknown(shape) for shape in shapes]


class TooMuchWork(Exception):
    """The budget of a run is used up."""


@dataclass(eq=False, slots=True)
class Abstract:
    """A value.

    Attributes:
        shape: The true sizes; None where even those are unknown.
        data: Numbers with an axis for each axis of `shape`, of the true size or 1: along that axis they are broadcast.
            None where they are unknown.
        exact: The numbers are those that a runtime would compute.
        key: The name of a weight, whose rows can be distinguished.
    """

    shape: tuple[int, ...] | None
    data: Array | None = None
    exact: bool = False
    key: str = ""

    def array(self) -> Array:
        """The numbers in the true shape.

        Raises:
            ValueError: they are unknown, or too many.
        """
        if self.shape is None or self.data is None or size_of(self.shape) > MOST_ELEMENTS:
            raise ValueError("the value is unknown, or too large")
        return np.broadcast_to(self.data, self.shape)

    @property
    def numbers(self) -> Array | None:
        """The exact numbers in the true shape, if they are known."""
        data, shape = self.data, self.shape
        if not self.exact or data is None or shape is None or size_of(shape) > MOST_ELEMENTS:
            return None
        return data if data.shape == shape else np.broadcast_to(data, shape)


UNKNOWN = Abstract(None)

IS_EXACT = attrgetter("exact")


def size_of(shape: Iterable[int]) -> int:
    """The number of elements."""
    return math.prod(shape)


def exactly(array: Any) -> Abstract:
    """An exact value."""
    found = np.asarray(array)
    return Abstract(found.shape, found, exact=True)


T = TypeVar("T")


def known(found: T | None, *shapes: Sequence[int] | None) -> T:
    """What was found of an input.

    Raises:
        NotKnown: it is None; then the outputs have `shapes`.
    """
    if found is None:
        raise NotKnown(*shapes)
    return found


def unknown(shape: Sequence[int] | None) -> Abstract:
    """A value of which at most the shape is known."""
    return Abstract(None if shape is None else tuple(shape))


Parts = Mapping[int, tuple[int, ...]]
"""By axis, where the parts begin that values were joined of, without the first: of key and value of 8, (8,)."""


def collapse(array: Array, keep: Sequence[bool], parts: Parts | None = None) -> Abstract:
    """A fed array with the axes that do not count lengths collapsed to their first element, or to that of each part."""
    place = tuple(
        slice(None) if kept or size <= 1 or at in (parts or {}) else slice(0, 1)
        for at, (kept, size) in enumerate(zip(keep, array.shape, strict=True))
    )
    data = np.asarray(array[place], np.float64)
    for axis, begins in (parts or {}).items():
        firsts = np.searchsorted(begins, np.arange(data.shape[axis]), side="right")
        data = np.take(data, np.array((0, *begins))[firsts], axis=axis)
    return Abstract(array.shape, data)


def find_parts(data: Array, axes: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Where numbers change along some axes: the parts of values that were joined there."""
    found = {}
    for axis in axes if data.size else ():
        moved = np.moveaxis(data, axis, 0).reshape(data.shape[axis], -1)
        begins = np.flatnonzero((moved[1:] != moved[:-1]).any(axis=1)) + 1
        if begins.size:
            found[axis] = tuple(map(int, begins))
    return found


def find_alike(value: Abstract, axes: Iterable[int]) -> tuple[int, ...]:
    """The axes, of those given, that a value is broadcast along: it has one number there, and more elements."""
    data, shape = value.data, value.shape
    return () if data is None or shape is None else tuple(at for at in axes if data.shape[at] == 1 < shape[at])


def fold_axis(data: Array, axis: int) -> Array:
    """Numbers with an axis collapsed again where all along it are equal, as those of a part that was cut out."""
    first = data[(slice(None),) * axis + (slice(0, 1),)]
    if data.shape[axis] <= 1:
        return data
    close = (first == data).all() or np.allclose(first, data, rtol=RELATIVE_ROUNDING, atol=ROUNDING, equal_nan=True)
    return first if close else data


@lru_cache(4096)
def number_for(key: str) -> float:
    """A number between 0.5 and 1.5, or its negative, that stands for a weight."""
    seed = crc32(key.encode())
    return (0.5 + (seed >> 1) % 999983 / 999983) * (1 if seed & 1 else -1)


def numbers_for(key: str, at: Array) -> Array:
    """Numbers between -1.5 and 1.5 that stand for the rows of a weight."""
    spread = np.sin((at.astype(np.float64) + 1) * 12.9898 + number_for(key) * 78.233) * 43758.5453
    found: Array = 3 * (spread - np.floor(spread)) - 1.5
    return found


def as_weight(value: Abstract) -> Abstract:
    """A weight that is stored in integers is one number like any other."""
    if value.data is None and value.key and value.shape is not None:
        return Abstract(value.shape, np.full((1,) * len(value.shape), number_for(value.key)), key=value.key)
    return value


def read_tensor(tensor: TensorProto, key: str) -> Abstract:
    """The value of a constant: exact where it holds numbers of the graph, one number where it is a weight."""
    shape = tuple(int(size) for size in tensor.dims)
    array = _payload(tensor, shape)
    floating = tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16)
    if array is not None and array.size > 1 and bool((array == array.ravel()[0]).all()):
        array = array.reshape(-1)[:1].reshape((1,) * len(shape))
        return Abstract(shape, array, exact=True, key=key)
    if array is not None and (not floating or _is_plain(array)):
        return Abstract(shape, array, exact=True, key=key)
    if not floating:
        return Abstract(shape, None, key=key)
    return Abstract(shape, np.full((1,) * len(shape), number_for(key)), key=key)


def _is_plain(array: Array) -> bool:
    """Whether a constant of floats is a number or a mask, and no weight."""
    if array.size <= 1 or max(array.shape, default=1) <= 1:
        return True
    finite = np.abs(array[np.isfinite(array)])
    if finite.size < array.size or (finite.size and finite.max() >= LARGE):
        return True
    return bool(np.isin(array, (0, 1)).all())


def _payload(tensor: TensorProto, shape: tuple[int, ...]) -> Array | None:
    """The numbers of a tensor that the skeleton has; None where they were left out."""
    kind = NUMPY_TYPES.get(ELEMENT_TYPES.get(tensor.data_type, ""))
    if kind is None:
        return None
    count = size_of(shape)
    if count == 0:
        return np.zeros(shape, kind)
    try:
        if tensor.raw_data:
            flat = np.frombuffer(tensor.raw_data, np.dtype(kind).newbyteorder("<"))
        elif kind == "float16":
            flat = np.array(tensor.int32_data, np.uint16).view(np.float16)
        else:
            flat = np.array(tensor.float_data or tensor.int64_data or tensor.int32_data or tensor.double_data, kind)
        return flat.astype(kind).reshape(shape) if flat.size == count else None
    except (ValueError, OverflowError):
        return None


IRRELEVANT = 64
"""Numbers of an integer list that are read, at most; longer lists shape nothing."""

PLANS = 4096
"""Cached answers about shapes alone: the layers of a decoder ask the same."""

ANY_NUMPY = (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError, AttributeError, MemoryError)
"""What numpy raises on numbers that a graph should not have: the value is unknown then."""

Shape = tuple[int, ...]
Rule = Callable[["Reading"], Abstract | list[Abstract]]


@dataclass(eq=False, slots=True)
class Reading:
    """A node, the values of its inputs, and the random numbers of the run.

    `returned` says that the graph returns the result, moved at most: what a step joins, a later one may take apart.
    `kind`, `names` and `outputs` are the operator, its inputs and its outputs. `read` has the integers of inputs with
    the values that they were read from, `parsed` those of attributes: constants are read once for all runs. `frame` is
    the node without the names of its values, `listing` has the inputs that give a shape, axes or bounds.
    """

    node: NodeProto
    inputs: list[Abstract | None]
    random: np.random.Generator
    returned: bool = False
    attributes: dict[str, AttributeProto] = field(init=False)
    kind: str = field(init=False)
    names: tuple[str, ...] = field(init=False)
    outputs: tuple[str, ...] = field(init=False)
    read: dict[int, tuple[Abstract, tuple[int, ...]]] = field(default_factory=dict)
    parsed: dict[str, tuple[int, ...]] = field(default_factory=dict)
    frame: bytes = b""
    listing: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Take out of the protobuf what every run asks for."""
        self.attributes = {one.name: one for one in self.node.attribute}
        self.kind, self.names, self.outputs = self.node.op_type, tuple(self.node.input), tuple(self.node.output)

    def compute(self, rule: Rule) -> list[Abstract]:
        """The outputs, of as many as are known.

        Raises:
            CannotRun: two sizes cannot agree.
        """
        try:
            found = rule(self)
        except NotKnown as reason:
            return reason.outputs
        except ANY_NUMPY:
            return []
        return [found] if isinstance(found, Abstract) else found

    def at(self, index: int) -> Abstract:
        """The value of an input; unknown where there is none."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found if found is not None else UNKNOWN

    def has(self, index: int) -> bool:
        """Whether there is such an input."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def all(self) -> list[Abstract]:
        """The values of all inputs."""
        return [value if value is not None else UNKNOWN for value in self.inputs]

    def number(self, name: str, otherwise: int) -> int:
        """An attribute that is an integer."""
        return self._parse(name)[0] if name in self.attributes else otherwise

    def real(self, name: str, otherwise: float) -> float:
        """An attribute that is a float."""
        return float(self.attributes[name].f) if name in self.attributes else otherwise

    def text(self, name: str, otherwise: str) -> str:
        """An attribute that is a text."""
        return self.attributes[name].s.decode("utf-8", "replace") if name in self.attributes else otherwise

    def listed(self, name: str) -> tuple[int, ...] | None:
        """An attribute that is a list of integers."""
        return self._parse(name)[1:] if name in self.attributes else None

    def _parse(self, name: str) -> tuple[int, ...]:
        """An attribute as an integer, and as a list of integers."""
        found = self.parsed.get(name)
        if found is None:
            attribute = self.attributes[name]
            found = self.parsed[name] = (int(attribute.i), *map(int, attribute.ints))
        return found

    def ints(self, index: int, attribute: str = "") -> Sequence[int] | None:
        """The exact integers of an input, or of the attribute that older operators have in its place."""
        if attribute and attribute in self.attributes:
            return self.listed(attribute)
        value = self.at(index)
        known = self.read.get(index)
        if known is not None and known[0] is value:
            return known[1]
        found = value.numbers
        if found is None or found.ndim > 1 or found.size > IRRELEVANT:
            return None
        made = tuple(map(int, found.ravel().tolist()))
        self.read[index] = value, made
        return made

    def plan(self) -> list[tuple[Sizes, Shape]] | None:
        """Where the sizes of each output come from, and what they are; None where one is not known.

        Raises:
            CannotRun: two sizes cannot agree.
        """
        if not self.frame:
            inputs, outputs = ["x" if name else "" for name in self.names], ["y"] * len(self.outputs)
            plain = NodeProto(op_type=self.kind, attribute=self.node.attribute, input=inputs, output=outputs)
            self.frame = plain.SerializeToString()
            entry = operator_of(self.kind)
            self.listing = tuple(index for index in (*entry.shapes, *entry.bounds) if index < len(inputs))
        shapes = tuple([value.shape if value is not None else None for value in self.inputs])
        return _plan(self.frame, shapes, tuple([(index, self.ints(index)) for index in self.listing]))


@lru_cache(PLANS)
def _plan(
    frame: bytes, shapes: tuple[Shape | None, ...], listed: tuple[tuple[int, Sequence[int] | None], ...]
) -> list[tuple[Sizes, Shape]] | None:
    node = NodeProto.FromString(frame)
    numbers, attribute = dict(listed), partial(find_attribute, node)
    known = NodeSizes(node.op_type, node.input, len(node.output), attribute, dict(enumerate(shapes)).get, numbers.get)
    found = []
    for sizes in axes_of(known) or ():
        shape = tuple(size for size in shape_from(known, sizes) if size is not None)
        if len(shape) < len(sizes):
            return None
        found.append((sizes, shape))
    unequal = find_unequal(known, ())
    if unequal is not None:
        (at, one), (_, other) = unequal[1]
        equation = known.attribute("equation")
        terms, _ = read_equation(equation)
        what = (
            f"{terms[at.input][at.at]} of {equation.s.decode()}" if equation is not None else f"an axis of {known.op}"
        )
        raise CannotRun(f"{what} is {one} and {other}")
    return found or None
