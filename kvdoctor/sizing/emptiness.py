"""Reshapes that fail, or mean something else, where the past has length 0."""

from kvdoctor.contract import Graph
from kvdoctor.onnx_schema import ModelProto
from kvdoctor.sizing.freeing import Edit, Freeing, declared_now, mean_zero, place_of
from kvdoctor.sizing.lengths import lengths_of
from kvdoctor.sizing.reshapes import written
from kvdoctor.sizing.terms import Term, whole
from kvdoctor.sizing.walk import Reshaped
from kvdoctor.sizing.writing import Writer

EMPTY = frozenset(("past",))


def make_room(model: ModelProto, graph: Graph) -> tuple[Edit, ...]:
    """Write the targets of such Reshapes so that they hold for an empty past as well, in place.

    Raises:
        NotFreed: a target would have to mean 0 by a 0, which the opset cannot.
    """
    reading = Freeing(model, lengths_of(graph, declared_now(model)))
    writer, edits = Writer(model, reading.lengths), list[Edit]()
    for one in reading.walk.reshapes.values():
        allowzero = any(a.name == "allowzero" and a.i for a in one.node.attribute)
        broken = next((said for said in one.said if not holds_empty(one, said, allowzero, reading)), None)
        if broken is None:
            continue
        target = written(one.into, one.out, allowzero, EMPTY)
        if target.allowzero and not allowzero:
            mean_zero(one.node, writer.opset)
        one.node.input[1] = writer.vector(target.entries)
        before, after = (f"[{', '.join(map(str, entries))}]" for entries in (broken, target.entries))
        edits.append(Edit(f"{place_of(one.node)}, input 1", before, after))
    writer.done()
    return tuple(edits)


def holds_empty(one: Reshaped, said: tuple[Term, ...], allowzero: bool, reading: Freeing) -> bool:
    """Whether a target gives the axes that it gives at every other length, by the rules of the operator."""
    nothing = dict.fromkeys(EMPTY, whole(0))
    size = reading.ledger.size
    into, wanted, entries = ([size(t.replaced(nothing)) for t in terms] for terms in (one.into, one.out, said))
    filled = [into[i] if n == 0 and not allowzero and i < len(into) else n for i, n in enumerate(entries)]
    total, rest, guess = 1, 1, None
    for number in into:
        total *= number
    for at, number in enumerate(filled):
        if number == -1:
            guess = at
        else:
            rest *= number
    if guess is not None:
        if rest == 0 or total % rest:
            return False
        filled[guess] = total // rest
    return filled == wanted
