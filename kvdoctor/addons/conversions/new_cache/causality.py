"""Whether each attention of a decoder hides later tokens, where its mask can be computed without a run."""

import numpy as np

from kvdoctor.addons.conversions.new_cache.fused import MASK, is_causal
from kvdoctor.addons.conversions.new_cache.labels import Labels
from kvdoctor.addons.conversions.new_cache.token_axes import TokenAxes
from kvdoctor.decode.calls import Array
from kvdoctor.model.operators import has
from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import describe_node, input_of
from kvdoctor.repair.workspace import CannotRepair

HIDING = -1e4
"""Scores that are lowered to this value, or by it, have no weight."""
MOST_STEPS = 64


def refuse_acausal(walk: TokenAxes) -> None:
    """Refuse a graph with an attention that sees later tokens: what a call computes would change with the next.

    A mask whose numbers are not known is left to the comparison with the original.

    Raises:
        CannotRepair: with the node that weighs later tokens.
    """
    for node in (*walk.softmaxes, *walk.fused):
        hidden = _find_hidden(walk, node) if node in walk.softmaxes else _find_fused(walk, node)
        if hidden is not None and not hidden[np.triu_indices(len(hidden), 1)].all():
            raise CannotRepair(
                f"the node {describe_node(node)} stands in the way: it weighs later tokens, so the model is not "
                "causal, and keys and values of a token change with those after it"
            )


def _find_hidden(walk: TokenAxes, softmax: NodeProto) -> Array | None:
    """Which keys (columns) each query (rows) never sees, bool[tokens, tokens]; None where a mask is not known."""
    count = walk.sizes.lengths[0]
    hidden = np.zeros((count, count), bool)
    name = softmax.input[0]
    for _ in range(MOST_STEPS):
        node = walk.makers.get(name)
        if node is None or has(node.op_type, "product") or not has(node.op_type, "elementwise", "copy", "cast", "view"):
            return hidden
        for other in node.input:
            if other in walk.labels or not walk.sizes.varies(other):
                continue
            found = _read_mask(walk, node, other)
            if found is None:
                return None
            hidden |= found
        followed = [one for one in node.input if "total" in walk.own(one)]
        if len(followed) != 1:
            return None
        name = followed[0]
    return None


def _find_fused(walk: TokenAxes, node: NodeProto) -> Array | None:
    """The same of an attention in one node."""
    count, name = walk.sizes.lengths[0], input_of(node, MASK)
    if is_causal(node) or not name:
        return np.triu(np.full((count, count), is_causal(node)), 1)
    numbers = walk.sizes.short[name].numbers
    if numbers is None or numbers.shape[-2:] != (count, count):
        return None
    hidden: Array = np.logical_not(numbers) if numbers.dtype == bool else numbers <= HIDING
    return np.asarray(hidden.reshape(-1, count, count).all(axis=0))


def _read_mask(walk: TokenAxes, node: NodeProto, name: str) -> Array | None:
    """What one operand hides in every batch and head; None where its numbers are not known."""
    value = walk.sizes.short[name]
    numbers = value.numbers
    if numbers is None:
        return None
    if has(node.op_type, "select"):
        at = [one in walk.labels for one in node.input]
        if name != node.input[0] or at[0]:
            return None
        other = walk.sizes.short[node.input[1 if at[2] else 2]].numbers
        if other is None or not bool((other <= HIDING).all()):
            return None
        numbers = np.where(numbers if at[2] else ~numbers.astype(bool), HIDING, 0)
    elif not has(node.op_type, "add"):
        return None
    return _as_square(numbers <= HIDING, walk.own(node.output[0]), walk.sizes.lengths[0])


def _as_square(hidden: Array, labels: Labels, count: int) -> Array:
    """By query and key, whether an entry is hidden for all others."""
    shape = hidden.shape
    hidden = hidden.reshape((1,) * (len(labels) - len(shape)) + shape)
    query, key = labels.index("new"), labels.index("total")
    others = tuple(at for at in range(len(labels)) if at not in (query, key))
    flat = hidden.all(axis=others) if others else hidden
    square: Array = np.broadcast_to(flat if query < key else flat.T, (count, count))
    return square
