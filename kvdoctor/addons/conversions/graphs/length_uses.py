"""Replaces the length of the past by that of a buffer, wherever a graph computes with it.

A graph reads the length of its past from shapes. When the past becomes a buffer of N rows, that length has two
meanings, which its use decides. As a size (the target of a Reshape or Expand, the end of a Range from
0) past + new is the number of columns, which is N now. As a place (the first position of the new tokens, the rows of a
causal mask) past is the number of tokens in the buffer, which an input gives now. `repair/shapes` writes each length as
a term, so that no form of the arithmetic in between has to be known.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from kvdoctor.addons.conversions.graphs.conversion import find_element
from kvdoctor.analysis.lm_head import describe_op
from kvdoctor.analysis.proof.types import Term, symbol
from kvdoctor.analysis.proof.types import number as whole
from kvdoctor.contract import Graph
from kvdoctor.model.edit import keep_only
from kvdoctor.model.operators import has, operator_of, operators_with
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto
from kvdoctor.model.traverse import (
    input_of,
    needed_for,
    normalize_domain,
    output_of,
    producer,
    values_read,
)
from kvdoctor.model.view import integers
from kvdoctor.records import record
from kvdoctor.repair.shapes.facts import GraphScope, ShapeFacts, ValueFacts, WalkNotes
from kvdoctor.repair.shapes.freeing import read_declared_sizes
from kvdoctor.repair.shapes.terms import Lengths, read_lengths
from kvdoctor.repair.shapes.walk import ShapeWalk
from kvdoctor.repair.shapes.writing import Writer
from kvdoctor.repair.workspace import CannotRepair
from kvdoctor.report.repair_record import Change

PAST, WRITTEN = "past", "cache_position[0]"
"""The symbol of the past's length, and that of the tokens in the buffer."""
ENDLESS = (1 << 31) - 1
PLACES = operators_with("add", "subtract", "divide", "modulo", "sign", "clamp") | (
    operators_with("select", "cast", "triangle", "embed", "compare")
)
"""Operators that compute positions, or compare them."""
STRIDES = operators_with("multiply")
"""Operators that step over rows of a flattened mask."""


@record(slots=False)
class _Use:
    """One input of a node that holds lengths: their terms."""

    scope: GraphScope
    node: NodeProto
    index: int
    terms: tuple[Term | None, ...]


