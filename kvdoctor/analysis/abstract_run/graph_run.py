"""The walk of an abstract run through a graph, with branches whose condition is known; and the masks it cannot read.

A table of floats that is added to the scores may be a relative bias, a mask, or both in one: ALiBi with -1e9 for later
tokens. In an abstract run it is uniform, one number everywhere, and hides nothing. A run that finds a token seeing
later ones then says nothing about the model.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod

import numpy as np

from kvdoctor.analysis.abstract_run.arithmetic import COMPUTING
from kvdoctor.analysis.abstract_run.attention import ATTENTIONS
from kvdoctor.analysis.abstract_run.combining import COMBINING
from kvdoctor.analysis.abstract_run.indexing import INDEXING
from kvdoctor.analysis.abstract_run.shaping import SHAPING
from kvdoctor.analysis.abstract_run.values import (
    UNKNOWN,
    Abstract,
    CannotRun,
    Reading,
    Rule,
    TooMuchWork,
    exactly,
    read_tensor,
)
from kvdoctor.analysis.dataflow.walks import Walk
from kvdoctor.decode.calls import Array
from kvdoctor.model.operators import CONTRIB, has, operators_with, ports_of
from kvdoctor.model.proto import GraphProto, NodeProto, TensorProto
from kvdoctor.model.traverse import STANDARD, constant_value, input_of, nodes_in, output_of, producers, subgraphs
from kvdoctor.model.view import GraphView
from kvdoctor.model.weights import list_tensors

RANDOM = operators_with("random")
"""Operators that may return something else in each call."""

MOVING = operators_with("join", "permute", "view", "copy", "cast", "select")
"""Operators that return elements of their inputs as they are, in another place or type."""

RULES: dict[str, Rule] = {**SHAPING, **INDEXING, **COMPUTING, **COMBINING, **ATTENTIONS}
_Settled = tuple[str, bytes, tuple[int, ...]]

SHARED = 1 << 16
"""Elements from which on a constant is large."""

ELEMENTS_OF_A_NODE = 5000
"""Numbers that take as long to compute as the rest of a node."""


@dataclass
class Budget:
    """How many nodes may still be computed; one with many numbers counts as several."""

    left: int

    def spend(self, elements: int = 0) -> None:
        """Count one node, and the numbers that it made.

        Raises:
            TooMuchWork: there is nothing left.
        """
        self.left -= 1 + elements // ELEMENTS_OF_A_NODE
        if self.left < 0:
            raise TooMuchWork


@dataclass(eq=False)
class AbstractGraph:
    """A model for abstract runs; `names` are those of the weights that every graph of the stack has.

    `presents` are the outputs that hold the cache, `returned` the values that reach them, moved at most. `tables` are
    the values that the skeleton of the model does not contain (`tables.read_tables`). `settled` has what was computed
    of large tables alone: layers may have equal ones.
    """

    view: GraphView
    names: frozenset[str]
    budget: Budget
    presents: tuple[str, ...] = ()
    returned: frozenset[str] = field(init=False)
    tables: Mapping[str, Array] = field(default_factory=dict)
    random_used: bool = field(init=False)
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    prepared: "dict[int, _Prepared]" = field(default_factory=dict)
    read: dict[int, Abstract] = field(default_factory=dict)
    settled: "dict[_Settled, tuple[dict[str, Abstract], list[Abstract]]]" = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find out whether equal calls may have different answers."""
        self.returned = frozenset(_find_returned(self.view.model.graph, self.presents))
        self.random_used = any(kind in self.view.operators for kind in RANDOM)

    def run(self, feeds: Mapping[str, Abstract]) -> dict[str, Abstract]:
        """The outputs for some feeds.

        Raises:
            CannotRun: two sizes cannot agree.
            TooMuchWork: the budget is used up.
        """
        values = self.run_all(feeds)
        return {value.name: values.get(value.name, UNKNOWN) for value in self.view.model.graph.output}

    def run_all(self, feeds: Mapping[str, Abstract]) -> dict[str, Abstract]:
        """All values of the main graph for some feeds.

        Raises:
            CannotRun: two sizes cannot agree.
            TooMuchWork: the budget is used up.
        """
        with np.errstate(all="ignore"):
            return self._compute(self.view.model.graph, dict(feeds), {})

    def may_hide(self) -> bool:
        """Whether a mask may stand in a table whose numbers are not known: then a run sees more than the model does."""
        unread = (name for name, tensor in list_tensors(self.view) if not self._read(name, tensor).exact)
        return may_hide(self.view, unread)

    def _compute(
        self, graph: GraphProto, values: dict[str, Abstract], outer: Mapping[str, Abstract]
    ) -> dict[str, Abstract]:
        """All values of a graph, with those of the graphs around it; `outer` are constants among these."""
        prepared = self.prepared.get(id(graph))
        if prepared is None:
            prepared = self.prepared[id(graph)] = self._prepare(graph, outer)
        for name, value in prepared.constants.items():
            values.setdefault(name, value)
        for reading, rule in prepared.nodes:
            if rule is None:
                values.update(zip(reading.outputs, self._branch(reading, values, prepared), strict=False))
            else:
                self._apply(reading, rule, values, values)
        return values

    def _prepare(self, graph: GraphProto, outer: Mapping[str, Abstract]) -> "_Prepared":
        """The nodes that depend on feeds, and the values of all others, which are computed once."""
        known = {tensor.name: self._read(tensor.name, tensor) for tensor in graph.initializer}
        found, fed = _Prepared(graph, known), {value.name for value in graph.input}
        for node in graph.node:
            reading = Reading(node, [], self.random, not self.returned.isdisjoint(node.output))
            if has(reading.kind, "constant"):
                tensor = constant_value(node)
                value = UNKNOWN if tensor is None else self._read(output_of(node), tensor)
                known.update(dict.fromkeys(reading.outputs, value))
                continue
            rule = RULES.get(node.op_type) if node.domain in STANDARD or node.domain == CONTRIB else None
            given = [name for name in reading.names if name]
            settled = all((name in known or name in outer) and name not in fed for name in given)
            if rule is not None and settled and given and reading.kind not in RANDOM:
                here = {name: known.get(name) or outer[name] for name in given}
                self._settle(reading, rule, here, known)
                continue
            found.nodes.append((reading, rule if rule is not None or _is_branch(node) else lambda _: []))
        return found

    def _read(self, name: str, tensor: TensorProto) -> Abstract:
        table = self.tables.get(name)
        if table is None or table.shape != tuple(tensor.dims):
            # Another body of the stack may have another name for a weight that is not of the outermost graph.
            return read_tensor(tensor, name if name in self.names else f"{tensor.data_type} {sorted(tensor.dims)}")
        return self.read.setdefault(id(table), exactly(table))

    def _settle(self, reading: Reading, rule: Rule, here: dict[str, Abstract], into: dict[str, Abstract]) -> None:
        """Compute a node of constants alone; what equal nodes make of the same large table is one value."""
        if all(value.data is None or value.data.size < SHARED for value in here.values()):
            self._apply(reading, rule, here, into)
            return
        attributes = b"".join(one.SerializeToString() for one in reading.node.attribute)
        key = (reading.kind, attributes, tuple(id(here[name]) if name else 0 for name in reading.names))
        if key not in self.settled:
            made: dict[str, Abstract] = {}
            self._apply(reading, rule, here, made)
            self.settled[key] = here, list(made.values())  # the inputs as well: their ids stay theirs
        into.update(zip(reading.outputs, self.settled[key][1], strict=False))

    def _apply(self, reading: Reading, rule: Rule, values: Mapping[str, Abstract], into: dict[str, Abstract]) -> None:
        outputs = reading.outputs
        reading.inputs = [values.get(name, UNKNOWN) if name else None for name in reading.names]
        try:
            found = reading.compute(rule)
        except CannotRun as reason:
            name = reading.node.name or next(iter(outputs), "")
            raise CannotRun(reason.words, name, reading.kind) from None
        self.budget.spend(sum([value.data.size for value in found if value.data is not None]))
        into.update(zip(outputs, [*found, *[UNKNOWN] * (len(outputs) - len(found))], strict=False))

    def _branch(self, reading: Reading, values: dict[str, Abstract], prepared: "_Prepared") -> list[Abstract]:
        self.budget.spend()
        condition = values.get(reading.names[0], UNKNOWN).numbers if reading.names else None
        if condition is None or condition.size != 1:
            return [UNKNOWN] * len(reading.outputs)
        wanted = "then_branch" if bool(condition.all()) else "else_branch"
        body = next((one.g for one in reading.node.attribute if one.name == wanted), None)
        if body is None:
            return [UNKNOWN] * len(reading.outputs)
        inner = self._compute(body, dict(values), prepared.constants)
        return [inner.get(value.name, UNKNOWN) for value in body.output]


