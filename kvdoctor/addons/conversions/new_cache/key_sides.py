"""What the axes of a value count, how the axes of a result follow, and where the key side of an attention is cached.

`new` is one row for each token of the call, `total` one for each token of the sequence, on the key side of an
attention; `folded` are new tokens and something else in one axis. Axes that count neither have an empty label.

An operand on the key side is cached before it is permuted, repeated and scaled: of the values from which it follows,
each read by the next alone, that one is taken which has the shape of a cache: [batch, heads, tokens, width].
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from kvdoctor.model.edit import GraphWriter
from kvdoctor.model.operators import has, ports_of
from kvdoctor.model.proto import NodeProto
from kvdoctor.model.traverse import STANDARD, find_attribute, input_of
from kvdoctor.records import record

if TYPE_CHECKING:
    from kvdoctor.addons.conversions.new_cache.rewrite import Lengths
    from kvdoctor.addons.conversions.new_cache.token_axes import TokenAxes


Label = Literal["", "new", "total", "folded"]
Labels = tuple[Label, ...]
Shape = tuple[int, ...]


class Mixes(Exception):
    """An operator combines positions in a way that a cache of keys and values does not follow; says how."""


def unlabelled(rank: int) -> Labels:
    """The labels of a value without content of tokens."""
    labels: list[Label] = [""] * rank
    return tuple(labels)


def broadcast(operands: Iterable[tuple[Labels, Shape]]) -> Labels:
    """The labels of a result whose operands are broadcast to each other.

    Raises:
        Mixes: one operand has new tokens where another has the key side, or a folded axis.
    """
    found: dict[int, Label] = {}
    rank = 0
    for labels, _ in operands:
        rank = max(rank, len(labels))
        for at, label in enumerate(reversed(labels)):
            if label and found.setdefault(at, label) != label:
                raise Mixes(f"it combines {found[at]} tokens with {label} tokens on one axis")
    return tuple(found.get(at, "") for at in reversed(range(rank)))


def regroup(labels: Labels, before: Shape, after: Shape, tokens: int) -> Labels:
    """The labels of a value under another shape.

    Raises:
        Mixes: the axis of the tokens is split, or the key side is folded into another axis.
    """
    made: list[Label] = [""] * len(after)
    for sources, targets in _pair_axes(before, after):
        inside = {labels[at] for at in sources} - {""}
        if not inside:
            continue
        alone = [at for at in targets if after[at] == tokens]
        if len(inside) == 1 and len(alone) == 1:
            made[alone[0]] = "new" if inside == {"folded"} else next(iter(inside))
            continue
        if inside & {"total"}:
            raise Mixes("it folds positions of the key side into another axis")
        holding = [at for at in targets if after[at] % tokens == 0]
        if len(holding) != 1:
            raise Mixes("it splits the axis of the tokens")
        made[holding[0]] = "folded"
    return tuple(made)


def _pair_axes(before: Shape, after: Shape) -> Iterable[tuple[list[int], list[int]]]:
    """The smallest runs of axes of both shapes that have as many entries, without axes of one entry."""
    ones = [at for at, size in enumerate(before) if size != 1]
    others = [at for at, size in enumerate(after) if size != 1]
    sources, targets, left, right = list[int](), list[int](), 1, 1
    while ones or others:
        if others and (right < left or not ones):
            targets.append(others.pop(0))
            right *= after[targets[-1]]
        else:
            sources.append(ones.pop(0))
            left *= before[sources[-1]]
        if left == right:
            yield sources, targets
            sources, targets, left, right = [], [], 1, 1


def multiply(
    letters: Sequence[str], result: str, labels: Sequence[Labels], flipped: bool
) -> tuple[Labels, tuple[int, ...]]:
    """The labels of a product by the letters of its axes, and the operands that become the key side.

    Of scores, the second operand has the keys; where it is `flipped`, the first.

    Raises:
        Mixes: it adds positions up otherwise than by the weights of an attention.
    """
    counted = [dict(zip(term, own, strict=True)) for term, own in zip(letters, labels, strict=True)]
    cuts = list[int]()
    for letter in sorted({one for term in letters for one in term} - set(result)):
        found = [own.get(letter, "") for own in counted]
        if set(found) == {"total", "new"}:
            cuts.append(found.index("new"))
        elif found != ["total", "total"] and any(found):
            raise Mixes("it adds up over positions with weights that are no attention")
    made: dict[str, Label] = {}
    for own in counted:
        for letter in set(own) & set(result):
            if own[letter] and made.setdefault(letter, own[letter]) != own[letter]:
                raise Mixes(f"it combines {made[letter]} tokens with {own[letter]} tokens on one axis")
    if sum(label == "new" for label in made.values()) > 1:
        operand = 0 if flipped else len(letters) - 1
        made[_find_keys(counted, made, operand)] = "total"
        cuts.append(operand)
    if sum(label == "total" for label in made.values()) > 1:
        raise Mixes("it relates the key side with itself")
    return tuple(made.get(letter, "") for letter in result), tuple(cuts)


def _find_keys(counted: Sequence[dict[str, Label]], made: dict[str, Label], operand: int) -> str:
    """The axis of scores that counts the keys: that of the tokens which one operand has alone."""
    new = [letter for letter, label in made.items() if label == "new"]
    keys = [letter for letter in new if [own.get(letter, "") == "new" for own in counted].count(True) == 1]
    keys = [letter for letter in keys if counted[operand].get(letter) == "new"]
    if len(new) != 2 or len(keys) != 1 or "total" in made.values():
        raise Mixes("it relates positions in a way that is no attention")
    return keys[0]


def spell_product(left: int, right: int, transposed: tuple[bool, bool] = (False, False)) -> tuple[list[str], str]:
    """The letters of a MatMul of operands with so many axes."""
    batch = "abcdefgh"[: max(left, right, 2) - 2]
    rows, columns = ("" if left == 1 else "m"), ("" if right == 1 else "n")
    one, other = f"{rows}k", f"k{columns}"
    one = one[::-1] if transposed[0] else one
    other = other[::-1] if transposed[1] else other
    lead = [batch[len(batch) - max(rank - 2, 0) :] for rank in (left, right)]
    return [lead[0] + one, lead[1] + other], batch + rows + columns


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
    """Give a causal node its mask as an input, bool[new, total].

    Where a past stands in front of the keys, releases of the operator disagree on where `is_causal` begins to count.
    """
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