@dataclass(eq=False)
class LengthUses:
    """The uses of the past's length in a model.

    Made before the graph is changed; `rewrite` then changes the nodes that it found, for a buffer of `capacity` rows.
    `rewrite_alike` gets the rows of the buffer that the past was, 0 where they are no number.
    """

    model: ModelProto
    graph: Graph
    capacity: int = 0
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lengths: Lengths = read_lengths(self.graph, read_declared_sizes(self.model))
        if PAST not in self.lengths.traced or PAST in self.lengths.fixed:
            raise CannotRepair("no past has a variable length")
        self.facts = ShapeFacts(dict(self.lengths.traced))
        rows = symbol("new") if "new" in self.lengths.traced else None
        self.walk = ShapeWalk(self.model, self.lengths.inputs, WalkNotes(self.facts, rows), fed=self._fed())
        self.walk.run()
        outputs = [value.name for value in self.model.graph.output]
        self.needed = needed_for(self.model.graph, outputs)

    def _fed(self) -> dict[str, tuple[Term, ...]]:
        """The inputs that give the length of the past as a number."""
        past, total = symbol(PAST), symbol(PAST) + symbol("new")
        terms = {"past_length": past, "write_index": past, "total_length": total, "last_index": total - whole(1)}
        single = [port for port in self.graph.inputs if port.shape is not None and port.shape in ((), (1,))]
        return {port.name: (terms[port.role],) for port in single if port.role in terms}

    def rewrite(self, written: str) -> list[Change]:
        """Rewrite all uses; `written` names the value int64[1] that holds the number of tokens in the buffer.

        Raises:
            CannotRepair: a use is of no known form; the message names the node.
        """
        self.writer = Writer(self.model, self.lengths, given={WRITTEN: written})
        for scope in list(self.walk.scopes.values()):
            for node in list(scope.graph.node):
                self._node(scope, node)
        self.writer.done()
        self._drop_unused()
        return self.changes

    def rewrite_alike(self, by: Term, written: str = "") -> list[Change]:
        """Put another length in place of the past's, whatever it is used for.

        With `written` the tokens in the buffer, as in `rewrite`, where the length is read from the shape of a past.

        Raises:
            CannotRepair: a use is only partly known; the message names the node.
        """
        self.writer = Writer(self.model, self.lengths, given={WRITTEN: written} if written else {})
        pasts = {port.name for port in self.graph.inputs if port.role == "past"} if written else set()
        for scope in list(self.walk.scopes.values()):
            for node in list(scope.graph.node):
                self._open_cut(scope, node, by)
                for use in self._uses(scope, node):
                    moving = self._is_moving(use.terms) and not self._is_passed_on(use)
                    if moving and (not pasts or self._is_from(use, pasts)):
                        self._replace(use, [None if one is None else one.replaced({PAST: by}) for one in use.terms])
        self.writer.done()
        self._drop_unused()
        return self.changes

    def _open_cut(self, scope: GraphScope, node: NodeProto, by: Term) -> None:
        """A cut to the buffer's length, as a number, took all of an axis that is longer now."""
        ends = self._terms(scope, node, 2) if node.op_type == "Slice" and len(node.input) > 2 else None
        data = scope.known(input_of(node, 0)) if ends is not None else None
        if ends is None or data is None or data.shape is None:
            return
        axes = self._terms(scope, node, 3) or tuple(map(whole, range(len(ends))))
        new_ends = list(ends)
        for at, (end, axis) in enumerate(zip(ends, axes, strict=False)):
            number = axis.number if axis is not None else None
            inside = number is not None and -len(data.shape) <= number < len(data.shape)
            size = data.shape[number] if inside and number is not None else None
            # Of a mask that was joined from two, the columns may be unknown: the proof shows whether they were these.
            if end == whole(self.capacity) and inside and (size is None or self.facts.real(size) == symbol(PAST)):
                new_ends[at] = by
        if new_ends != list(ends):
            self._replace(_Use(scope, node, 2, ends), new_ends)

    def shape_of(self, name: str) -> tuple[Term | None, ...] | None:
        """The axes of a value of the main graph."""
        known = self.walk.scopes[id(self.model.graph)].known(name)
        if known is None or known.shape is None:
            return None
        return tuple(None if term is None else self.facts.real(term) for term in known.shape)

    def _node(self, scope: GraphScope, node: NodeProto) -> None:
        if node.op_type == "Slice" and len(node.input) > 2 and not normalize_domain(node.domain):
            self._slice(scope, node)
            return
        uses = [use for use in self._uses(scope, node) if self._is_moving(use.terms)]
        if has(node.op_type, "range") and uses:
            self._range(scope, node)
            return
        past_ports = {port.name for port in self.graph.inputs if port.role == "past"} | self._fed().keys()
        for use in uses:
            if self._is_passed_on(use):
                continue
            if normalize_domain(node.domain):
                self._refuse(use)
            if node.op_type in STRIDES and not self._is_from(use, past_ports):
                continue  # it is read from what has N columns by itself
            if use.index in operator_of(node.op_type).shapes or node.op_type in STRIDES:
                self._replace(use, [self._as_size(use, term) for term in use.terms])
            elif node.op_type in PLACES:
                self._replace(use, [self._as_place(use, term) for term in use.terms])
            else:
                self._refuse(use)

    def _uses(self, scope: GraphScope, node: NodeProto) -> Iterator[_Use]:
        for index, name in enumerate(node.input):
            known = scope.known(name) if name else None
            if known is not None and known.numbers is not None:
                yield _Use(scope, node, index, self._real(known))

    def _real(self, known: ValueFacts) -> tuple[Term | None, ...]:
        return tuple(None if term is None else self.facts.real(term) for term in known.numbers or ())

    @staticmethod
    def _is_moving(terms: Sequence[Term | None]) -> bool:
        return any(term is not None and PAST in term.symbols for term in terms)

    def _is_passed_on(self, use: _Use) -> bool:
        """Whether the node computes other known lengths from it: then their uses are rewritten."""
        node = use.node
        if use.index and operator_of(node.op_type).keeps:
            return False
        found = use.scope.known(output_of(node))
        if found is None or found.numbers is None or None in found.numbers:
            return False
        if found.others:
            raise CannotRepair(f"the node {describe_op(node)} selects one of several lengths by its condition")
        return True

    def _is_from(self, use: _Use, inputs: set[str]) -> bool:
        """Whether a length is computed from some inputs."""
        waiting, seen = [use.node.input[use.index]], set[str]()
        while waiting:
            name = waiting.pop()
            node = next(filter(None, (producer(graph, name) for graph in _list_graphs(use.scope))), None)
            if name in inputs:
                return True
            if node is not None and name not in seen:
                seen.add(name)
                # The input of another Shape is as long as the mask or the buffer.
                waiting += [given for given in node.input if not has(node.op_type, "sizes") or given in inputs]
        return False

    def _range(self, scope: GraphScope, node: NodeProto) -> None:
        """A Range of new positions counts from the tokens in the buffer, one of all columns ends at N."""
        found = [self._terms(scope, node, index) for index in (0, 1)]
        start, end = (terms[0] if terms and len(terms) == 1 else None for terms in found)
        if start is None or end is None:
            raise CannotRepair(f"the node {describe_op(node)} counts from or to a number that is not known")
        for index, term in enumerate((start, end)):
            use = _Use(scope, node, index, (term,))
            if PAST not in term.symbols:
                continue
            if PAST not in (end - start).symbols:
                self._replace(use, [self._as_place(use, term)])
            elif PAST in start.symbols:
                self._refuse(use)
            else:
                self._replace(use, [self._as_size(use, term)])

    def _terms(self, scope: GraphScope, node: NodeProto, index: int) -> tuple[Term | None, ...] | None:
        name = node.input[index] if index < len(node.input) else ""
        known = scope.known(name) if name else None
        if known is not None:
            return self._real(known) if known.numbers is not None else None
        tensor = scope.constant(name) if name else None
        if tensor is None:
            return None
        numbers = integers(tensor)
        single = tensor.float_data[:1] if numbers is None and not tensor.dims else ()
        if single and single[0] == int(single[0]):
            numbers = (int(single[0]),)
        return tuple(whole(number) for number in numbers) if numbers is not None else None

    def _slice(self, scope: GraphScope, node: NodeProto) -> None:
        """A Slice takes the rows of the new tokens, or the columns of all."""
        starts, ends = self._terms(scope, node, 1), self._terms(scope, node, 2)
        data = scope.known(input_of(node, 0)) if input_of(node, 0) else None
        tensor = scope.constant(input_of(node, 0))
        shape = data.shape if data is not None else tuple(map(whole, tensor.dims)) if tensor is not None else None
        sizes = [None if dim is None else self.facts.real(dim) for dim in shape] if shape is not None else None
        if starts is None or ends is None:
            return
        axes = self._terms(scope, node, 3) or tuple(map(whole, range(len(starts))))
        steps = self._terms(scope, node, 4) or (whole(1),) * len(starts)
        new_starts, new_ends = list(starts), list(ends)
        for at, (start, end, axis, step) in enumerate(zip(starts, ends, axes, steps, strict=False)):
            number = axis.number if axis is not None else None
            size = sizes[number] if sizes and number is not None and -len(sizes) <= number < len(sizes) else None
            if not self._is_cut(start, end, size):
                continue
            if step != whole(1) or start is None or end is None:
                raise CannotRepair(f"the node {describe_op(node)} cuts an axis of the past's length in another way")
            new_starts[at], new_ends[at] = self._cut(_Use(scope, node, 1, (start, end)), start, end, size)
        if new_starts != list(starts):
            self._replace(_Use(scope, node, 1, starts), new_starts)
        if new_ends != list(ends):
            self._replace(_Use(scope, node, 2, ends), new_ends)

    def _is_cut(self, start: Term | None, end: Term | None, size: Term | None) -> bool:
        if self._is_moving((start, end)):
            return True
        if size is None or PAST not in size.symbols or start is None or end is None:
            return False
        return self.facts.size(start) < 0 or self.facts.size(end) < 0

    def _cut(self, use: _Use, start: Term, end: Term, size: Term | None) -> tuple[Term, Term]:
        first, last = start, end
        before, back = self.facts.size(start) < 0, self.facts.size(end) < 0
        # A number so large that it means the end of the axis.
        endless = end.number is not None and end.number >= (ENDLESS if size is None else self.facts.size(size))
        if before or back or endless:
            if size is None:
                self._refuse(use)
            first = size + start if before else start
            last = size if endless else size + end if back else end
        if PAST not in (last - first).symbols:
            return self._as_place(use, first), self._as_place(use, last)
        if first != whole(0):
            self._refuse(use)
        return first, self._as_size(use, last)

    def _as_size(self, use: _Use, term: Term | None) -> Term:
        """The number of columns in place of past + new."""
        if term is None:
            self._refuse(use)
        if PAST not in term.symbols:
            return term
        found = term.replaced({PAST: whole(self.capacity) - symbol("new")})
        if any(number < 0 for _, number in found.parts):
            self._refuse(use, term)
        return found

    def _as_place(self, use: _Use, term: Term | None) -> Term:
        """The tokens in the buffer in place of past."""
        if term is None:
            self._refuse(use)
        return term.replaced({PAST: symbol(WRITTEN)})

    def _replace(self, use: _Use, terms: Sequence[Term | None]) -> None:
        if None in terms:
            self._refuse(use)
        entries = [number if (number := term.number) is not None else term for term in terms if term is not None]
        name = use.node.input[use.index]
        known = use.scope.known(name)
        tensor = use.scope.constant(name) if known is None else None
        rank = len(tensor.dims) if tensor is not None else len((known.shape if known else None) or ())
        element = int(tensor.data_type) if tensor is not None else find_element(_list_graphs(use.scope), name)
        if element is None:
            self._refuse(use)
        use.node.input[use.index] = self.writer.shaped(entries, [len(entries)] if rank else [], element)
        before = ", ".join(map(str, use.terms))
        after = ", ".join(map(str, terms))
        self.changes.append(Change(self.graph.file, describe_op(use.node), f"reads {before}", f"reads {after}"))

    def _refuse(self, use: _Use, term: Term | None = None) -> NoReturn:
        lengths = ", ".join("?" if one is None else str(one) for one in (use.terms if term is None else (term,)))
        raise CannotRepair(
            f"the node {describe_op(use.node)} uses the length of the past in an unknown way (input {use.index}: "
            f"{lengths})"
        )

    def _drop_unused(self) -> None:
        graph = self.model.graph
        needed = needed_for(graph, [value.name for value in graph.output])
        gone = self.needed - needed
        for node in graph.node:  # what no output needed may read what is dropped
            if needed.isdisjoint(node.output) and not gone.isdisjoint(values_read(node)):
                gone |= {name for name in node.output if name}
        keep_only(graph.node, lambda node: not node.output or not gone.issuperset(filter(None, node.output)))
        keep_only(graph.initializer, lambda tensor: tensor.name not in gone)
        for value in graph.input:
            if value.name in gone:
                self.changes.append(
                    Change(
                        self.graph.file, f"input {value.name!r}", "a length of the past", "removed: nothing reads it"
                    )
                )
        keep_only(graph.input, lambda value: value.name not in gone)
        keep_only(graph.value_info, lambda value: value.name not in gone)


def _list_graphs(scope: GraphScope) -> list[GraphProto]:
    """The graph of a scope, and those around it."""
    return [scope.graph, *(_list_graphs(scope.outer) if scope.outer is not None else ())]
