"""Changes to one body of a decoder: a graph, or a branch of a merged one.

A value is replaced by what is made of it: all who read it then read the new one. Nodes are put in order at the end, so
that a change may be written down in any order.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

Make = Callable[[str], str]
FLOAT, FLOAT16 = TensorProto.FLOAT, TensorProto.FLOAT16
HIDE = -1e9


@dataclass
class Opened:
    """One body, and the model that it is a part of. It takes the first step, the later ones, or all of them."""

    model: onnx.ModelProto
    graph: onnx.GraphProto
    steps: Literal["first", "later", "all"]
    count: list[int] = field(default_factory=lambda: [0])

    @property
    def inputs(self) -> tuple[str, ...]:
        """All that the body may read from outside; a branch reads the inputs of the graph around it."""
        return tuple(value.name for value in self.model.graph.input)

    @property
    def pasts(self) -> tuple[str, ...]:
        return tuple(name for name in self.inputs if "past" in name)

    @property
    def presents(self) -> tuple[str, ...]:
        """The outputs of the cache; a body that takes the first step has those of the encoder too."""
        return tuple(v.name for v in self.graph.output if "present" in v.name or "past" in v.name)

    def self_slots(self) -> tuple[tuple[str, str], ...]:
        """(past, present) of the cache of the tokens, key and value of each layer in turn."""
        return tuple((past, now) for past, now in self._paired() if not is_cross(past))

    def cross_slots(self) -> tuple[tuple[str, str], ...]:
        return tuple((past, now) for past, now in self._paired() if is_cross(past))

    def _paired(self) -> Iterator[tuple[str, str]]:
        """Layer by layer, the key before the value."""
        for past in sorted(
            self.pasts, key=lambda name: (int(re.findall(r"[0-9]+", name)[0]), "value" in name.split(".")[-1])
        ):
            now = past.replace("input.past", "output.past").replace("past_key_values", "present")
            now = now.replace("output.present", "output.past_key_values")
            if now in self.presents:
                yield past, now

    @cached_property
    def weights(self) -> dict[str, onnx.TensorProto]:
        return {w.name: w for w in (*self.model.graph.initializer, *self.graph.initializer)}

    def producer(self, value: str) -> onnx.NodeProto | None:
        return next((node for node in self.graph.node if value in node.output), None)

    def readers(self, value: str) -> list[onnx.NodeProto]:
        return [node for node in self.graph.node if value in node.input]

    def of_type(self, *kinds: str) -> list[onnx.NodeProto]:
        return [node for node in ordered(self.graph) if node.op_type in kinds]

    def name(self, hint: str) -> str:
        self.count[0] += 1
        return f"made_{hint}_{self.count[0]}"

    def op(self, kind: str, *operands: Any, outputs: int = 1, domain: str = "", **attributes: Any) -> str:
        """Add a node and give its first output; an operand that is no name becomes a constant."""
        names = [value if isinstance(value, str) else self.constant(value) for value in operands]
        made = [self.name(kind) for _ in range(outputs)]
        node = helper.make_node(kind, names, made, name=made[0], domain=domain, **attributes)
        self.graph.node.append(node)
        return made[0]

    def constant(self, value: Any) -> str:
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        self.graph.initializer.append(numpy_helper.from_array(array, self.name("constant")))
        return self.graph.initializer[-1].name

    def replace(self, value: str, make: Make) -> None:
        """All who read a value, and the output of that name, get what is made of it."""
        node = self.producer(value)
        if node is None:
            self.replace_inside(value, make)
            return
        old = self.name("old")
        node.output[list(node.output).index(value)] = old
        self.graph.node.append(helper.make_node("Identity", [make(old)], [value], name=self.name("back")))

    def replace_inside(self, value: str, make: Make) -> None:
        """All nodes who read a value get what is made of it; the output of that name stays."""
        readers = self.readers(value)
        made = make(value)
        for node in readers:
            for index, name in enumerate(node.input):
                if name == value:
                    node.input[index] = made

    def replace_output(self, value: str, make: Make) -> None:
        """The output of a name becomes what is made of it; the nodes who read the value keep it."""
        node, inner = self.producer(value), self.name("inner")
        assert node is not None, value
        readers = self.readers(value)
        node.output[list(node.output).index(value)] = inner
        for reader in readers:
            for index, name in enumerate(reader.input):
                if name == value:
                    reader.input[index] = inner
        self.graph.node.append(helper.make_node("Identity", [make(inner)], [value], name=self.name("back")))

    def size(self, value: str, axis: int) -> str:
        """The length of an axis, int64[1]."""
        return self.op("Gather", self.op("Shape", value), np.array([axis]))

    def past_length(self) -> str:
        """Tokens in the past, int64[1]: its third axis in all layouts here."""
        return self.size(self.self_pasts()[0], 2)

    def self_pasts(self) -> tuple[str, ...]:
        return tuple(past for past in self.pasts if not is_cross(past))

    def new_length(self) -> str:
        return self.size(self.token_ids, 1)

    def with_past_shape(self, value: str, axis: int, size: int) -> str:
        """The value, float[batch, new, hidden], through a Reshape that takes one size of an axis only."""
        known = np.array([0, 0, 0])
        known[axis] = size
        if self.steps == "later":
            return self.op("Reshape", value, known)
        return self.op("Reshape", value, self.op("Where", self.has_past(), known, np.zeros(3, np.int64)))

    @property
    def token_ids(self) -> str:
        return next(name for name in self.inputs if name.endswith("input_ids"))

    def count_up(self, length: str) -> str:
        """0, 1, ... below a length, int64[length]."""
        return self.op("Range", np.array(0), self.op("Squeeze", length, np.array([0])), np.array(1))

    def has_past(self) -> str:
        """Whether there is a past, bool[1]."""
        return self.op("Greater", self.past_length(), np.array([0]))

    def with_past(self, value: str, other: str) -> str:
        """The other value once there is a past; in a body that always has one, always."""
        return other if self.steps == "later" else self.op("Where", self.has_past(), other, value)


def is_cross(name: str) -> bool:
    return "encoder." in name.replace("decoder.", "") or "cross" in name


def ordered(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes, each behind those that it reads."""
    made_by = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    order: list[int] = []
    seen: set[int] = set()
    for first in range(len(graph.node)):
        stack = [(first, False)]
        while stack:
            index, done = stack.pop()
            if done:
                order.append(index)
            elif index not in seen:
                seen.add(index)
                stack.append((index, True))
                stack += [(made_by[name], False) for name in reversed(_read(graph.node[index])) if name in made_by]
    return [graph.node[index] for index in order]


def _read(node: onnx.NodeProto) -> list[str]:
    """What a node and its inner graphs read."""
    inner: Iterable[str] = (
        name
        for attribute in node.attribute
        if attribute.type == onnx.AttributeProto.GRAPH
        for each in attribute.g.node
        for name in _read(each)
    )
    return [*node.input, *inner]


def put_in_order(graph: onnx.GraphProto) -> None:
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in ordered(graph)]
    del graph.node[:]
    graph.node.extend(nodes)
