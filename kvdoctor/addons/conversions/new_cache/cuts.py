"""Where an operand on the key side of an attention is cached: before it is permuted, repeated and scaled.

Of the values from which the operand follows, each read by the next alone, that one is taken which has the shape of a
cache: [batch, heads, tokens, width].
"""

from typing import TYPE_CHECKING, Literal

from kvdoctor.addons.conversions.new_cache.labels import Mixes
from kvdoctor.model.operators import has
from kvdoctor.model.proto import NodeProto
from kvdoctor.records import record

if TYPE_CHECKING:
    from kvdoctor.addons.conversions.new_cache.token_axes import TokenAxes

RANK, LENGTH_AXIS = 4, 2
"""Axes of a cache, and the one that most loops expect its tokens on."""


@record(slots=False)
class KeySide:
    """A value that is cached.

    Attributes:
        node: The product that reads it as keys or values.
        part: Whether that product makes scores, or mixes values by them.
        value: The value.
        axis: Its axis that counts tokens.
        reads: The node that reads it for this product, and at which input.
        below: The values between it and the product: on the key side as well.
    """

    node: NodeProto
    part: Literal["key", "value"]
    value: str
    axis: int
    reads: tuple[NodeProto, int]
    below: tuple[str, ...]


def find_key_side(walk: "TokenAxes", node: NodeProto, index: int) -> KeySide:
    """The value to cache for an operand of a product.

    Raises:
        Mixes: there is none whose axes a loop can carry.
    """
    part: Literal["key", "value"] = "value"
    others = [walk.own(name) for at, name in enumerate(node.input) if at != index and name in walk.labels]
    if not any("total" in labels for labels in others) and not (has(node.op_type, "attend") and index > 1):
        part = "key"
    found = [(node.input[index], (node, index))]
    while (above := _step_up(walk, found[-1][0])) is not None:
        found.append(above)
    fits = [at for at, (name, _) in enumerate(found) if _fits(walk, name)]
    if not fits:
        raise Mixes(f"its {part}s have no axis for the batch alone, or one axis for tokens and others")
    whole = [at for at in fits if len(walk.shape(found[at][0])) == RANK]
    best = [at for at in whole if walk.own(found[at][0])[LENGTH_AXIS] == "new"]
    at = (best or whole or fits)[-1]
    value, reads = found[at]
    return KeySide(node, part, value, walk.own(value).index("new"), reads, tuple(name for name, _ in found[:at]))


def _fits(walk: "TokenAxes", name: str) -> bool:
    """Whether a value has an axis of its own for the tokens, and one for the batch where that is open."""
    labels = walk.own(name)
    batch = walk.sizes.other is None or walk.sizes.batch_axis(name) is not None
    return labels.count("new") == 1 and "folded" not in labels and "total" not in labels and batch


def _step_up(walk: "TokenAxes", name: str) -> tuple[str, tuple[NodeProto, int]] | None:
    """The value that another one is made of by moving or scaling its entries; None where it is made otherwise."""
    maker = walk.makers.get(name)
    used = [one for one, _ in walk.readers.get(name, ()) if not has(one.op_type, "measure")]
    if maker is None or len(used) != 1:
        return None
    sources = [at for at, one in enumerate(maker.input) if one in walk.labels]
    if len(sources) != 1 or not has(maker.op_type, "copy", "cast", "permute", "view", "repeat", "scale"):
        return None
    source = maker.input[sources[0]]
    if any(walk.sizes.varies(one) for one in maker.input if one != source and has(maker.op_type, "scale")):
        return None
    labels = walk.own(source)
    return (source, (maker, sources[0])) if labels.count("new") == 1 and not {"folded", "total"} & set(labels) else None