@dataclass(eq=False)
class _Prepared:
    """A graph, its constants, and the nodes that depend on feeds with their rules; an If has none."""

    graph: GraphProto
    constants: dict[str, Abstract]
    nodes: list[tuple[Reading, Rule | None]] = field(default_factory=list)


def _find_returned(graph: GraphProto, names: Iterable[str]) -> Iterator[str]:
    """The values that reach some others of a graph, moved at most, in its branches as well."""
    makers, walk = producers(graph), Walk(names)
    for name in walk:
        node = makers.get(name)
        if node is None:
            continue
        if _is_branch(node):
            at = list(node.output).index(name)
            for body in subgraphs(node):
                yield from _find_returned(body, [value.name for value in body.output[at : at + 1]])
        elif node.op_type in MOVING and node.domain in STANDARD:
            yield name
            walk.add(node.input)


def _is_branch(node: NodeProto) -> bool:
    return has(node.op_type, "branch") and node.domain in STANDARD


PASSING = operators_with(
    *("copy", "cast", "dropout", "view", "permute", "repeat", "pick", "join", "pad", "write"),
    *("arithmetic", "exponential", "compare", "logic", "select", "triangle", "branch"),
)
"""Operators that compute with each element alone, or move it: a mask stays one."""


def may_hide(view: GraphView, unread: Iterable[str]) -> bool:
    """Whether a constant among `unread` reaches the scores of an attention, as a mask does.

    A bias of one axis that is added whole has no rows and columns, and hides nothing.
    """
    wanted = set(unread)
    sizes = {name: tuple(tensor.dims) for name, tensor in list_tensors(view) if name in wanted}
    if not sizes:
        return False
    reaching = ((sizes[name], cut) for name, cut in _find_reaching(view.model.graph, sizes))
    # A table has numbers for rows or columns where it was cut, or has two axes; None: it must be cut.
    return any(prod(d) > 1 and (cut or (cut is False and sum(n > 1 for n in d) > 1)) for d, cut in reaching)


