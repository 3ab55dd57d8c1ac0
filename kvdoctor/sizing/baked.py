"""Lengths that a graph declares to be of any size, and that numbers inside it hold at one.

At which number is not declared, so it is tried: where a length and a number meet that cannot be the same, the length
is supposed to have been that number when the graph was traced. The right supposition leaves nothing that clashes.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvdoctor.contract import Axis, Graph
from kvdoctor.onnx_schema import ModelProto
from kvdoctor.sizing.freeing import Edit, Freeing, NotFreed, Values, declared_now
from kvdoctor.sizing.lengths import CHOSEN, lengths_of

MOST_LENGTHS = 3
MOST_NUMBER = 4096
"""Larger numbers are widths and vocabularies."""


@dataclass(frozen=True)
class Unbaked:
    """What was changed, and at which sizes the graph had been traced."""

    edits: tuple[Edit, ...]
    traced: dict[Axis, int] = field(default_factory=dict)


def unbake(model: ModelProto, graph: Graph, values: Values) -> Unbaked:
    """Free the lengths that numbers inside a model hold, in place.

    Raises:
        NotFreed: nothing inside clashes with a length, or nothing tells which is meant.
    """
    supposed, current = dict[Axis, int](), _suppose(model, graph, {}, values)
    if not current.clashes:
        raise NotFreed(_no_clash(current))
    while current.clashes and len(supposed) < MOST_LENGTHS:
        tried = [(more, _suppose(model, graph, more, values)) for more in _more(current, supposed)]
        better = [(more, one) for more, one in tried if len(one.clashes) < len(current.clashes)]
        if not better:
            break
        supposed, current = min(better, key=lambda two: (len(two[1].clashes), len(two[1].ledger.bound)))
    for clash in current.clashes[:1]:
        raise NotFreed(f'in {clash.node.op_type} "{clash.node.name}" {clash.words}, and no length explains it')
    return Unbaked(current.run(), supposed)


def _no_clash(current: Freeing) -> str:
    text = "no number in the graph clashes with a length that it declares to be of any size"
    if not current.walk.ends:
        return text
    node, size = min(current.walk.ends, key=lambda end: end[1])
    cut = f'Slice "{node.name or node.output[0]}" cuts from a table that ends at {size}'
    return f"{text}; {cut}, and what comes behind is not in the file"


def _suppose(model: ModelProto, graph: Graph, sizes: dict[Axis, int], values: Values) -> Freeing:
    return Freeing(model, lengths_of(graph, declared_now(model), supposed=sizes), values)


def _more(current: Freeing, supposed: dict[Axis, int]) -> Iterator[dict[Axis, int]]:
    """Suppositions that the clashes suggest: each number that meets a length, for each length that it meets."""
    seen = set[tuple[Axis, int]]()
    for clash in current.clashes:
        numbers = sorted({n for term in clash.sizes if (n := term.number) is not None and 0 < n <= MOST_NUMBER})
        symbols = {name for term in clash.sizes for name in term.symbols}
        factors = {str(q) for a in clash.sizes for b in clash.sizes if a != b and (q := a.divided(b)) is not None}
        for kind in (kind for kind in CHOSEN if kind in symbols and kind not in supposed):
            # One size that is a multiple of the other by a length: that length was 1.
            for number in dict.fromkeys([*numbers, *([1] if kind in factors else [])]):
                if (kind, number) not in seen:
                    seen.add((kind, number))
                    yield {**supposed, kind: number}
