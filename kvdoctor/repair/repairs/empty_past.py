"""Makes Reshapes accept a past of length 0.

Requires: `empty-past-rejected`, and a Reshape whose target is undefined or refers to another axis if the past is empty:
a -1 together with a 0, or a computed 0 that the operator takes for "copy this axis".
Ensures: the target gives the same axes for an empty past as for every other length; nothing else is changed.
"""

import math

from kvdoctor.contract import Graph
from kvdoctor.model.proto import ModelProto
from kvdoctor.model.traverse import describe_node
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.shapes.agreement import compare_with_original, find_graph, list_changes
from kvdoctor.repair.shapes.facts import WalkedReshape
from kvdoctor.repair.shapes.freeing import AxisFreeing, Edit, read_declared_sizes, set_allowzero
from kvdoctor.repair.shapes.reshapes import write_target
from kvdoctor.repair.shapes.terms import EXPORT_AGAIN, Term, read_lengths, whole
from kvdoctor.repair.shapes.writing import Writer
from kvdoctor.repair.workspace import Change, RepairContext


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Rewrite the targets of such Reshapes in the graph of the first step."""
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


ADVICE = ("Feed the first step a past of one row that the attention mask hides, if the model has a mask.",)
REPAIR = Repair("empty-past", ("empty-past-rejected",), "axes", "bits", apply, ADVICE)
