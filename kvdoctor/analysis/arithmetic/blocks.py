"""Norms, embeddings, feed-forward layers, experts and the head: the constants that a config names of them."""

from collections.abc import Collection, Iterator

from kvdoctor.analysis.arithmetic.bends import Bend, Bends
from kvdoctor.analysis.arithmetic.numbers import FixedValues
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import operators_with
from kvdoctor.model.proto import TensorProto
from kvdoctor.records import record

NORMS = (
    *("SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization", "RMSNormalization"),
    *("LayerNormalization", "SkipLayerNormalization", "EmbedLayerNormalization"),
)
EPSILONS = {
    "SkipLayerNormalization": 1e-12,
    "SkipSimplifiedLayerNormalization": 1e-12,
    "EmbedLayerNormalization": 1e-12,
}
DEFAULT_EPSILON = 1e-5
FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE)
MOST_STEPS = 24
HIDDEN = ("gelu", "gelu by tanh", "silu", "quick_gelu", "relu", "squared relu", "tanh")
"""Functions that stand between the two products of a feed-forward layer."""


@record
class Norm:
    """A normalization: what is added under the root, and its node."""

    epsilon: float
    node: FlatNode


@record
class Activation:
    """An activation of a feed-forward layer, and the width of that layer; None where it is not known."""

    kind: str
    width: int | None
    node: FlatNode


@record
class Router:
    """A choice of experts: how many are active, of how many; None where that is not known."""

    active: int
    count: int | None
    node: FlatNode


@record
class Embedding:
    """The table of the tokens and the factor on its rows; None where that is not known."""

    table: TensorProto
    is_transposed: bool
    factor: float | None
    node: FlatNode


@record
class Head:
    """The product that makes the logits: its weight, and the factors before and after it, with the cap of the logits.

    `is_transposed` says that the weight has one column for each token.
    """

    weight: TensorProto
    is_transposed: bool
    before: float
    after: float
    cap: float | None
    node: FlatNode


