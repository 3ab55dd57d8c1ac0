"""Constants that may hold the mask of an attention, and whose numbers an abstract run does not know.

A table of floats that is added to the scores may be a relative bias, a mask, or both in one: ALiBi with -1e9 for later
tokens. In an abstract run it is uniform, one number everywhere, and hides nothing. A run that finds a token seeing
later ones then tells nothing about the model.
"""

from collections.abc import Collection, Iterable
from math import prod

from kvdoctor.analysis.dataflow.operators import SOFTMAX
from kvdoctor.model.proto import GraphProto, NodeProto
from kvdoctor.model.traverse import nodes_in, subgraphs
from kvdoctor.model.view import GraphView
from kvdoctor.model.weights import list_tensors

BIASES = {
    **dict.fromkeys(SOFTMAX, (0,)),
    "BiasSoftmax": (0, 1),
    "Attention": (3, 5),
    "MultiHeadAttention": (4, 5),
    "GroupQueryAttention": (10,),
    "Exp": (0,),
}
"""Operators of an attention, with the inputs that scores, masks and biases come in by. Exp is part of a Softmax that is
written out, or of something else: before it only a table counts that rows or columns are cut out of."""

CUTTING = ("Slice", "Gather", "GatherElements", "GatherND", "Split", "Compress")
"""Operators that take the rows or columns of a step out of a table."""

PASSING = (
    *("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Min", "Max", "Sum", "Clip", "Log", "Where", "And", "Or", "Xor", "Not"),
    *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Cast", "CastLike", "Identity", "Trilu", "Dropout"),
    *("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile", "Concat", "Pad", "ScatterND", "If"),
)
"""Operators that compute with each element alone, or move it: a mask stays one."""


def may_hide(view: GraphView, unread: Iterable[str]) -> bool:
    """Whether a constant among `unread` reaches the scores of an attention, as a mask does.

    A bias of one axis that is added whole has no rows and columns, and hides nothing.
    """
    wanted = set(unread)
    sizes = {name: tuple(tensor.dims) for name, tensor in list_tensors(view) if name in wanted}
    return bool(sizes) and any(_holds_rows(sizes.get(name, ()), cut) for name, cut in _walk(view.model.graph, sizes))


def _holds_rows(dims: tuple[int, ...], cut: bool | None) -> bool:
    """Whether a table has numbers for rows or columns; it may be `cut`, or must be where that is None."""
    return prod(dims) > 1 and (bool(cut) or (cut is False and sum(size > 1 for size in dims) > 1))


def _walk(graph: GraphProto, constants: Collection[str]) -> Iterable[tuple[str, bool | None]]:
    """The constants that reach the scores of an attention: whether they were cut; None where they have to be."""
    makers: dict[str, NodeProto] = {}
    waiting: list[tuple[str, bool | None]] = []
    for node in nodes_in(graph.node):
        makers |= dict.fromkeys(filter(None, node.output), node)
        for at in BIASES.get(node.op_type, ()):
            waiting += [(name, None if node.op_type == "Exp" else False) for name in node.input[at : at + 1]]
    seen = set[tuple[str, bool | None]]()
    while waiting:
        reached = name, cut = waiting.pop()
        if reached in seen:
            continue
        seen.add(reached)
        if name in constants:
            yield reached
        maker = makers.get(name)
        if maker is None or maker.op_type not in (*PASSING, *CUTTING):
            continue
        waiting += [(one, True if maker.op_type in CUTTING else cut) for one in maker.input]
        place = list(maker.output).index(name)
        waiting += [(value.name, cut) for body in subgraphs(maker) for value in body.output[place : place + 1]]
