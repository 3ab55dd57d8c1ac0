"""Repairs of sizes that are fixed: lengths that the graph declares or bakes in, and an empty past."""

import math
from collections.abc import Iterator
from dataclasses import field
from functools import partial

from kvdoctor.contract import Axis, Graph
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.traverse import describe_node, name_node
from kvdoctor.records import record
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.shapes.agreement import compare_with_original, find_graph, free_axis, list_changes
from kvdoctor.repair.shapes.facts import WalkedReshape
from kvdoctor.repair.shapes.freeing import AxisFreeing, Edit, Values, read_declared_sizes, set_allowzero
from kvdoctor.repair.shapes.reshapes import write_target
from kvdoctor.repair.shapes.terms import CHOSEN, EXPORT_AGAIN, CannotFree, Term, read_lengths, whole
from kvdoctor.repair.shapes.writing import Writer
from kvdoctor.repair.workspace import Change, RepairContext

FAILING = ("step-fails", "chunk-fails")


def free_baked_sizes(context: RepairContext) -> tuple[Change, ...]:
    """Frees lengths that the graph declares as open but that numbers inside it fix.

    Requires: a step that fails (`step-fails`, `chunk-fails`) in a graph in which a length meets a number that it cannot
    equal: in a Reshape, an Expand, an addition, a concatenation. The traced length is found by trial: with the right
    one, no conflict is left.
    Ensures: the numbers that stood for the length are computed from the shapes of the inputs, or copied from the data;
    at the traced sizes every output is equal to the original's, bit for bit.
    """
    made: tuple[Change, ...] = ()
    for file in context.files_of(*FAILING):
        found = free_baked_lengths(context.model(file), find_graph(context, file), partial(context.values, file))
        compare_with_original(context, file, found.traced)
        made += list_changes(file, found.edits)
    return made


MOST_LENGTHS = 3
MOST_NUMBER = 4096
"""Larger numbers are widths and vocabularies."""


@record(slots=False)
class FreedSizes:
    """The edits, and the sizes at which the graph was traced."""

    edits: tuple[Edit, ...]
    traced: dict[Axis, int] = field(default_factory=dict)


def free_baked_lengths(model: ModelProto, graph: Graph, values: Values) -> FreedSizes:
    """Free the lengths that numbers inside a model fix, in place.

    Raises:
        CannotFree: no number conflicts with a length, or the graph does not tell which length is meant.
    """
    supposed, current = dict[Axis, int](), _walk_supposing(model, graph, {}, values)
    if not current.conflicts:
        text = "no number in the graph conflicts with a length that it declares as open"
        for node, size in sorted(current.walk.notes.ends, key=lambda end: end[1])[:1]:
            text += f'; Slice "{name_node(node)}" takes rows of a table that has {size}'
            text += ", and further rows are not in the file"
        raise CannotFree(text)
    while current.conflicts and len(supposed) < MOST_LENGTHS:
        tried = [(more, _walk_supposing(model, graph, more, values)) for more in _suggest_sizes(current, supposed)]
        better = [(more, one) for more, one in tried if len(one.conflicts) < len(current.conflicts)]
        if not better:
            break
        supposed, current = min(better, key=lambda two: (len(two[1].conflicts), len(two[1].facts.bound)))
    for conflict in current.conflicts[:1]:
        raise CannotFree(
            f'in {conflict.node.op_type} "{conflict.node.name}" {conflict.words}, and no traced length explains it'
        )
    return FreedSizes(current.run(), supposed)


def _walk_supposing(model: ModelProto, graph: Graph, sizes: dict[Axis, int], values: Values) -> AxisFreeing:
    return AxisFreeing(model, read_lengths(graph, read_declared_sizes(model), supposed=sizes), values)


def _suggest_sizes(current: AxisFreeing, supposed: dict[Axis, int]) -> Iterator[dict[Axis, int]]:
    """Traced sizes that the conflicts suggest: each number that meets a length, for each length that it meets."""
    seen = set[tuple[Axis, int]]()
    for conflict in current.conflicts:
        numbers = sorted({n for term in conflict.sizes if (n := term.number) is not None and 0 < n <= MOST_NUMBER})
        symbols = {name for term in conflict.sizes for name in term.symbols}
        factors = {str(q) for a in conflict.sizes for b in conflict.sizes if a != b and (q := a.divided(b)) is not None}
        for kind in (kind for kind in CHOSEN if kind in symbols and kind not in supposed):
            # One size is a multiple of the other by a length: that length was 1.
            for number in dict.fromkeys([*numbers, *([1] if kind in factors else [])]):
                if (kind, number) not in seen:
                    seen.add((kind, number))
                    yield {**supposed, kind: number}


