"""The walk through a graph: from the axes of its inputs to the facts on every value, by the rules of the operators.

Numbers of the graph that must agree with a length are bound to it on the way. A size that is not known is None: it
binds no stand-in, and a run will show it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import prod

from kvdoctor.analysis.proof.types import Term, product, symbol
from kvdoctor.analysis.proof.types import number as whole
from kvdoctor.model.node_sizes import MOST_NUMBERS, VARIES, AxisOf, Computed, How, NodeSizes, NumberOf, Size, compute
from kvdoctor.model.operator_axes import axes_of, numbers_of
from kvdoctor.model.operators import has, operator_of, operators_with
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto
from kvdoctor.model.traverse import STANDARD, bodies_of, constant_value, describe_node, input_of, nodes_in
from kvdoctor.model.view import integers
from kvdoctor.repair.shapes import facts
from kvdoctor.repair.shapes.facts import UNKNOWN, ConstantUse, Dims, GraphScope, NodeInputs, ValueFacts, WalkNotes
from kvdoctor.repair.shapes.reshapes import infer_reshape
from kvdoctor.repair.shapes.terms import CannotFree

PASSING = operators_with("copy", "cast", "view", "permute") | {"Expand", "Slice"}
"""Operators whose result has the values of the same constant."""


def infer_outputs(reading: NodeInputs) -> list[ValueFacts]:
    """The facts on each output of a node."""
    node, first = reading.node, reading.at(0)
    known = NodeSizes(
        node.op_type,
        node.input,
        len(node.output),
        reading.attribute,
        lambda index: _integers(reading, reading.at(index).shape, VARIES),
        lambda index: _integers(reading, reading.at(index).numbers, None),
    )
    if node.op_type == "Reshape":
        found = infer_reshape(reading)
    else:
        found = _infer_axes(reading, known, first if node.op_type in PASSING else UNKNOWN)
    if found:
        numbers, others = _infer_numbers(reading, known)
        found[0] = ValueFacts(found[0].shape, numbers, others, table=found[0].table)
    return [*found, *[UNKNOWN] * (len(node.output) - len(found))]


def _integers(r: NodeInputs, terms: Dims | None, varying: int | None) -> list[int | None] | None:
    """Terms as integers, with something else in place of each that depends on a length."""

    def integer(term: Term) -> int | None:
        number = r.facts.real(term).number
        return varying if number is None else number

    return None if terms is None else [None if term is None else integer(term) for term in terms]


def _infer_axes(r: NodeInputs, known: NodeSizes, passed: ValueFacts) -> list[ValueFacts]:
    """The axes of each output, with the constant whose values it has."""
    made = axes_of(known)
    if made is None:
        return []
    for group in known.required:
        _infer_size(r, group)
    found = [ValueFacts(tuple(_infer_size(r, size) for size in sizes), table=passed.table) for sizes in made]
    shape = r.at(0).shape
    if r.node.op_type == "Expand" and shape is not None:
        r.notes.expanded[id(r.node)] = shape
    if operator_of(r.node.op_type).axes == "broadcast":
        _note_candidates(r, [one for one in r.inputs if one is not None], found[0].shape or ())
    return found


def _infer_numbers(r: NodeInputs, known: NodeSizes) -> tuple[Dims | None, tuple[Dims, ...]]:
    """The numbers of the first output, and others that it may have: a Where without a known condition has two."""
    made = numbers_of(known)
    if made is None or len(made) > MOST_NUMBERS:
        return None, ()

    def decline(size: Size) -> Size:
        if isinstance(size, Computed) and size.how == "choice" and _infer_size(r, size.parts[0]) is None:
            return size.parts[2]
        return size

    numbers, other = (tuple(_infer_size(r, size) for size in sizes) for sizes in (made, map(decline, made)))
    same = made == tuple(NumberOf(0, at) for at in range(len(r.at(0).numbers or ())))
    return numbers, (other,) if other != numbers else r.at(0).others if same else ()


def _infer_size(r: NodeInputs, size: Size) -> Term | None:
    def given(one: int | AxisOf | NumberOf) -> Term | None:
        if isinstance(one, int):
            return whole(one)
        terms = r.at(one.input).shape if isinstance(one, AxisOf) else r.at(one.input).numbers
        return terms[one.at] if terms is not None and one.at < len(terms) else None

    return compute(size, given, lambda how, parts: _combine(r, how, parts))


def _combine(r: NodeInputs, how: How, parts: list[Term | None]) -> Term | None:
    """A size that is computed from others."""
    if how == "broadcast":
        return _broadcast_axis(r, parts)
    if how == "part" or (how == "choice" and (parts[0] is None or parts[0].parts)):
        return parts[1]
    if how == "choice":
        return parts[2]
    known = [part for part in parts if part is not None]
    if how in ("equal", "letter"):  # axes that must be equal: that of a length, if one is
        for other in known[1:]:
            require_equal(r, known[0], other)
        return next((term for term in known if r.facts.real(term).symbols), known[0] if known else None)
    rule = _OF_TERMS.get(how)
    return rule(r, known) if rule is not None and len(known) == len(parts) else None


def _cut(r: NodeInputs, parts: list[Term]) -> Term | None:
    """The length of a slice; it is assumed to lie within the axis if it does so in the file."""
    axis, start, end, step = parts
    if step.number != 1:
        return None
    size, real = r.facts.size, r.facts.real
    length, first, last = size(real(axis)), size(real(start)), size(real(end))
    low = whole(0) if first <= -length else axis + start if first < 0 else start
    if not r.at(0).fed and real(end).symbols and real(axis).number is not None and r.at(0).numbers is None:
        r.notes.ends.append((r.node, length))
    high = axis if last >= length and real(end).number is not None else axis + end if last < 0 else end
    return high - low if size(real(high)) >= size(real(low)) else None


def _same(r: NodeInputs, known: list[Term]) -> Term | None:
    """1 or 0 if the result is the same at every length; no length is below 0."""
    difference = r.facts.real(known[0]) - r.facts.real(known[1])
    if difference.number is not None:
        return whole(int(difference.number == 0))
    signs = {number > 0 for _, number in difference.parts}
    return whole(0) if len(signs) == 1 and () in [monomial for monomial, _ in difference.parts] else None


_OF_TERMS: dict[How, Callable[[NodeInputs, list[Term]], Term | None]] = {
    "sum": lambda _, known: sum(known[1:], known[0]) if known else whole(0),
    "product": lambda _, known: product(known),
    "difference": lambda _, known: known[0] - known[1],
    "quotient": lambda r, known: r.facts.real(known[0]).divided(r.facts.real(product(known[1:]))),
    "cut": _cut,
    "range": lambda r, known: known[1] - known[0] if r.facts.real(known[2]).number == 1 else None,
    "same": _same,
}


def _broadcast_axis(r: NodeInputs, column: list[Term | None]) -> Term | None:
    known = [term for term in column if term is not None]
    if len(known) != len(column):
        # An unknown size may be 1 or the size of the others.
        return next((term for term in known if r.facts.real(term).number not in (None, 1)), None)
    moving = [term for term in known if r.facts.real(term).symbols]
    kept = moving[0] if moving else next((term for term in known if r.facts.real(term).number != 1), known[0])
    for term in known:
        if r.facts.real(term).number == 1 and not _stands_for(r, term, kept):
            continue
        require_equal(r, kept, term)
    return r.facts.real(kept) if moving else kept


def _stands_for(r: NodeInputs, term: Term, kept: Term) -> bool:
    """Whether a 1 may be a length that was traced at 1: a size was computed from it. Axes of constants hold one row."""
    opened = r.facts.open(term)
    free = [r.facts.baked[name] for name in opened.symbols if name in r.facts.baked]
    return bool(free) and all(one.kind == "number" for one in free) and r.facts.size(r.facts.real(kept)) == 1


def require_equal(r: NodeInputs, one: Term, other: Term) -> None:
    """Require two sizes to be equal."""
    if r.facts.agree(one, other) is None:
        left, right = r.facts.real(one), r.facts.real(other)
        r.note_conflict(f"{left} and {right} must be equal", left, right)


def _note_candidates(r: NodeInputs, given: list[ValueFacts], dims: Dims) -> None:
    """Note constants with one row in place of one for each new token: it may be that of the traced position."""
    rows = r.notes.rows
    if rows is None or not any(known.fed for known in given):
        return
    per_sequence = (whole(1), symbol("batch"))  # the same entry for all positions
    for known in given:
        if known.fed or known.even or known.shape is None:
            continue
        if all(dim is not None and r.facts.real(dim) in per_sequence for dim in known.shape):
            continue
        for axis, dim in enumerate(known.shape):
            whole_dim = dims[len(dims) - len(known.shape) + axis]
            if whole_dim is None or dim is None or r.facts.real(whole_dim) != rows:
                continue
            if r.facts.real(dim) == whole(1) and r.facts.size(rows) == 1:
                r.notes.candidates.append(facts.TraceCandidate(known.table, r.node, r.scope.path))


MOST_ROUNDS = 8
"""Largest number of walks; a stand-in that is bound late adds facts on earlier values."""

COUNTING = ("Range", "Slice", "Trilu")
"""Operators that number rows; they are noted for repairs of masks and positions."""

EVEN = operators_with("elementwise", "copy", "cast", "view", "permute", "repeat", "fill")
"""Operators that return equal elements for inputs with equal elements."""


@dataclass(eq=False)
class ShapeWalk:
    """A model under a facts. `inputs` gives the axes of graph inputs as terms, `fed` the numbers that some hold."""

    model: ModelProto
    inputs: Mapping[str, tuple[Term, ...]]
    notes: WalkNotes
    keep: list[NodeProto] = field(default_factory=list)
    scopes: "dict[int, GraphScope]" = field(default_factory=dict)
    fed: Mapping[str, Dims] = field(default_factory=dict)

    def run(self) -> GraphScope:
        """Walk until no more is bound; what is known of the values of the main graph.

        Raises:
            CannotFree: a size is a product of too many lengths.
        """
        self.functions = {(f.domain, f.name) for f in self.model.functions}
        self.keep = list(nodes_in(self.model.graph.node))  # their ids must stay theirs
        for _ in range(MOST_ROUNDS):
            before = len(self.notes.facts.bound)
            self.notes.clear()
            main = GraphScope(self.model.graph, "main graph")
            for value in self.model.graph.input:
                main.values[value.name] = ValueFacts(self.inputs.get(value.name), self.fed.get(value.name))
            try:
                self._graph(self.model.graph, main)
            except OverflowError as error:
                raise CannotFree(str(error)) from None
            if len(self.notes.facts.bound) == before:
                break
        return main

    def _graph(self, graph: GraphProto, inside: GraphScope) -> None:
        self.scopes[id(graph)] = inside
        for tensor in graph.initializer:
            inside.constants[tensor.name] = tensor
            inside.values.pop(tensor.name, None)
        for node in graph.node:
            self._node(node, inside)

    def _node(self, node: NodeProto, inside: GraphScope) -> None:
        if has(node.op_type, "constant") and node.output:
            tensor = constant_value(node)
            if tensor is not None:
                inside.constants[node.output[0]] = tensor
                return
        aliased = inside.constant(input_of(node, 0)) if has(node.op_type, "copy") and node.output else None
        if aliased is not None and inside.known(input_of(node, 0)) is None:
            inside.constants[node.output[0]] = aliased
            return
        if has(node.op_type, "branch") and not node.domain:
            self._branches(node, inside)
            return
        given = [self._read(node, index, name, inside) for index, name in enumerate(node.input)]
        reading = NodeInputs(node, given, self.notes, inside)
        for name, known in zip(node.output, self._made(reading), strict=False):
            if name:
                inside.values[name] = known

    def _read(self, node: NodeProto, index: int, name: str, inside: GraphScope) -> ValueFacts | None:
        if not name:
            return None
        known = inside.known(name)
        if known is not None:
            return known
        tensor = inside.constant(name)
        if tensor is None:
            return UNKNOWN
        numbers = integers(tensor) if prod(tensor.dims) <= MOST_NUMBERS else None
        return facts.read_constant(self.notes.facts, ConstantUse(node, index, tensor, inside.path), numbers)

    def _made(self, reading: NodeInputs) -> list[ValueFacts]:
        key = (reading.node.domain, reading.node.op_type)
        if reading.node.domain not in STANDARD or has(reading.node.op_type, "attend", "rotate", "write"):
            # An operator that holds a whole attention takes positions and lengths as they are given.
            for known in reading.inputs:
                if known is not None and not known.fed and known.numbers:
                    candidate = facts.TraceCandidate(known.table, reading.node, reading.scope.path)
                    self.notes.candidates.append(candidate)
        if reading.node.op_type in COUNTING:
            self.notes.counting.append(reading)
        shapes = operator_of(reading.node.op_type).shapes
        given = [known for at, known in enumerate(reading.inputs) if known is not None and at not in shapes]
        fed = any(known.fed for known in given)
        found = [UNKNOWN] * len(reading.node.output) if key in self.functions else infer_outputs(reading)
        even = reading.node.op_type in EVEN and all(known.even for known in given)
        return [replace(known, fed=fed and self._counts(known), even=even) for known in found]

    def _counts(self, known: ValueFacts) -> bool:
        """Whether numbers depend on how many tokens there are; those of the batch are the same for all tokens."""
        if known.numbers is None or None in known.numbers:
            return True
        symbols = {name for term in known.numbers if term is not None for name in self.notes.facts.real(term).symbols}
        return not symbols.isdisjoint(("past", "new"))

    def _branches(self, node: NodeProto, inside: GraphScope) -> None:
        results: list[list[ValueFacts]] = []
        for attribute in node.attribute:
            for body in bodies_of(attribute):
                inner = GraphScope(body, f"{describe_node(node)}, {attribute.name}", inside)
                self._graph(body, inner)
                results.append([inner.known(value.name) or UNKNOWN for value in body.output])
        for index, name in enumerate(node.output):
            shapes = [self._opened(made[index]) if index < len(made) else None for made in results]
            same = shapes[0] if shapes and all(shape == shapes[0] for shape in shapes) else None
            if name:
                inside.values[name] = ValueFacts(same)

    def _opened(self, known: ValueFacts) -> Dims | None:
        if known.shape is None:
            return None
        return tuple(None if term is None else self.notes.facts.real(term) for term in known.shape)
