"""Where a step with the cache parts from the run without: the first value that differs, and what must be put right.

Values that correspond are compared in portions of bounded size, in the order of the graph. From the first one of what
was said that differs, the way leads back over inputs that differ as well; of these the last one counts which, replaced
by what the other run has, makes the logits right: that is an experiment, and holds for masks, positions and swapped
caches alike.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from kvdoctor.onnx_schema import TensorProto
from kvdoctor.place.bench import Bench, NoPlace, side
from kvdoctor.place.flat import FlatNode
from kvdoctor.place.pairs import Graph, chunks, partners, taken

MOST_BYTES = 48 << 20
"""What the values of one portion may take, on each side."""

MOST_VALUES = 600
MOST_PATCHES = 8
SUDDEN = 20.0
"""How much farther than what goes in a result must be off to count as the place, not as rounding that adds up."""

Take = list[list[int] | None]


@dataclass(frozen=True)
class Sides:
    """The two calls: graphs, feeds, the names of the logits, and sizes in tokens and sequences.

    `caches` gives the past inputs and the value of the other graph that holds the same entries. `passes` is the largest
    difference, as a fraction of the spread, that is none.
    """

    left: Graph
    right: Graph
    left_feeds: Path
    right_feeds: Path
    logits: tuple[str, str]
    new: int
    total: int
    batch: int
    passes: float
    caches: Mapping[str, tuple[str, Take]] = field(default_factory=dict)


@dataclass(frozen=True)
class Parted:
    """What the comparison found.

    `node` is where the runs part and `value` what it makes, off by `relative` of its spread; `sudden` says that what
    was said and goes in is not. `root` is the value behind it which, put right, makes the logits right, None where no
    single one does; `numbers` are short integers of that one on both sides. `compared` of `values` values of what was
    said had a partner. `equal` are those that go in and do not differ.
    """

    node: FlatNode | None
    value: str
    relative: float
    sudden: bool
    root: str | None
    numbers: tuple[list[int], list[int]] | None
    compared: int
    values: int
    equal: tuple[str, ...] = ()


@dataclass
class Parting:
    """The search over two calls."""

    bench: Bench
    sides: Sides

    def __post_init__(self) -> None:
        self.found: dict[str, dict[str, Any]] = {}
        self.pairs: dict[str, tuple[str, Take]] = {}

    def search(self) -> Parted | None:
        """Find the place; None where nothing that was said differs, the logits included.

        Raises:
            NoPlace: it cannot be found.
            TrialFailed: the runtime does not run the graph with other outputs.
        """
        left = self.sides.left
        listed = partners(left, self.sides.right)
        self.pairs = dict(self.sides.caches) | self._comparable(listed)
        order = [name for node in left.flat.nodes for name in node.makes if name in self.pairs]
        order = [*self.sides.caches, *order]
        if self.sides.logits[0] not in self.pairs:
            raise NoPlace("the logits of the two runs do not correspond")
        first = self._first(order)
        if first is None:
            return None
        node = left.flat.producers.get(first)
        root = self._root(first)
        numbers = self.found[root] if root is not None else {}
        return Parted(
            node=node,
            value=first,
            relative=self.found[first]["relative"],
            sudden=self._sudden(first),
            root=root,
            numbers=(numbers["got"], numbers["wanted"]) if "got" in numbers else None,
            compared=sum(name in left.spoken and name in left.flat.producers for name in order),
            values=sum(name in left.spoken for node in left.flat.nodes for name in node.makes),
            equal=tuple(n for n in (node.reads if node else ()) if n in self.found and not self._differs(n)),
        )

    def differing_caches(self) -> list[str]:
        """The pasts that were fed and are not what the other run keeps."""
        return [name for name in self.sides.caches if self._differs(name)]

    def holders(self, value: str, take: Take) -> list[str]:
        """The pasts that hold the first entries of what the other run has for a value."""
        sides = self.sides
        names, other = list(sides.caches), self.pairs[value][0]
        left = self.bench.variant(sides.left.flat, sides.left.source, values=names)
        right = self.bench.variant(sides.right.flat, sides.right.source, values=[other])
        pairs = [(left.outputs[name], right.outputs[other], take) for name in names]
        told = self.bench.compare(side(left, sides.left_feeds), side(right, sides.right_feeds), pairs)
        return [
            name for name, facts in zip(names, told, strict=True) if facts and 0 <= facts["relative"] <= sides.passes
        ]

    def _comparable(self, listed: list[tuple[str, str]]) -> dict[str, tuple[str, Take]]:
        """The pairs whose sizes show which entries correspond."""
        sides, fit = self.sides, dict[str, tuple[str, Take]]()
        own = self.bench.sizes(sides.left.flat, sides.left.source, [one for one, _ in listed], sides.left_feeds)
        whole = self.bench.sizes(sides.right.flat, sides.right.source, [two for _, two in listed], sides.right_feeds)
        self.sizes = own
        for one, two in listed:
            if one in own and two in whole:
                rules = taken(own[one], whole[two], sides.new, sides.total, sides.batch)
                if rules is not None and (any(rules) or len(own[one]) > 1 or one == sides.logits[0]):
                    fit[one] = (two, rules)
        return fit

    def _first(self, order: list[str]) -> str | None:
        """Compare portion after portion, until one holds a sudden difference of what was said; else the first one."""
        spoken, gradual = self.sides.left.spoken, None
        needed = [(index, 8 * prod(self.sizes.get(name, (1,)))) for index, name in enumerate(order)]
        for portion in chunks(needed, MOST_BYTES, MOST_VALUES):
            names = [order[index] for index in portion]
            self._compare(names)
            for name in names:
                if name in spoken and self._differs(name) and "got" not in self.found[name]:
                    if self._sudden(name):
                        return name
                    gradual = gradual or name
        return gradual

    def _counts(self, name: str) -> bool:
        """Whether a value is wrong, and not only another length: integers must belong to single tokens."""
        return self._differs(name) and ("got" not in self.found[name] or any(self.pairs[name][1]))

    def _compare(self, names: list[str]) -> None:
        sides = self.sides
        left = self.bench.variant(sides.left.flat, sides.left.source, values=names)
        others = list(dict.fromkeys(self.pairs[name][0] for name in names))
        right = self.bench.variant(sides.right.flat, sides.right.source, values=others)
        pairs = [(left.outputs[n], right.outputs[self.pairs[n][0]], self.pairs[n][1]) for n in names]
        told = self.bench.compare(side(left, sides.left_feeds), side(right, sides.right_feeds), pairs)
        self.found |= {name: facts for name, facts in zip(names, told, strict=True) if facts is not None}

    def _differs(self, name: str) -> bool:
        facts = self.found.get(name)
        return facts is not None and not 0 <= facts["relative"] <= self.sides.passes

    def _sudden(self, name: str) -> bool:
        """Whether a value is much farther off than what was said that goes in."""
        node, spoken = self.sides.left.flat.producers.get(name), self.sides.left.spoken
        given = [self.found[n] for n in (node.reads if node else ()) if n in spoken and n in self.found]
        reads = [facts["relative"] for facts in given if "got" not in facts]
        own = float(self.found[name]["relative"])
        return min(reads, default=0.0) >= 0 and (own < 0 or own > SUDDEN * max(reads, default=0.0))

    def _root(self, first: str) -> str | None:
        """Of a value and all it is made of that differs: the first one that, put right, makes the logits right."""
        if first == self.sides.logits[0]:
            return None
        flat, found = self.sides.left.flat, {first}
        waiting = [first]
        while waiting:
            node = flat.producers.get(waiting.pop())
            reads = {n for n in (node.reads if node else ()) if n in self.pairs and self._counts(n)} - found
            found |= reads
            waiting += reads
        ordered = [name for node in flat.nodes for name in node.makes if name in found]
        tried = [*[n for n in found if n not in flat.producers], *ordered][:MOST_PATCHES]
        return next((name for name in dict.fromkeys([*tried, first]) if self._mended(name)), None)

    def _mended(self, name: str) -> bool:
        """Whether the logits are right where one value is replaced by what the other run has."""
        sides, (other, rules) = self.sides, self.pairs[name]
        kind = element_type(self.found[name]["dtype"])
        given = {name: kind} if name in sides.left.flat.producers else {}
        left = self.bench.variant(sides.left.flat, sides.left.source, values=[sides.logits[0]], given=given)
        right = self.bench.variant(sides.right.flat, sides.right.source, values=[other, sides.logits[1]])
        two, take = self.pairs[sides.logits[0]]
        pairs = [(left.outputs[sides.logits[0]], right.outputs[two], take)]
        inject = [(name, right.outputs[other], rules)]
        told = self.bench.compare(side(left, sides.left_feeds), side(right, sides.right_feeds), pairs, inject)
        return bool(told[0] is not None and 0 <= told[0]["relative"] <= self.sides.passes)


def element_type(dtype: str) -> int:
    """The number of an element type in ONNX words."""
    return int(TensorProto.DataType.Value(dtype.upper()))