TRACED_ADVICE = ("Without a change to the model: only calls at the traced sizes work.",)


TITLE = "Frees {} if it is declared or baked into the graph as a number."
FREED: tuple[tuple[str, str, Axis, str], ...] = (
    ("free-batch", "batch-axis-frozen", "batch", TITLE.format("the number of sequences")),
    ("free-past", "past-axis-frozen", "past", TITLE.format("the length of the past")),
    ("free-sequence", "sequence-axis-frozen", "new", TITLE.format("the number of new tokens")),
)
LENGTH_ADVICE = ("Without a change to the model: only steps at exactly that length work.",)


def accept_empty(context: RepairContext) -> tuple[Change, ...]:
    """Makes Reshapes accept a past of length 0.

    Requires: `empty-past-rejected`, and a Reshape whose target is undefined or refers to another axis if the past is
    empty: a -1 together with a 0, or a computed 0 that the operator takes for "copy this axis".
    Ensures: the target gives the same axes for an empty past as for every other length; nothing else is changed.
    """
    file = context.file_of("prefill")
    edits = accept_empty_past(context.model(file), find_graph(context, file))
    if not edits:
        context.cannot(
            "no Reshape fails for an empty past, and operators that do cannot be changed to accept one", EXPORT_AGAIN
        )
    compare_with_original(context, file)
    return list_changes(file, edits)


EMPTY = frozenset(("past",))


def accept_empty_past(model: ModelProto, graph: Graph) -> tuple[Edit, ...]:
    """Rewrite the targets of such Reshapes in place, so that they are right for an empty past as well.

    Raises:
        CannotFree: a 0 in a target would have to mean 0, which the opset does not support.
    """
    reading = AxisFreeing(model, read_lengths(graph, read_declared_sizes(model)))
    writer, edits = Writer(model, reading.lengths), list[Edit]()
    for one in reading.walk.notes.reshapes.values():
        allowzero = any(a.name == "allowzero" and a.i for a in one.node.attribute)
        broken = next((said for said in one.targets if not is_right_when_empty(one, said, allowzero, reading)), None)
        if broken is None:
            continue
        target = write_target(one.into, one.out, allowzero, EMPTY)
        if target.allowzero and not allowzero:
            set_allowzero(one.node, writer.opset)
        one.node.input[1] = writer.vector(target.entries)
        before, after = (f"[{', '.join(map(str, entries))}]" for entries in (broken, target.entries))
        edits.append(Edit(f"{describe_node(one.node)}, input 1", before, after))
    writer.done()
    return tuple(edits)


def is_right_when_empty(one: WalkedReshape, said: tuple[Term, ...], allowzero: bool, reading: AxisFreeing) -> bool:
    """Whether a target gives the right axes for an empty past, by the rules of the operator."""
    nothing = dict.fromkeys(EMPTY, whole(0))
    size = reading.facts.size
    into, wanted, entries = ([size(t.replaced(nothing)) for t in terms] for terms in (one.into, one.out, said))
    filled = [into[i] if n == 0 and not allowzero and i < len(into) else n for i, n in enumerate(entries)]
    if -1 in filled:
        total, rest = math.prod(into), -math.prod(filled)
        if rest == 0 or total % rest:
            return False
        filled[filled.index(-1)] = total // rest
    return filled == wanted


HIDDEN_ROW_ADVICE = ("Feed the first step a past of one row that the attention mask hides, if the model has a mask.",)


REPAIRS = (
    Repair("free-baked-sizes", FAILING, "axes", "bits", free_baked_sizes, TRACED_ADVICE),
    *(
        Repair(name, (check,), "axes", "sizes", partial(free_axis, check=check, kind=kind), LENGTH_ADVICE, title)
        for name, check, kind, title in FREED
    ),
    Repair("empty-past", ("empty-past-rejected",), "axes", "bits", accept_empty, HIDDEN_ROW_ADVICE),
)
