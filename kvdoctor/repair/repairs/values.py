"""Repairs of wrong computations: where counting begins, and constants that are infinite."""

import math
from collections.abc import Iterator
from functools import partial

from kvdoctor.analysis.proof.types import Term, symbol
from kvdoctor.analysis.proof.types import number as whole
from kvdoctor.analysis.thresholds import SlicedCount, find_sliced_counts
from kvdoctor.contract import Graph
from kvdoctor.model.edit import describe_graph, drop_unused, new_name, sort_nodes
from kvdoctor.model.operators import has, operators_with
from kvdoctor.model.proto import ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import describe_node, input_of, nodes_in, output_of
from kvdoctor.model.view import GraphView, Scope
from kvdoctor.records import record
from kvdoctor.repair.repairs.axes import find_graph
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.shapes.facts import Dims, NodeInputs
from kvdoctor.repair.shapes.freeing import AxisFreeing, describe_place, read_declared_sizes
from kvdoctor.repair.shapes.terms import EXPORT_AGAIN, read_lengths
from kvdoctor.repair.shapes.writing import Writer
from kvdoctor.repair.workspace import Change, RepairContext

PAST, NEW = symbol("past"), symbol("new")
TOTAL = PAST + NEW
NUMBERING = operators_with("embed", "wave", "scale", "product", "add", "subtract")
MOST_STEPS = 12


@record(slots=False)
class Offsets:
    """The changes to one model: those of the mask if `of_mask`, otherwise those of the positions."""

    reading: AxisFreeing
    writer: Writer
    of_mask: bool

    def changes(self, cached: set[int]) -> Iterator[Change]:
        """Make the changes, at the nodes with these ids: those that run in steps with a past alone."""
        for counted in self.reading.walk.notes.counting:
            if id(counted.node) in cached and (change := self._change(counted)) is not None:
                yield change

    def _change(self, r: NodeInputs) -> Change | None:
        before, change = {
            "Range": ("0 to new", self._range),
            "Slice": ("0 to new", self._slice),
            "Trilu": ("the diagonal at 0", self._trilu),
        }[r.node.op_type]
        changed = change(r)
        where = describe_place(r.node, r.scope.path)
        return Change(self.reading.lengths.file, where, before, changed) if changed else None

    def _settle(self, numbers: Dims | None) -> list[Term] | None:
        if numbers is None or None in numbers:
            return None
        return [self.reading.settled(term) for term in numbers if term is not None]

    def _range(self, r: NodeInputs) -> str | None:
        """A Range from 0 to the number of new tokens."""
        start, end = (self._settle(r.at(index).numbers) for index in (0, 1))
        if start != [whole(0)] or end != [NEW] or self._compared(r.node) != self.of_mask or self._is_offset(r):
            return None
        for index, term in enumerate((PAST, TOTAL)):
            r.node.input[index] = self.writer.shaped([term], [1] * len(r.at(0).shape or ()), 7)
        return "past to past + new"

    def _slice(self, r: NodeInputs) -> str | None:
        """The first rows of a square table of zeros and ones, or of a table of positions."""
        data, (starts, ends) = r.at(0), (self._settle(r.at(index).numbers) for index in (1, 2))
        if data.table is None or data.shape is None or starts is None or ends is None:
            return None
        axes = r.facts.known_numbers(r.at(3)) if r.has(3) else tuple(range(len(starts)))
        rank, done = len(data.shape), list[str]()
        for at, axis in enumerate(axes or ()):
            if starts[at] != whole(0) or ends[at] != NEW:
                continue
            square = tuple(data.table.tensor.dims[-2:])[:-1] == tuple(data.table.tensor.dims[-1:])
            if axis % rank == rank - 2 and square == self.of_mask:
                starts[at], ends[at] = PAST, TOTAL
                done.append("rows past to past + new")
            elif axis % rank == rank - 1 and self.of_mask and square:
                ends[at] = TOTAL
                done.append("columns 0 to past + new")
        if done:
            for index, terms in ((1, starts), (2, ends)):
                r.node.input[index] = self.writer.vector([n if (n := t.number) is not None else t for t in terms])
        return " and ".join(done) or None

    def _trilu(self, r: NodeInputs) -> str | None:
        """A triangle from the first column on, over more columns than rows."""
        shape = r.at(0).shape
        if not self.of_mask or r.number("upper", 1) or r.has(1) or shape is None or len(shape) < 2:
            return None
        sizes = [None if term is None else self.reading.settled(term) for term in shape[-2:]]
        if sizes != [NEW, TOTAL]:
            return None
        del r.node.input[1:]
        r.node.input.append(self.writer.shaped([PAST], [], 7))
        return "the diagonal at the past length"

    def _compared(self, node: NodeProto) -> bool:
        """Whether the output of a node ends in a comparison, as a mask does, before it is used as a position."""
        readers, front = self._readers(), list(node.output)
        for _ in range(MOST_STEPS):
            following = [reader for name in front for reader in readers.get(name, ())]
            if any(has(reader.op_type, "compare") for reader in following):
                return True
            front = [name for reader in following if reader.op_type not in NUMBERING for name in reader.output]
        return False

    def _is_offset(self, r: NodeInputs) -> bool:
        """Whether the past is added to the numbers right after the node: they need no other start."""
        readers, front = self._readers(), list(r.node.output)
        for name in front:
            for reader in readers.get(name, ()):
                if has(reader.op_type, "copy", "cast", "view"):
                    front += reader.output
                elif has(reader.op_type, "add"):
                    others = (r.scope.known(other) for other in reader.input if other != name)
                    if any(known is not None and self._settle(known.numbers) == [PAST] for known in others):
                        return True
        return False

    def _readers(self) -> dict[str, list[NodeProto]]:
        found = dict[str, list[NodeProto]]()
        for node in self.reading.walk.keep:
            for name in node.input:
                found.setdefault(name, []).append(node)
        return found