def _list_scores(node: NodeProto) -> list[tuple[str, bool | None]]:
    """The scores, masks and biases that a node of an attention takes; None where a table has to be cut before it.

    An Exp is part of a Softmax that is written out, or of something else.
    """
    if has(node.op_type, "softmax"):
        return [(name, False) for name in node.input]
    if node.op_type == "Exp":
        return [(name, None) for name in node.input]
    ports = ports_of(node.domain, node.op_type)
    return [(input_of(node, at), False) for at in (ports.mask if ports is not None else ())]


def _find_reaching(graph: GraphProto, constants: Collection[str]) -> Iterable[tuple[str, bool | None]]:
    """The constants that reach the scores of an attention: whether they were cut; None where they have to be."""
    makers: dict[str, NodeProto] = {}
    walk = Walk[tuple[str, bool | None]](())
    for node in nodes_in(graph.node):
        makers |= dict.fromkeys(filter(None, node.output), node)
        walk.add(_list_scores(node))
    for name, cut in walk:
        if name in constants:
            yield name, cut
        maker = makers.get(name)
        if maker is None or maker.op_type not in PASSING:
            continue
        walk.add((one, True if has(maker.op_type, "pick") else cut) for one in maker.input)
        place = list(maker.output).index(name)
        walk.add((value.name, cut) for body in subgraphs(maker) for value in body.output[place : place + 1])
