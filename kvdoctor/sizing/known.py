"""What is known of values before anything runs: axes and small integers as terms, and the numbers that stand for one.

A number that the graph holds is read as a *stand-in*: a symbol with the value it has in the file. Where it must agree
with a length that is fed, it is bound to that length; a stand-in that is never bound is the number it always was.
"""

from dataclasses import dataclass, field
from math import prod
from typing import Literal

from kvdoctor.onnx_schema import NodeProto, TensorProto
from kvdoctor.sizing.terms import Term, symbol, whole

MARK = "#"
"""How the names of stand-ins begin."""

MOST_NUMBERS = 64
"""Elements of an integer tensor up to which its numbers are followed."""

Dims = tuple[Term | None, ...]


@dataclass(eq=False)
class Site:
    """One place where a node reads a constant: that input alone is changed, whoever else reads the tensor."""

    node: NodeProto
    index: int
    tensor: TensorProto
    scope: str


@dataclass(frozen=True, slots=True)
class StandIn:
    """A number of a constant, or the length of one of its axes, where a node reads it."""

    site: Site
    kind: Literal["number", "axis"]
    at: int
    value: int


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a value.

    `numbers` are its elements where it is a short tensor of integers, `others` what they are where another choice is
    made (`Where`). `fed` says whether its values may depend on what is fed, or on how many tokens are; `table` is the
    constant whose values it has, however its axes were turned; `even` says that all its elements are the same.
    """

    shape: Dims | None = None
    numbers: Dims | None = None
    others: tuple[Dims, ...] = ()
    fed: bool = True
    table: Site | None = None
    even: bool = False


UNKNOWN = Known()


@dataclass(frozen=True, slots=True)
class Clash:
    """Two sizes that cannot agree at all lengths: where, and why in words; `sizes` are those that meet there."""

    node: NodeProto
    scope: str
    words: str
    sizes: tuple[Term, ...] = ()


@dataclass
class Ledger:
    """The stand-ins of a graph, what they are bound to, and what does not fit.

    `traced` holds the size of every real symbol: the number it is frozen at, or a made-up one that stands nowhere in
    the graph.
    """

    traced: dict[str, int]
    held: dict[str, StandIn] = field(default_factory=dict)
    bound: dict[str, Term] = field(default_factory=dict)
    clashes: list[Clash] = field(default_factory=list)
    names: dict[tuple[int, int, str, int], str] = field(default_factory=dict)

    def stand_in(self, site: Site, kind: Literal["number", "axis"], at: int, value: int) -> Term:
        """The symbol for a number of a constant; the same one whenever the same place is read."""
        key = (id(site.node), site.index, kind, at)
        if key not in self.names:
            self.names[key] = f"{MARK}{len(self.names)}"
            self.held[self.names[key]] = StandIn(site, kind, at, value)
        return symbol(self.names[key])

    def open(self, term: Term) -> Term:
        """The term with everything that is bound in place."""
        for _ in range(len(self.bound) + 1):
            following = term.replaced(self.bound)
            if following == term:
                return term
            term = following
        return term

    def real(self, term: Term) -> Term:
        """The term in real symbols: stand-ins that are not bound are numbers."""
        term = self.open(term)
        numbers = {name: whole(self.held[name].value) for name in term.symbols if name in self.held}
        return term.replaced(numbers)

    def size(self, term: Term) -> int:
        """Its size in the file as it is."""
        return term.at(self.traced | {name: one.value for name, one in self.held.items() if name in term.symbols})

    def agree(self, one: Term, other: Term) -> Term | None:
        """Make two sizes the same: the term that they both are, or None where they cannot agree at all lengths."""
        left, right = self.real(one), self.real(other)
        if left == right:
            return left
        if self.size(left) != self.size(right):
            return None
        for mine, theirs in ((one, right), (other, left)):
            opened = self.open(mine)
            free = sorted(name for name in opened.symbols if name in self.held)
            if not theirs.symbols or not free:
                continue
            # A number of 0 is never a stand-in, so that of a range from 0 the end is meant.
            name = free[-1]
            rest = opened - symbol(name)
            if name not in rest.symbols:
                self.bound[name] = theirs - self.real(rest)
                return theirs
        return None

    def known_numbers(self, known: Known) -> tuple[int, ...] | None:
        """Numbers that no length has a part in, as axes and permutations are."""
        if known.numbers is None:
            return None
        found = [None if term is None else self.real(term).number for term in known.numbers]
        return None if None in found else tuple(n for n in found if n is not None)


def constant(ledger: Ledger, site: Site, numbers: tuple[int, ...] | None) -> Known:
    """A constant as the node of a site reads it."""
    tensor = site.tensor
    dims = tuple(int(dim) for dim in tensor.dims)
    axes = tuple(ledger.stand_in(site, "axis", at, dim) if dim > 0 else whole(dim) for at, dim in enumerate(dims))
    if numbers is None or prod(dims) > MOST_NUMBERS:
        return Known(axes, fed=False, table=site, even=prod(dims) == 1)
    terms = tuple(ledger.stand_in(site, "number", at, n) if n > 0 else whole(n) for at, n in enumerate(numbers))
    return Known(axes, terms, fed=False, table=site, even=prod(dims) == 1)


def plain(dims: "tuple[int, ...]") -> Dims:
    """Sizes that are numbers."""
    return tuple(whole(dim) for dim in dims)
