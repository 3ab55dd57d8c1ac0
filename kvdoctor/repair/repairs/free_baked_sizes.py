"""Frees lengths that the graph declares as open but that numbers inside it fix.

Requires: a step that fails (`step-fails`, `chunk-fails`) in a graph in which a length meets a number that it cannot
equal: in a Reshape, an Expand, an addition, a concatenation. The traced length is found by trial: with the right one,
no conflict is left.
Ensures: the numbers that stood for the length are computed from the shapes of the inputs, or copied from the data; at
the traced sizes every output is equal to the original's, bit for bit.
"""

from collections.abc import Iterator
from dataclasses import field
from functools import partial

from kvdoctor.contract import Axis, Graph
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.traverse import name_node
from kvdoctor.records import record
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.shapes.agreement import compare_with_original, find_graph, list_changes
from kvdoctor.repair.shapes.freeing import AxisFreeing, Edit, Values, read_declared_sizes
from kvdoctor.repair.shapes.terms import CHOSEN, CannotFree, read_lengths
from kvdoctor.repair.workspace import Change, RepairContext

CHECKS = ("step-fails", "chunk-fails")


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Free the baked-in lengths of each file in which a step fails."""
    made: tuple[Change, ...] = ()
    for file in context.files_of(*CHECKS):
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


ADVICE = ("Without a change to the model: only calls at the traced sizes work.",)
REPAIR = Repair("free-baked-sizes", CHECKS, "axes", "bits", apply, ADVICE)
