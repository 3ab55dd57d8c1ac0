"""One node of an abstract run with the values of its inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdoctor.analysis.abstract_run.values import UNKNOWN, Abstract, read_tensor
from kvdoctor.model.proto import AttributeProto, NodeProto

IRRELEVANT = 64
"""Numbers of an integer list that are read, at most; longer lists shape nothing."""


@dataclass(eq=False, slots=True)
class Reading:
    """A node, the values of its inputs, and the random numbers of the run.

    `returned` says that the graph returns the result, moved at most: what a step joins, a later one may take apart.
    `kind`, `names` and `outputs` are the operator, its inputs and its outputs. `read` has the integers of inputs with
    the values that they were read from, `parsed` those of attributes: constants are read once for all runs.
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

    def __post_init__(self) -> None:
        """Take out of the protobuf what every run asks for."""
        self.attributes = {one.name: one for one in self.node.attribute}
        self.kind, self.names, self.outputs = self.node.op_type, tuple(self.node.input), tuple(self.node.output)

    def at(self, index: int) -> Abstract:
        """The value of an input; unknown where there is none."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found if found is not None else UNKNOWN

    def has(self, index: int) -> bool:
        """Whether there is such an input."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def has_attribute(self, name: str) -> bool:
        """Whether there is such an attribute."""
        return name in self.attributes

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
        """An attribute as an integer, and behind it as a list of integers."""
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

    def axes(self, index: int) -> Sequence[int] | None:
        """The axes of an input or attribute."""
        return self.ints(index, "axes") if self.has(index) or self.has_attribute("axes") else None
