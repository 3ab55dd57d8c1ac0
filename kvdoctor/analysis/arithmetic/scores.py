"""The attentions of a graph: the scale and cap of their scores, the window in their masks, and what makes the queries.

An attention is an operator of its own, or a softmax of a product of two values that the inputs decide. Its scale is the
product of all factors on queries, keys and scores: exporters split it over queries and keys.
"""

from math import prod

from kvdoctor.analysis.arithmetic.numbers import MOST_STEPS, Bends, FixedValues
from kvdoctor.analysis.dataflow.walks import Walk
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import CONTRIB, operators_with
from kvdoctor.records import record

MOST_MASK = 400
MOST_SUMMED = 16
LONGEST = 1 << 17
"""The largest number in a mask that is taken for a window; larger ones stand for no limit."""

MASKS = {
    (CONTRIB, "GroupQueryAttention"): 10,
    (CONTRIB, "MultiHeadAttention"): 5,
    (CONTRIB, "Attention"): 5,
    ("", "Attention"): 3,
}
"""The operators that are read, with the input that takes a mask or bias."""
WHOLE = (CONTRIB, "Attention")
"""The operator that makes the queries itself."""


@record
class Operand:
    """Queries or keys before their scales: the product of these, whether there are any, and the value before them.

    `is_known` says that no factor which cannot be read comes before it.
    """

    scale: float
    is_scaled: bool
    value: str
    is_known: bool = True


@record
class Attention:
    """One attention.

    `scale` is None where the operator leaves it to the width of a head, or where it is not known (`is_scaled` False).
    `windows` are the numbers in its mask that may be a window, None where a mask is given or cannot be read; `local` is
    the window of the operator itself, -1 without limit. `projection` is the product that makes the queries. Of a
    softmax, `product` makes its scores, `query_scale` is the part of the scale that its queries have, and `masks` are
    the values that are added to the scores, or put in their place.
    """

    node: FlatNode
    is_scaled: bool
    scale: float | None
    cap: float | None
    windows: frozenset[int] | None
    local: int | None
    projection: FlatNode | None
    is_biased: bool = False
    product: FlatNode | None = None
    query_scale: float = 1.0
    masks: tuple[str, ...] = ()


