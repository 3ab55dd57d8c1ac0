"""The walk of an abstract run through a graph, with branches whose condition is known."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from kvdoctor.analysis.abstract_run.arithmetic import COMPUTING
from kvdoctor.analysis.abstract_run.attention import ATTENTIONS
from kvdoctor.analysis.abstract_run.reading import Reading
from kvdoctor.analysis.abstract_run.shaping import SHAPING
from kvdoctor.analysis.abstract_run.values import UNKNOWN, Abstract, CannotRun, TooMuchWork, exactly, read_tensor
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto
from kvdoctor.model.traverse import STANDARD, constant_tensor

CONTRIB = "com.microsoft"
RULES = {**SHAPING, **COMPUTING, **ATTENTIONS}
ANY_NUMPY = (ValueError, IndexError, TypeError, ZeroDivisionError, OverflowError, AttributeError, MemoryError)
"""What numpy raises on numbers that a graph should not have: the value is unknown then."""


@dataclass
class Budget:
    """How many nodes may still be computed."""

    left: int

    def spend(self) -> None:
        """Count one node.

        Raises:
            TooMuchWork: there is nothing left.
        """
        self.left -= 1
        if self.left < 0:
            raise TooMuchWork


@dataclass(eq=False)
class AbstractGraph:
    """A model for abstract runs; `names` are those of the weights that every graph of the stack has."""

    model: ModelProto
    names: frozenset[str]
    budget: Budget
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    constants: dict[int, dict[str, Abstract]] = field(default_factory=dict)
    attributes: dict[int, Reading] = field(default_factory=dict)
    keep: list[GraphProto | NodeProto] = field(default_factory=list)

    def run(self, feeds: Mapping[str, Abstract]) -> dict[str, Abstract]:
        """The outputs for some feeds.

        Raises:
            CannotRun: two sizes cannot agree.
            TooMuchWork: the budget is used up.
        """
        with np.errstate(all="ignore"):
            values = self._compute(self.model.graph, dict(feeds))
        return {value.name: values.get(value.name, UNKNOWN) for value in self.model.graph.output}

    def _compute(self, graph: GraphProto, values: dict[str, Abstract]) -> dict[str, Abstract]:
        for name, value in self._constants_of(graph).items():
            values.setdefault(name, value)
        for node in graph.node:
            self.budget.spend()
            for name, value in zip(node.output, self._node(node, values), strict=False):
                if name:
                    values[name] = value
        return values

    def _constants_of(self, graph: GraphProto) -> dict[str, Abstract]:
        if id(graph) not in self.constants:
            self.keep.append(graph)
            self.constants[id(graph)] = {
                tensor.name: read_tensor(tensor, self._key(tensor.name, tensor.data_type, tensor.dims))
                for tensor in graph.initializer
            }
        return self.constants[id(graph)]

    def _key(self, name: str, kind: int, dims: Iterable[int]) -> str:
        """The name of a weight, or what stands for it where the other graphs of the stack have no such name."""
        return name if name in self.names else f"{kind} {sorted(dims)}"

    def _node(self, node: NodeProto, values: dict[str, Abstract]) -> list[Abstract]:
        kind, count = node.op_type, len(node.output)
        if kind == "If" and node.domain in STANDARD:
            return self._branch(node, values)
        reading = self._read(node)
        if kind == "Constant":
            return [self._constant(node, reading)]
        rule = RULES.get(kind) if node.domain in STANDARD or node.domain == CONTRIB else None
        if rule is None:
            return [UNKNOWN] * count
        reading.inputs = [values.get(name, UNKNOWN) if name else None for name in node.input]
        try:
            found = rule(reading)
        except CannotRun as reason:
            raise CannotRun(reason.words, node.name or next(iter(node.output), ""), kind) from None
        except ANY_NUMPY:
            found = UNKNOWN
        if isinstance(found, Abstract):
            return [found] + [UNKNOWN] * (count - 1)
        return [*found, *[UNKNOWN] * (count - len(found))]

    def _read(self, node: NodeProto) -> Reading:
        """The node with its attributes, which are read once."""
        reading = self.attributes.get(id(node))
        if reading is None:
            self.keep.append(node)
            reading = Reading(node, [], self.random, {one.name: one for one in node.attribute})
            self.attributes[id(node)] = reading
        return reading

    def _constant(self, node: NodeProto, reading: Reading) -> Abstract:
        known = self.constants.setdefault(id(node), {})
        if not known:
            tensor = constant_tensor(node)
            if tensor is not None:
                known[""] = read_tensor(tensor, self._key(node.output[0], tensor.data_type, tensor.dims))
            elif reading.has_attribute("value_int"):
                known[""] = exactly(np.array(reading.number("value_int", 0), np.int64))
            elif reading.has_attribute("value_ints"):
                known[""] = exactly(np.array(reading.listed("value_ints"), np.int64))
            elif reading.has_attribute("value_float"):
                known[""] = exactly(np.array(reading.real("value_float", 0), np.float32))
            else:
                known[""] = UNKNOWN
        return known[""]

    def _branch(self, node: NodeProto, values: dict[str, Abstract]) -> list[Abstract]:
        condition = values.get(node.input[0], UNKNOWN).numbers if node.input else None
        if condition is None or condition.size != 1:
            return [UNKNOWN] * len(node.output)
        wanted = "then_branch" if bool(condition.all()) else "else_branch"
        body = next((one.g for one in node.attribute if one.name == wanted), None)
        if body is None:
            return [UNKNOWN] * len(node.output)
        inner = self._compute(body, dict(values))
        return [inner.get(value.name, UNKNOWN) for value in body.output]