def offset(model: ModelProto, graph: Graph, of_mask: bool, only_clashing: bool = False) -> tuple[Change, ...]:
    """Count from the past on, in place, instead of from 0; with `only_clashing` only if sizes conflict."""
    lengths = read_lengths(graph, read_declared_sizes(model))
    if not {"past", "new"} <= set(lengths.traced):
        return ()
    reading = AxisFreeing(model, lengths)
    if only_clashing and not reading.conflicts:
        return ()
    writer = Writer(model, lengths)
    # Around the branches there is a past in the first step too: whatever a loop feeds as its placeholder.
    cached = {id(node) for body in GraphView(model).cached_bodies() for node in nodes_in(body.graph.node)}
    changes = tuple(Offsets(reading, writer, of_mask).changes(cached))
    writer.done()
    return changes


def count_from_past(context: RepairContext, of_mask: bool) -> tuple[Change, ...]:
    """Counts the rows of a causal mask, or positions, from the length of the past on.

    Requires: for the mask, `mask-not-offset`, or `chunk-fails` if the mask has a column for each new token alone; and a
    graph that takes the first rows of a square table, counts rows from 0 to compare them with columns, or cuts a
    triangle from the first column on, while its columns are those of the whole cache. For the positions,
    `positions-not-offset`, and a graph that numbers its new tokens by a Range from 0, or takes the first rows of a
    table of positions.
    Ensures: rows and positions are counted from the length of the past on. Without a past that changes nothing, so the
    run without a cache keeps its logits, and the steps can be compared with it.
    """
    file = context.file_of("decode")
    failing = of_mask and not context.found("mask-not-offset")
    changes = offset(context.model(file), find_graph(context, file), of_mask, only_clashing=failing)
    if not changes:
        counted = "the rows of a mask" if of_mask else "positions"
        context.cannot(f"no node of the graph counts {counted} from 0", EXPORT_AGAIN)
    return changes


INSTEAD = "export again with position_ids as an input and masks made from attention_mask"


def count_whole(context: RepairContext) -> tuple[Change, ...]:
    """Counts the padding along the whole mask, and cuts the counts to the new tokens afterwards.

    Requires: positions from which a count of padding is subtracted, in a graph that cuts attention_mask to the columns
    of the new tokens before it counts along them.
    Ensures: the count begins at the first column. Without a past both are the same, so the prefill is as it was.
    """
    file = context.file_of("decode")
    mask, model = context.drivable.graph("decode").port("attention_mask"), context.model(file)
    changes = []
    while mask is not None and (found := next(find_sliced_counts(GraphView(model), mask.name), None)) is not None:
        where = f"{describe_graph(GraphView(model), found.scope.graph)}, {describe_node(found.count)}"
        changes.append(
            Change(file, where, "counts the columns of the new tokens", "counts all columns, cut afterwards")
        )
        _move_cut(model, found)
    if not changes:
        context.cannot("no count of padding sees the columns of the new tokens alone", INSTEAD)
    return tuple(changes)