class Scores:
    """Reads the attentions of one flow."""

    def __init__(self, flow: Flow, fixed: FixedValues, bends: Bends) -> None:
        self.flow, self.fixed, self.bends = flow, fixed, bends
        self._masks: dict[str, frozenset[int] | None] = {}

    def list_attentions(self) -> list[Attention]:
        """The attentions in the order of the nodes."""
        found: list[Attention | None] = []
        for node in self.fixed.nodes(operators_with("softmax") | {name for _, name in MASKS}):
            if node.has("softmax"):
                found.append(self._read_softmax(node))
            elif (node.domain, node.op) in MASKS:
                found.append(self._read_operator(node))
        return [one for one in found if one is not None]

    def _read_operator(self, node: FlatNode) -> Attention:
        whole = (node.domain, node.op) == WHOLE
        query = Operand(1.0, False, "") if whole else self._operand(node.input(0))
        given, width = node.real("scale", 0.0), self.fixed.head_dim
        scale = None if query.scale == 1 or not width else query.scale / width**0.5
        mask = node.input(MASKS[node.domain, node.op])
        local = node.number("local_window_size", -1) if node.op == "GroupQueryAttention" else None
        projection, biased = self._projection(query.value)
        return Attention(
            node=node,
            is_scaled=query.is_known,
            scale=given * query.scale if given else scale,
            cap=node.real("softcap", 0.0) or None,
            windows=self._windows(mask) if mask else frozenset(),
            local=local,
            projection=projection,
            is_biased=biased,
        )

    def _read_softmax(self, node: FlatNode) -> Attention | None:
        masks: list[str] = []
        found = self._find_product(node.input(0), masks, MOST_STEPS)
        if found is None:
            return None
        product, scale, cap = found
        if any(self.fixed.of(name) or self.flow.constant(name) is not None for name in product.inputs[:2]):
            return None  # a factor that is a weight makes no scores of tokens
        query, key = self._operand(product.input(0)), self._operand(product.input(1))
        whole, known = scale * query.scale * key.scale, query.is_known and key.is_known
        whole *= product.real("alpha", 1.0)
        projection, biased = self._projection(query.value)
        windows = [self._windows(mask) for mask in masks]
        return Attention(
            node=node,
            is_scaled=known and (scale != 1.0 or query.is_scaled or key.is_scaled or projection is not None),
            scale=whole,
            cap=cap,
            windows=None if None in windows else frozenset[int]().union(*(one for one in windows if one)),
            local=None,
            projection=projection,
            is_biased=biased,
            product=product,
            query_scale=query.scale,
            masks=tuple(masks),
        )

    def _find_product(self, name: str, masks: list[str], left: int) -> tuple[FlatNode, float, float | None] | None:
        """The product before a softmax, the factor after it and its cap; what is added on the way goes into `masks`."""
        scale, cap = 1.0, None
        while left:
            left -= 1
            bend = self.bends.by_result.get(name)
            if bend is not None and bend.cap is not None and cap is None:
                cap, name = bend.cap, bend.argument
                continue
            node = self.flow.producers.get(name)
            if node is None:
                return None
            if node.has("product"):
                return node, scale, cap
            factor = self.fixed.factor(node)
            if factor is not None:
                scale, name = scale * factor[0], factor[1]
            elif node.has("copy", "cast", "view", "permute", "pick"):
                name = node.input(0)
            elif node.has("add", "subtract", "select", "clamp", "join"):
                return self._split(node, masks, left, (scale, cap))
            else:
                return None
        return None

    def _split(
        self, node: FlatNode, masks: list[str], left: int, so_far: tuple[float, float | None]
    ) -> tuple[FlatNode, float, float | None] | None:
        """The product through one of the operands; the other ones are masks."""
        for name in node.inputs:
            inner: list[str] = []
            found = self._find_product(name, inner, left) if name else None
            if found is not None:
                added = node.has("add", "select", "clamp")  # what is joined is a sink, what is subtracted the maximum
                masks += [*inner, *(other for other in node.inputs if added and other and other != name)]
                return found[0], so_far[0] * found[1], so_far[1] or found[2]
        return None

    def _operand(self, name: str) -> Operand:
        """A factor of the scores, followed back over scales and views."""
        scales, name = self.fixed.before_scales(name, "copy", "cast", "view", "permute", "repeat")
        made = self.flow.producers.get(name)
        factors = made.inputs if made is not None and made.has("multiply", "divide") else ()
        known = not factors or any(self.flow.constant(one) is not None for one in factors)  # weights of a norm
        return Operand(prod(scales), bool(scales), name, known)

    def _projection(self, name: str) -> tuple[FlatNode | None, bool]:
        """The product with weights that makes a query, before a rotation, and whether a bias is added to it."""
        biased = False
        for _ in range(MOST_STEPS):
            node = self.flow.producers.get(name)
            if node is None:
                break
            if node.has("product"):
                weight = self.flow.constant(node.input(1)) or self.flow.constant(node.input(0))
                return (node if weight is not None else None), biased or bool(node.op == "Gemm" and node.input(2))
            factor, bias = self.fixed.factor(node), self.fixed.biased(node)
            if factor is not None:
                name = factor[1]
            elif bias:
                biased, name = True, bias
            elif node.has("copy", "cast", "view", "permute", "pick", "rotate", "normalize"):
                name = node.input(0)
            else:
                name = self._before_norm(node) or self._before_rotation(node)
        return None, biased

    def _before_norm(self, node: FlatNode) -> str:
        """What a norm that is written out scales: by its weights, or by the root; empty where the node does not."""
        if not node.has("multiply", "divide") or len(node.inputs) != 2:
            return ""
        roots = operators_with("power", "divide")
        for name, other in (node.inputs, node.inputs[::-1]):
            made = self.flow.producers.get(self.fixed.source(other))
            if self.flow.constant(other) is not None or (made is not None and made.op in roots):
                return name
        return ""

    def _before_rotation(self, node: FlatNode) -> str:
        """The `x` of a rotation that is written out as `x * cos + rotated(x) * sin`; empty where the node ends none."""
        if node.has("join"):  # with the part that is not rotated
            return node.input(0)
        parts = [self.flow.producers.get(name) for name in node.inputs] if node.has("add") else []
        scaled = [part for part in parts if part is not None and part.has("multiply")]
        return scaled[0].input(0) if len(scaled) == len(parts) == 2 else ""

    def _windows(self, mask: str) -> frozenset[int] | None:
        """The numbers in a mask that may be a window; None where the caller gives the mask, or it cannot be read."""
        mask = self._uncut(mask)
        if mask not in self._masks:
            self._masks[mask] = self._read_mask(mask)
        return self._masks[mask]

    def _uncut(self, mask: str) -> str:
        """The mask of all layers, of which each layer takes a part and makes a bias."""
        for _ in range(MOST_STEPS):
            node = self.flow.producers.get(mask)
            given = [name for name in node.inputs if name and self.fixed.one(name) is None] if node is not None else []
            if node is not None and node.has("copy", "cast", "view", "pick"):
                mask = node.input(0)
            elif node is not None and node.has("select", "multiply", "logic") and len(given) == 1:
                mask = given[0]
            else:
                break
        return mask

    def _read_mask(self, mask: str) -> frozenset[int] | None:
        found, walk, compares, tables = set[int](), Walk([mask]), False, False
        for name in walk:
            node, constant = self.flow.producers.get(name), self.flow.constants.get(name)
            tables |= constant is not None and len(constant.dims) > 1 and max(constant.dims) > 1
            if node is None:
                continue
            if len(walk.seen) > MOST_MASK or node.has("loop", "product"):
                return None
            compares |= node.has("compare", "triangle")
            tables |= node.has("triangle") and bool(node.input(1)) and self.fixed.one(node.input(1)) is None
            found.update(self._bounds(node))
            walk.add(() if node.has("sizes") else node.inputs)
        return frozenset(found) if found or (compares and not tables) else None

    def _bounds(self, node: FlatNode) -> list[int]:
        """The numbers that a node compares a distance with, or cuts a triangle at, within a few sums."""
        if not node.has("compare", "triangle") or node.op == "Equal":
            return []
        names = list(node.inputs[1:] if node.has("triangle") else node.inputs)
        for name in names:
            made = self.flow.producers.get(self.fixed.source(name))
            if made is not None and made.has("add", "subtract") and len(names) < MOST_SUMMED:
                names += made.inputs
        numbers = (self.fixed.one(name) for name in names if name)
        return [int(abs(one)) for one in numbers if one is not None and 1 < abs(one) < LONGEST and one == int(one)]
