"""Facts on values before anything runs: axes and small integers as terms, and the numbers that may stand for a length.

A number of the graph is read as a *stand-in*: a symbol with the value that it has in the file. If it must agree with a
length that is fed, it is bound to that length; a stand-in that is never bound keeps its value.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Literal

from kvdoctor.analysis.proof.types import Term, symbol
from kvdoctor.analysis.proof.types import number as whole
from kvdoctor.model.node_sizes import MOST_NUMBERS
from kvdoctor.model.proto import AttributeProto, GraphProto, NodeProto, TensorProto
from kvdoctor.model.traverse import find_attribute
from kvdoctor.records import record

MARK = "#"
"""Prefix of the names of stand-ins."""

Dims = tuple[Term | None, ...]


@dataclass(eq=False)
class ConstantUse:
    """One input of a node that is a constant: only that input is changed, not other readers of the tensor."""

    node: NodeProto
    index: int
    tensor: TensorProto
    scope: str


@record
class BakedNumber:
    """A number of a constant, or the length of one of its axes, where a node reads it."""

    site: ConstantUse
    kind: Literal["number", "axis"]
    at: int
    value: int


@record
class ValueFacts:
    """The known facts on a value.

    `numbers` are its elements if it is a short tensor of integers, `others` the elements for other choices of a
    `Where`. `fed` says whether its values may depend on the feeds or on the number of tokens; `table` is the constant
    whose values it has, possibly transposed; `even` says that all elements are equal.
    """

    shape: Dims | None = None
    numbers: Dims | None = None
    others: tuple[Dims, ...] = ()
    fed: bool = True
    table: ConstantUse | None = None
    even: bool = False


UNKNOWN = ValueFacts()


@record
class SizeConflict:
    """Two sizes that cannot agree at all lengths: the node, a description, and the sizes."""

    node: NodeProto
    scope: str
    words: str
    sizes: tuple[Term, ...] = ()


@dataclass
class ShapeFacts:
    """The stand-ins of a graph, the terms that they are bound to, and the conflicts.

    `traced` holds the size of every real symbol: the number at which it is frozen, or a synthetic one that occurs
    nowhere in the graph.
    """

    traced: dict[str, int]
    baked: dict[str, BakedNumber] = field(default_factory=dict)
    bound: dict[str, Term] = field(default_factory=dict)
    conflicts: list[SizeConflict] = field(default_factory=list)
    names: dict[tuple[int, int, str, int], str] = field(default_factory=dict)

    def stand_in(self, site: ConstantUse, kind: Literal["number", "axis"], at: int, value: int) -> Term:
        """The symbol for a number of a constant; the same for each read of the same input."""
        key = (id(site.node), site.index, kind, at)
        if key not in self.names:
            self.names[key] = f"{MARK}{len(self.names)}"
            self.baked[self.names[key]] = BakedNumber(site, kind, at, value)
        return symbol(self.names[key])

    def open(self, term: Term) -> Term:
        """The term with bound stand-ins replaced."""
        for _ in range(len(self.bound) + 1):
            following = term.replaced(self.bound)
            if following == term:
                return term
            term = following
        return term

    def real(self, term: Term) -> Term:
        """The term in real symbols: stand-ins that are not bound are numbers."""
        term = self.open(term)
        return term.replaced({name: whole(self.baked[name].value) for name in term.symbols & self.baked.keys()})

    def size(self, term: Term) -> int:
        """Its size in the file."""
        return term.at(self.traced | {name: one.value for name, one in self.baked.items() if name in term.symbols})

    def agree(self, one: Term, other: Term) -> Term | None:
        """Require two sizes to be equal: gives the common term, or None if they cannot agree at all lengths."""
        left, right = self.real(one), self.real(other)
        if left == right:
            return left
        if self.size(left) != self.size(right):
            return None
        for mine, theirs in ((one, right), (other, left)):
            opened = self.open(mine)
            free = sorted(name for name in opened.symbols if name in self.baked)
            if not theirs.symbols or not free:
                continue
            # A 0 is never a stand-in, so in a range from 0 the end is the stand-in.
            name = free[-1]
            rest = opened - symbol(name)
            if name not in rest.symbols:
                self.bound[name] = theirs - self.real(rest)
                return theirs
        return None

    def known_numbers(self, known: ValueFacts) -> tuple[int, ...] | None:
        """Numbers that depend on no length, such as axes and permutations."""
        if known.numbers is None:
            return None
        found = [None if term is None else self.real(term).number for term in known.numbers]
        return None if None in found else tuple(n for n in found if n is not None)


def read_constant(facts: ShapeFacts, site: ConstantUse, numbers: tuple[int, ...] | None) -> ValueFacts:
    """The facts on a constant as a node reads it."""
    dims = tuple(int(dim) for dim in site.tensor.dims)
    axes = tuple(facts.stand_in(site, "axis", at, dim) if dim > 0 else whole(dim) for at, dim in enumerate(dims))
    if numbers is None or prod(dims) > MOST_NUMBERS:
        return ValueFacts(axes, fed=False, table=site, even=prod(dims) == 1)
    terms = tuple(facts.stand_in(site, "number", at, n) if n > 0 else whole(n) for at, n in enumerate(numbers))
    return ValueFacts(axes, terms, fed=False, table=site, even=prod(dims) == 1)


@dataclass(eq=False)
class GraphScope:
    """The values of a graph or branch; values of enclosing graphs are looked up there. `path` is for messages."""

    graph: GraphProto
    path: str
    outer: "GraphScope | None" = None
    values: dict[str, ValueFacts] = field(default_factory=dict)
    constants: dict[str, TensorProto] = field(default_factory=dict)

    def known(self, name: str) -> ValueFacts | None:
        """The facts on a value, None if a constant of an inner graph has that name."""
        if name in self.values:
            return self.values[name]
        if name in self.constants:
            return None
        return UNKNOWN if self.outer is None else self.outer.known(name)

    def constant(self, name: str) -> TensorProto | None:
        """The tensor of a constant."""
        if name in self.constants or self.outer is None:
            return self.constants.get(name)
        return self.outer.constant(name)


@dataclass(eq=False)
class WalkedReshape:
    """A Reshape: the axes of its data, the axes of its result, and its targets as they are in the file."""

    node: NodeProto
    into: tuple[Term, ...]
    out: tuple[Term, ...]
    targets: tuple[tuple[Term, ...], ...]


@dataclass(eq=False)
class TraceCandidate:
    """A constant that may hold only the traced position: one row in place of one for each new token, or a position."""

    site: ConstantUse | None
    node: NodeProto
    path: str


@dataclass(eq=False)
class NodeInputs:
    """One node with the facts on its inputs; a rule returns the facts on its outputs."""

    node: NodeProto
    inputs: list[ValueFacts | None]
    notes: "WalkNotes"
    scope: GraphScope

    @property
    def facts(self) -> ShapeFacts:
        """The stand-ins of the graph."""
        return self.notes.facts

    def attribute(self, name: str) -> AttributeProto | None:
        """The attribute of that name."""
        return find_attribute(self.node, name)

    def number(self, name: str, default: int) -> int:
        """An integer attribute."""
        found = self.attribute(name)
        return int(found.i) if found is not None else default

    def at(self, index: int) -> ValueFacts:
        """The facts on an input; none if it is left out."""
        found = self.inputs[index] if index < len(self.inputs) else None
        return found or UNKNOWN

    def has(self, index: int) -> bool:
        """Whether an input is present."""
        return index < len(self.inputs) and self.inputs[index] is not None

    def note_conflict(self, words: str, *sizes: Term) -> None:
        """Note that sizes cannot agree."""
        self.facts.conflicts.append(SizeConflict(self.node, self.scope.path, words, sizes))


@dataclass(eq=False)
class WalkNotes:
    """What the rules note on the way, for the passes that change the graph afterwards.

    `rows` is the number of new tokens, None if the graph has no such axis. `reshapes` and `expanded` are keyed by the
    identity of the node. `ends` are slices of constants at a computed end, with the length of the constant. `counting`
    are the nodes that number rows. `candidates` are constants that may hold the one traced position.
    """

    facts: ShapeFacts
    rows: Term | None = None
    reshapes: dict[int, WalkedReshape] = field(default_factory=dict)
    expanded: dict[int, Dims] = field(default_factory=dict)
    ends: list[tuple[NodeProto, int]] = field(default_factory=list)
    counting: list[NodeInputs] = field(default_factory=list)
    candidates: list[TraceCandidate] = field(default_factory=list)

    def clear(self) -> None:
        """Forget everything but the sizes, before another walk."""
        self.facts.conflicts.clear()
        self.reshapes.clear()
        self.candidates.clear()
        self.ends.clear()
        self.counting.clear()
