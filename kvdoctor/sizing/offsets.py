"""Rows of masks and numbers of tokens that are counted from 0 in steps, where the past should come first.

Where there is no past, nothing of what is changed here changes anything: the run without a cache stays what it was, and
tells whether the steps are right now.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kvdoctor.contract import Graph
from kvdoctor.graph import GraphView
from kvdoctor.onnx_schema import ModelProto, NodeProto
from kvdoctor.sizing.freeing import Edit, Freeing, declared_now, place_of
from kvdoctor.sizing.known import Dims, Site
from kvdoctor.sizing.lengths import lengths_of
from kvdoctor.sizing.terms import Term, symbol, whole
from kvdoctor.sizing.walk import Inside, Reading
from kvdoctor.sizing.writing import Writer

PAST, NEW = symbol("past"), symbol("new")
TOTAL = PAST + NEW
COMPARING = {"Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"}
NUMBERING = {"Gather", "Cos", "Sin", "Mul", "MatMul", "Einsum", "Sub", "Add"}
MOST_STEPS = 12
BEFORE = {"Range": "0 to new", "Slice": "0 to new", "Trilu": "the diagonal of the first column"}


@dataclass(frozen=True)
class Offsets:
    """The changes to one model; `of_mask` says whether those of the mask are wanted, or those of the positions."""

    reading: Freeing
    writer: Writer
    of_mask: bool

    def edits(self, skipped: Inside | None) -> Iterator[Edit]:
        """Make the changes; `skipped` is the body of a branch that takes no past."""
        for counted in self.reading.walk.counting:
            edit = None if counted.inside is skipped else self._edit(counted)
            if edit is not None:
                yield edit

    def _edit(self, r: Reading) -> Edit | None:
        changed = {"Range": self._range, "Slice": self._slice, "Trilu": self._trilu}[r.node.op_type](r)
        return Edit(place_of(r.node, r.inside.path), BEFORE[r.node.op_type], changed) if changed else None

    def _numbers(self, r: Reading, index: int) -> list[Term] | None:
        numbers: Dims | None = r.at(index).numbers
        if numbers is None or None in numbers:
            return None
        return [self.reading.settled(term) for term in numbers if term is not None]

    def _range(self, r: Reading) -> str | None:
        """0 to new, as the numbers of the new tokens."""
        start, end = self._numbers(r, 0), self._numbers(r, 1)
        if start != [whole(0)] or end != [NEW] or self._compared(r.node) != self.of_mask:
            return None
        r.node.input[0] = self._scalar(PAST, r)
        r.node.input[1] = self._scalar(TOTAL, r)
        return "past to past + new"

    def _scalar(self, term: Term, r: Reading) -> str:
        dims = tuple(r.at(0).shape or ())
        return self.writer.shaped([term], [1] * len(dims), 7)

    def _slice(self, r: Reading) -> str | None:
        """The first rows of a square table of zeros and ones, or of a table of positions."""
        data, starts, ends = r.at(0), self._numbers(r, 1), self._numbers(r, 2)
        if data.table is None or data.shape is None or starts is None or ends is None:
            return None
        axes = r.ledger.known_numbers(r.at(3)) if r.has(3) else tuple(range(len(starts)))
        rank, done = len(data.shape), list[str]()
        for at, axis in enumerate(axes or ()):
            if starts[at] != whole(0) or ends[at] != NEW:
                continue
            if axis % rank == rank - 2 and self._is_square(data.table) == self.of_mask:
                starts[at], ends[at] = PAST, TOTAL
                done.append("rows past to past + new")
            elif axis % rank == rank - 1 and self.of_mask and self._is_square(data.table):
                ends[at] = TOTAL
                done.append("columns 0 to past + new")
        if done:
            for index, terms in ((1, starts), (2, ends)):
                r.node.input[index] = self.writer.vector([n if (n := t.number) is not None else t for t in terms])
        return " and ".join(done) or None

    @staticmethod
    def _is_square(table: Site) -> bool:
        dims = tuple(table.tensor.dims)
        return len(dims) >= 2 and dims[-1] == dims[-2]

    def _trilu(self, r: Reading) -> str | None:
        """A triangle from the first column on, over more columns than rows."""
        shape = r.at(0).shape
        if not self.of_mask or r.number("upper", 1) or r.has(1) or shape is None or len(shape) < 2:
            return None
        sizes = [None if term is None else self.reading.settled(term) for term in shape[-2:]]
        if sizes != [NEW, TOTAL]:
            return None
        del r.node.input[1:]
        r.node.input.append(self.writer.shaped([PAST], [], 7))
        return "the diagonal of the past"

    def _compared(self, node: NodeProto) -> bool:
        """Whether what a node makes ends in a comparison, as a mask does, before it numbers anything."""
        readers, front = self._readers(), list(node.output)
        for _ in range(MOST_STEPS):
            following = [reader for name in front for reader in readers.get(name, ())]
            if any(reader.op_type in COMPARING for reader in following):
                return True
            front = [name for reader in following if reader.op_type not in NUMBERING for name in reader.output]
        return False

    def _readers(self) -> dict[str, list[NodeProto]]:
        found = dict[str, list[NodeProto]]()
        for node in self.reading.walk.keep:
            for name in node.input:
                found.setdefault(name, []).append(node)
        return found


def offset(model: ModelProto, graph: Graph, of_mask: bool, only_clashing: bool = False) -> tuple[Edit, ...]:
    """Count from the past on what is counted from 0, in place; with `only_clashing` where sizes cannot agree."""
    lengths = lengths_of(graph, declared_now(model))
    if not {"past", "new"} <= set(lengths.traced):
        return ()
    reading = Freeing(model, lengths)
    if only_clashing and not reading.clashes:
        return ()
    writer = Writer(model, lengths)
    branches = GraphView(model).branches
    skipped = None if branches is None else reading.walk.scopes.get(id(branches[1].no_past.graph))
    edits = tuple(Offsets(reading, writer, of_mask).edits(skipped))
    writer.done()
    return edits