class Blocks:
    """Reads one flow."""

    def __init__(self, flow: Flow, fixed: FixedValues, bends: Bends) -> None:
        self.flow, self.fixed, self.bends = flow, fixed, bends

    def list_norms(self) -> Iterator[Norm]:
        """The normalizations, by an operator or written out."""
        for node in self.fixed.nodes((*NORMS, "Sqrt", "Pow")):
            if node.op in NORMS:
                attribute = node.attribute("epsilon")
                default = EPSILONS.get(node.op, DEFAULT_EPSILON)
                epsilon = float(attribute.f) if attribute is not None else default
                yield Norm(epsilon, node)
            else:
                yield from self._written_out(node)

    def _written_out(self, root: FlatNode) -> Iterator[Norm]:
        """The root of a mean of squares and an epsilon."""
        total = self.flow.producers.get(self.fixed.source(root.input(0)))
        if total is None or not total.has("add") or (root.op == "Pow" and self.fixed.one(root.input(1)) != -0.5):
            return
        for given, other in (total.inputs, total.inputs[::-1]):
            epsilon, mean = self.fixed.one(given), self.flow.producers.get(self.fixed.source(other))
            if epsilon is not None and mean is not None and mean.op == "ReduceMean" and 0 < epsilon < 0.1:
                yield Norm(epsilon, total)

    def list_activations(self) -> Iterator[Activation]:
        """The activations between products, and those of fused experts."""
        for bend in self.bends.by_result.values():
            if bend.kind in HIDDEN and (product := self._next_product(bend)) is not None:
                yield Activation(bend.kind, self._inner_width(product), bend.node)
        for node in self.fixed.nodes(("MoE", "QMoE")):
            attribute = node.attribute("activation_type")
            kind = bytes(attribute.s).decode("ascii", "replace") if attribute else "relu"
            if kind in HIDDEN:
                yield Activation(kind, None, node)

    def _next_product(self, bend: Bend) -> FlatNode | None:
        """The product with weights after an activation, with at most a product by a gate between them."""
        name = bend.result
        for _ in range(MOST_STEPS):
            readers = [node for node, _ in self.flow.consumers.get(name, ()) if not node.has("sizes")]
            if len(readers) != 1:
                return None
            node = readers[0]
            if node.has("product"):
                return node if node.input(0) == name else None
            if not node.has("copy", "cast", "view", "multiply", "quantize", "quantize-dynamically", "dequantize"):
                return None
            name = node.output()
        return None

    def _inner_width(self, product: FlatNode) -> int | None:
        """The length of the axis that a product with weights sums over."""
        if product.attribute("K") is not None:
            return product.number("K", 0)
        weight = self.flow.constants.get(product.input(1))
        if weight is None or len(weight.dims) != 2 or product.op not in ("MatMul", "Gemm", "MatMulInteger"):
            return None
        return int(weight.dims[product.number("transB", 0)])

    def list_routers(self) -> Iterator[Router]:
        """The choices of experts."""
        for node in self.fixed.nodes(("MoE", "QMoE", "TopK")):
            if node.op != "TopK":
                yield Router(node.number("k", 1), self._outer_width(node.input(1)), node)
                continue
            active, count = self.fixed.one(node.input(1)), self._outer_width(node.input(0))
            if active is not None and count is not None:
                yield Router(int(active), count, node)

    def _outer_width(self, name: str) -> int | None:
        """The number of columns of the product with weights that makes scores."""
        for _ in range(MOST_STEPS):
            node = self.flow.producers.get(name)
            if node is None:
                return None
            if node.has("product"):
                weight = self.flow.constants.get(node.input(1))
                if node.attribute("N") is not None:
                    return node.number("N", 0)
                at = 1 - node.number("transB", 0)
                return int(weight.dims[at]) if weight is not None and len(weight.dims) == 2 else None
            if not node.has("copy", "cast", "view", "softmax", "activation", "add"):
                return None
            constants = [self.flow.constant(one) is not None for one in node.inputs]
            name = node.inputs[constants.index(False)] if False in constants else ""
        return None

    def find_embedding(self, tokens: Collection[str]) -> Embedding | None:
        """The one table that is looked up by token ids, given the inputs that take them."""
        found = []
        for node in self.fixed.nodes(operators_with("embed")):
            if node.number("axis", 0) == 0 and self.fixed.source(node.input(1)) in tokens:
                table, turned = self._tensor(node.input(0))
                if table is not None and len(table.dims) == 2 and table.data_type in FLOATS:
                    found.append(Embedding(table, turned, self._factor_after(node.output()), node))
        return found[0] if len(found) == 1 else None

    def _factor_after(self, name: str) -> float | None:
        """The factor on a value, where one node alone goes on with it."""
        for _ in range(MOST_STEPS):
            readers = [node for node, _ in self.flow.consumers.get(name, ()) if not node.has("sizes")]
            scaling = [node for node in readers if node.has("multiply", "divide") and self._scalar(node, name)]
            if len(scaling) == 1 and len(readers) == 1:
                return self._scalar(scaling[0], name)
            if len(readers) != 1 or not readers[0].has("copy", "cast", "view"):
                return None if scaling else 1.0
            name = readers[0].output()
        return None

    def _scalar(self, node: FlatNode, name: str) -> float | None:
        """The number that a node multiplies a value with."""
        others = [one for one in node.inputs if one != name]
        number = self.fixed.one(others[0]) if len(others) == 1 and len(node.inputs) == 2 else None
        if number is None or number == 0:
            return None
        if node.has("divide"):
            return 1 / number if node.inputs[0] == name else None
        return number

    def find_head(self, logits: str) -> Head | None:
        """The product that makes the logits."""
        name, cap = self.flow.results.get(logits, logits), None
        bend = self._capped(name)
        if bend is not None:
            cap, name = bend.cap, bend.argument
        after, name = self._scales_back(name)
        if bend is None and (bend := self._capped(name)) is not None:
            cap, (more, name) = bend.cap, self._scales_back(bend.argument)
            after *= more
        product = self.flow.producers.get(name)
        if product is None or not product.has("product"):
            return None
        weight, turned = self._tensor(product.input(1))
        if weight is None or len(weight.dims) != 2 or weight.data_type not in FLOATS:
            return None
        turned ^= not product.number("transB", 0)
        return Head(weight, turned, self._scales_back(product.input(0))[0], after, cap, product)

    def _capped(self, name: str) -> Bend | None:
        bend = self.bends.by_result.get(name)
        return bend if bend is not None and bend.cap is not None else None

    def _scales_back(self, name: str) -> tuple[float, str]:
        """The product of the factors before a value, and the value before these."""
        scale = 1.0
        for _ in range(MOST_STEPS):
            node = self.flow.producers.get(name)
            if node is None or name in self.bends.by_result:
                break
            given = next((one for one in node.inputs if self.fixed.one(one) is None), "")
            factor = self._scalar(node, given) if node.has("multiply", "divide") else None
            if factor is not None:
                scale, name = scale * factor, given
            elif node.has("copy", "cast", "view", "pick"):
                name = node.input(0)
            elif node.has("add") and len(node.inputs) == 2 and self.flow.constant(node.input(1)) is not None:
                name = node.input(0)  # a bias
            elif node.has("add") and len(node.inputs) == 2 and self.flow.constant(node.input(0)) is not None:
                name = node.input(1)
            else:
                break
        return scale, name

    def _tensor(self, name: str) -> tuple[TensorProto | None, bool]:
        """The constant that a value is, and whether it is transposed on the way."""
        turned = False
        for _ in range(MOST_STEPS):
            node = self.flow.producers.get(name)
            if node is None or not node.has("copy", "cast", "permute"):
                break
            turned ^= node.has("permute")
            name = node.input(0)
        return self.flow.constants.get(name), turned

    def residual_factors(self) -> dict[float, FlatNode]:
        """The factors on what a layer adds to the residual: on the result of a product, before an addition."""
        found: dict[float, FlatNode] = {}
        for node in self.fixed.nodes(("Mul",)):
            if len(node.inputs) == 2:
                given = next((one for one in node.inputs if self.fixed.one(one) is None), "")
                factor, made = self._scalar(node, given), self.flow.producers.get(given)
                readers = self.flow.consumers.get(node.output(), ())
                if factor and made is not None and made.has("product") and any(one.has("add") for one, _ in readers):
                    found.setdefault(factor, node)
        return found