def _move_cut(model: ModelProto, found: SlicedCount) -> None:
    graph, cut = found.scope.graph, NodeProto.FromString(found.cut.SerializeToString())
    old, value = output_of(found.cut), input_of(found.cut, 0)
    before, output = input_of(found.count, 0), output_of(found.count)
    for node in reversed(found.between):
        copy = NodeProto.FromString(node.SerializeToString())
        copy.input[:] = [value if name == old else name for name in node.input]
        old, value = output_of(node), new_name(model, f"{output_of(node)}.whole")
        copy.name, copy.output[0] = value, value
        graph.node.append(copy)
    counted = new_name(model, f"{output}.whole")
    found.count.input[0], found.count.output[0] = value, counted
    cut.name, cut.input[0], cut.output[0] = new_name(model, f"{output}.cut"), counted, output
    graph.node.append(cut)
    drop_unused(graph, before)
    sort_nodes(graph)


FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
PRODUCTS = operators_with("scale", "product")
MOST_VALUES = 64

IN_FLOAT32 = "export again in float32, and check that the checkpoint's own weights are finite"


def make_finite(context: RepairContext) -> tuple[Change, ...]:
    """Replaces infinite constants by the largest finite numbers.

    Requires: `non-finite`, in a graph with a constant of one or a few infinite values. Zero times infinity is not a
    number, and neither is the softmax of a row that is -inf throughout; with the largest finite number the first is
    zero and the second the mean. If the constant is multiplied or divided somewhere, only those inputs are changed.
    Ensures: such constants are finite where they are read; everything else stays as it is.
    """
    files = dict.fromkeys(file for _, file in context.graphs())
    found = [(file, *read) for file in files for read in _find_infinite(context, file)]
    if not found:
        context.cannot("no constant is infinite: the numbers become infinite during the computation", IN_FLOAT32)
    products = [one for one in found if one[2].op_type in PRODUCTS]
    return tuple(_make_finite(context, *one) for one in products or found)


def _find_infinite(context: RepairContext, file: str) -> Iterator[tuple[Scope, NodeProto, int]]:
    import numpy as np

    for scope in context.view(file).scopes():
        for node in scope.graph.node:
            for at, name in enumerate(node.input if not has(node.op_type, "copy") else ()):
                tensor = scope.constant(name) if name else None
                if tensor is None or tensor.data_type not in FLOATS or math.prod(tensor.dims) > MOST_VALUES:
                    continue
                if np.isinf(context.values(file, tensor)).any():
                    yield scope, node, at


def _make_finite(context: RepairContext, file: str, scope: Scope, node: NodeProto, at: int) -> Change:
    import numpy as np
    from onnx import numpy_helper

    tensor = scope.constant(node.input[at])
    if tensor is None:
        context.cannot(f"{node.input[at]!r} is no longer a constant")
    values = context.values(file, tensor)
    limits = np.finfo(values.dtype)
    clipped, name = np.clip(values, limits.min, limits.max), f"{node.input[at]}.finite"
    if all(one.name != name for one in scope.graph.initializer):
        scope.graph.initializer.append(numpy_helper.from_array(clipped, name))
    node.input[at] = name
    before, after = (str(some.ravel()[:4].tolist()) for some in (values, clipped))
    return Change(file, f"{describe_node(node)}, input {at}", before, after)


SAME_LENGTH_ADVICE = ("Without a change to the model: decode only sequences of the same length together.",)
MASK_ADVICE = ("Without a change to the model: no row of a mask may hide every token.",)


REPAIRS = (
    Repair(
        "offset-mask",
        ("mask-not-offset", "chunk-fails"),
        "values",
        "first-step",
        partial(count_from_past, of_mask=True),
        ("Without a change to the model: after the first step, feed one new token at a time.",),
        title="Counts the rows of a causal mask from the length of the past on.",
    ),
    Repair(
        "offset-positions",
        ("positions-not-offset",),
        "values",
        "first-step",
        partial(count_from_past, of_mask=False),
        title="Counts positions from the length of the past on.",
    ),
    Repair("whole-counts", ("padding-changes-logits",), "values", "first-step", count_whole, SAME_LENGTH_ADVICE),
    Repair("finite-constants", ("non-finite",), "values", "first-step", make_finite, MASK_ADVICE),
)
