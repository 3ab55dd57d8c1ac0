"""One node of an abstract run with the values of its inputs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np

from kvdoctor.analysis.abstract_run.values import UNKNOWN, Abstract, CannotRun, NotKnown, read_tensor
from kvdoctor.model.node_sizes import NodeSizes, Sizes, find_unequal, shape_from
from kvdoctor.model.operator_axes import axes_of, read_equation
from kvdoctor.model.operators import operator_of
from kvdoctor.model.proto import AttributeProto, NodeProto
from kvdoctor.model.traverse import find_attribute

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

    def tensor(self, name: str) -> Abstract | None:
        """An attribute that is a tensor."""
        return read_tensor(self.attributes[name].t, "") if name in self.attributes else None

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
