"""Attention of opset 23 as one node: its keys and values are cut, and its causal mask is written out.

Where a past stands in front of the keys, releases of the operator disagree on where `is_causal` begins to count; a mask
says it.
"""

from typing import TYPE_CHECKING

from kvdoctor.addons.conversions.new_cache.labels import Labels, Mixes
from kvdoctor.model.edit import GraphWriter
from kvdoctor.model.operators import ports_of
from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import STANDARD, find_attribute, input_of

if TYPE_CHECKING:
    from kvdoctor.addons.conversions.new_cache.lengths import Lengths
    from kvdoctor.addons.conversions.new_cache.token_axes import TokenAxes

KEYS, VALUES, MASK = 1, 2, 3
KNOWN_INPUTS = 4
"""Without a past, and without lengths that the caller gives."""


def label_attention(walk: "TokenAxes", node: NodeProto, contents: list[int]) -> list[Labels]:
    """Cut the key side of an attention.

    Raises:
        Mixes: it has another form.
    """
    own = [walk.own(node.input[at]) for at in (0, KEYS, VALUES)]
    at = 1 if len(own[0]) == 3 else 2
    ports = ports_of("", node.op_type)
    if node.domain not in STANDARD or ports is None or ports.keys != (KEYS,):
        raise Mixes("a fused attention of this kind is not known to take a past in another order")
    if any(labels[at : at + 1] != ("new",) or labels.count("new") != 1 for labels in own) or MASK in contents:
        raise Mixes("its queries, keys and values are not those of the tokens")
    if any(filter(None, node.input[KNOWN_INPUTS:])) or any(filter(None, node.output[1:])):
        raise Mixes("it has a past, or returns more than its result")
    if is_causal(node) and input_of(node, MASK):
        raise Mixes("it is causal and has a mask as well")
    walk.cut(node, KEYS)
    walk.cut(node, VALUES)
    walk.fused.append(node)
    return [own[0]]


def is_causal(node: NodeProto) -> bool:
    """Whether the node hides later tokens by itself."""
    found = find_attribute(node, "is_causal")
    return found is not None and found.i == 1


def write_mask(node: NodeProto, lengths: "Lengths", writer: GraphWriter) -> None:
    """Give a causal node its mask as an input, bool[new, total]."""
    for attribute in node.attribute:
        if attribute.name == "is_causal":
            attribute.i = 0
    nought, one = writer.numbers([0], [], "nought"), writer.numbers([1], [], "one")
    past = writer.node("past_scalar", "Squeeze", [lengths.past])
    new = writer.node("new_scalar", "Squeeze", [lengths.count_new()])
    total = writer.node("total_scalar", "Add", [past, new])
    keys = writer.node("key_positions", "Range", [nought, total, one])
    queries = writer.node("query_positions", "Range", [past, total, one])
    column = writer.node("query_column", "Unsqueeze", [queries, writer.numbers([1])])
    mask = writer.node("causal_mask", "LessOrEqual", [keys, column])
    node.input[:] = [*node.input[:MASK], mask]


def choose_mask(name: str, lengths: "Lengths") -> str:
    """The mask of a node that has one: the rows of its new tokens."""
    rank = len(lengths.walk.shape(name))
    counted = [at for at in (rank - 2,) if at >= 0 and lengths.walk.sizes.counts_tokens(name, at)]
    return lengths.rows(name, counted)
