"""All that is read of the arithmetic of one decoder; each part once, when it is asked for."""

from collections.abc import Collection, Iterator
from functools import cached_property
from itertools import permutations
from math import prod
from pathlib import Path
from weakref import WeakKeyDictionary

from kvdoctor.analysis.arithmetic.numbers import (
    MOST_NUMBERS,
    MOST_STEPS,
    WIDTHS,
    Bend,
    Bends,
    FixedValues,
    Numbers,
    decode_numbers,
    read_numbers,
)
from kvdoctor.analysis.arithmetic.rotary import Frequencies, find_frequencies
from kvdoctor.analysis.arithmetic.scores import Attention, Scores
from kvdoctor.analysis.stacks import OnnxFile
from kvdoctor.errors import UnreadableError
from kvdoctor.model.external_data import read_reference
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import operators_with
from kvdoctor.model.proto import TensorProto
from kvdoctor.model.view import GraphView
from kvdoctor.model.weights import find_payloads, find_weights
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


SAMPLES = 8
"""Columns of two weights that are compared, at two rows each."""
SAME = 2e-2
"""Products of two elements are equal up to this part of the larger one: one weight may be in half precision."""


class Arithmetic:
    """The constants that a decoder computes with.

    `file` is its file, of which a few elements of large tables are read; None where it is not one file. `head_dim` is
    the width of a head, where the graph shows it.
    """

    def __init__(self, flow: Flow, file: OnnxFile | None, head_dim: int | None) -> None:
        self.flow, self.fixed = flow, FixedValues(flow, head_dim)
        self.path = file.path if file is not None else None
        self.external = file.external if file is not None else ()
        self._payloads: dict[str, tuple[int, int]] | None = None
        self._places: dict[int, tuple[Path, int, int] | None] = {}

    @cached_property
    def bends(self) -> Bends:
        """The functions that are not linear."""
        return Bends(self.flow, self.fixed)

    @cached_property
    def norms(self) -> list[Norm]:
        """The normalizations, by an operator or written out."""
        found = list[Norm]()
        for node in self.fixed.nodes((*NORMS, "Sqrt", "Pow")):
            if node.op in NORMS:
                found.append(Norm(node.real("epsilon", EPSILONS.get(node.op, DEFAULT_EPSILON)), node))
            else:
                found += self._written_out(node)
        return found

    def _written_out(self, root: FlatNode) -> Iterator[Norm]:
        """The root of a mean of squares and an epsilon."""
        total = self.flow.producers.get(self.fixed.source(root.input(0)))
        if total is None or not total.has("add") or (root.op == "Pow" and self.fixed.one(root.input(1)) != -0.5):
            return
        for given, other in permutations(total.inputs, 2):
            epsilon, mean = self.fixed.one(given), self.flow.producers.get(self.fixed.source(other))
            if epsilon is not None and mean is not None and mean.op == "ReduceMean" and 0 < epsilon < 0.1:
                yield Norm(epsilon, total)

    @cached_property
    def activations(self) -> list[Activation]:
        """The activations between products, and those of fused experts."""
        bends = [bend for bend in self.bends.by_result.values() if bend.kind in HIDDEN]
        products = [(bend, product) for bend in bends if (product := self._next_product(bend)) is not None]
        found = [Activation(bend.kind, self._width(product, outer=False), bend.node) for bend, product in products]
        fused = [(node.text("activation_type", "relu"), node) for node in self.fixed.nodes(("MoE", "QMoE"))]
        return found + [Activation(kind, None, node) for kind, node in fused if kind in HIDDEN]

    def _next_product(self, bend: Bend) -> FlatNode | None:
        """The product with weights after an activation, with at most a product by a gate between them."""
        name = bend.result
        for _ in range(MOST_STEPS):
            readers = self.fixed.readers(name)
            if len(readers) != 1:
                return None
            node = readers[0]
            if node.has("product"):
                return node if node.input(0) == name else None
            if not node.has("copy", "cast", "view", "multiply", "quantize", "quantize-dynamically", "dequantize"):
                return None
            name = node.output()
        return None

    def _width(self, product: FlatNode, *, outer: bool) -> int | None:
        """The number of columns of a product with weights, or the length of the axis that it sums over."""
        packed, weight = "N" if outer else "K", self.flow.constants.get(product.input(1))
        if product.attribute(packed) is not None:
            return product.number(packed, 0)
        if weight is None or len(weight.dims) != 2 or product.op == "Einsum":
            return None
        return int(weight.dims[product.number("transB", 0) ^ outer])

    @cached_property
    def routers(self) -> list[Router]:
        """The choices of experts."""
        found = []
        for node in self.fixed.nodes(("MoE", "QMoE", "TopK")):
            if node.op != "TopK":
                found.append(Router(node.number("k", 1), self._outer_width(node.input(1)), node))
                continue
            active, count = self.fixed.one(node.input(1)), self._outer_width(node.input(0))
            if active is not None and count is not None:
                found.append(Router(int(active), count, node))
        return found

    def _outer_width(self, name: str) -> int | None:
        """The number of columns of the product with weights that makes scores."""
        for _ in range(MOST_STEPS):
            node = self.flow.producers.get(name)
            if node is None:
                return None
            if node.has("product"):
                return self._width(node, outer=True)
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
                table, transposed = self._tensor(node.input(0))
                if table is not None and len(table.dims) == 2 and table.data_type in FLOATS:
                    found.append(Embedding(table, transposed, self._factor_after(node.output()), node))
        return found[0] if len(found) == 1 else None

    def _factor_after(self, name: str) -> float | None:
        """The factor on a value, where one node alone goes on with it; None where something is between the two."""
        added = False
        for _ in range(MOST_STEPS):
            readers = self.fixed.readers(name)
            scaling = [factor for node in readers if (factor := self.fixed.factor(node)) and factor[1] == name]
            if scaling:
                return scaling[0][0] if len(readers) == 1 and not added else None
            squared = (node for node in readers if node.has("multiply") and {*node.inputs} == {name})
            if any(squared) or any(node.has("product", "normalize", "power", "reduce") for node in readers):
                return 1.0
            if len(readers) != 1 or not readers[0].has("copy", "cast", "view", "dropout", "add"):
                return None
            added |= readers[0].has("add")
            name = readers[0].output()
        return None

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
        weight, transposed = self._tensor(product.input(1))
        if weight is None or len(weight.dims) != 2 or weight.data_type not in FLOATS:
            return None
        transposed ^= not product.number("transB", 0)
        return Head(weight, transposed, self._scales_back(product.input(0))[0], after, cap, product)

    def _capped(self, name: str) -> Bend | None:
        bend = self.bends.by_result.get(name)
        return bend if bend is not None and bend.cap is not None else None

    def _scales_back(self, name: str) -> tuple[float, str]:
        """The product of the factors before a value, and the value before these."""
        ends = self.bends.by_result
        factors, before = self.fixed.before_scales(name, "copy", "cast", "view", "pick", biases=True, ends=ends)
        return prod(factors, start=1.0), before

    def _tensor(self, name: str) -> tuple[TensorProto | None, bool]:
        """The constant that a value is, and whether it is transposed on the way."""
        transposed = False
        for _ in range(MOST_STEPS):
            node = self.flow.producers.get(name)
            if node is None or not node.has("copy", "cast", "permute"):
                break
            transposed ^= node.has("permute")
            name = node.input(0)
        return self.flow.constants.get(name), transposed

    def residual_factors(self) -> dict[float, FlatNode]:
        """The factors on what a layer adds to the residual: on the result of a product, before an addition."""
        found: dict[float, FlatNode] = {}
        for node in self.fixed.nodes(("Mul",)):
            factor, value = self.fixed.factor(node) or (0.0, "")
            made, readers = self.flow.producers.get(value), self.flow.consumers.get(node.output(), ())
            if made is not None and made.has("product") and any(one.has("add") for one, _ in readers):
                found.setdefault(factor, node)
        return found

    @cached_property
    def attentions(self) -> list[Attention]:
        """The attentions in the order of the graph."""
        return Scores(self.flow, self.fixed, self.bends).list_attentions()

    @cached_property
    def frequencies(self) -> tuple[list[Frequencies], bool]:
        """The rotations, and whether all of them could be read."""
        return find_frequencies(self.flow, self.fixed, self._row)

    def are_tied(self, embedding: Embedding, head: Head) -> bool | None:
        """Whether table and head are one weight, or hold equal elements at a few places; None where not known.

        A factor for each column is no difference: the weights of the last norm may be in the head.
        """
        one, other = embedding.table, head.weight
        if one is other or (one.name and one.name == other.name):
            return True
        if sorted(one.dims) != sorted(other.dims):
            return None
        rows, columns = reversed(one.dims) if embedding.is_transposed else one.dims
        ratios = []
        for at in range(SAMPLES):
            column, pair = (at * 7 + 3) % columns, []
            for row in ((at + 1) * rows // (SAMPLES + 2), (at + 2) * rows // (SAMPLES + 2)):
                x = self._element(one, (column, row) if embedding.is_transposed else (row, column))
                y = self._element(other, (column, row) if head.is_transposed else (row, column))
                if x is None or y is None:
                    return None
                pair.append((x, y))
            ratios.append(pair)
        products = [(x * v, y * u) for (x, y), (u, v) in ratios]
        return all(abs(x - y) <= SAME * max(abs(x), abs(y)) for x, y in products)

    def _element(self, tensor: TensorProto, place: tuple[int, int]) -> float | None:
        numbers = self._read(tensor, place[0] * int(tensor.dims[1]) + place[1], 1)
        return numbers[0] if numbers else None

    def _row(self, table: TensorProto, row: int) -> Numbers | None:
        """A row of a table; None where there is none."""
        if len(table.dims) != 2 or table.dims[0] <= row or table.dims[1] > MOST_NUMBERS:
            return None
        return self._read(table, row * int(table.dims[1]), int(table.dims[1]))

    def _read(self, tensor: TensorProto, start: int, count: int) -> Numbers | None:
        """Some elements of a tensor, in the graph or in the file of its weights."""
        held = read_numbers(tensor)
        if held is not None:
            return held[start : start + count] if start + count <= len(held) else None
        try:
            if id(tensor) not in self._places:
                self._places[id(tensor)] = self._locate(tensor)
            place, width = self._places[id(tensor)], WIDTHS.get(tensor.data_type)
            if place is None or width is None or (start + count) * width > place[2]:
                return None
            with place[0].open("rb") as file:
                file.seek(place[1] + start * width)
                return decode_numbers(file.read(count * width), tensor.data_type, count)
        except (OSError, ValueError):  # a file that is gone, a reference that is damaged
            return None

    def _locate(self, tensor: TensorProto) -> tuple[Path, int, int] | None:
        """The file that holds the values of a tensor, the first byte and the length; None where it is not known."""
        if self.path is None:
            return None
        reference = read_reference(tensor)
        if reference is not None:
            paths = [one.path for one in self.external if one.location == reference.location and one.bytes]
            return (paths[0], reference.offset, reference.length) if paths else None
        if not tensor.name:
            return self._locate_constant(tensor)
        if self._payloads is None:
            self._payloads = find_payloads(self.path)
        payload = self._payloads.get(str(tensor.name))
        return (self.path, *payload) if payload is not None else None

    def _locate_constant(self, tensor: TensorProto) -> tuple[Path, int, int] | None:
        """The same for a Constant, which has the name of its value; in a branch, the flat graph adds a number."""
        name = next((name for name, one in self.flow.constants.items() if one is tensor), "").rpartition(":")[2]
        try:
            weight = find_weights(self.path, [name]).get(name) if self.path is not None and name else None
        except (UnreadableError, OSError):
            return None
        return (weight.path, weight.offset, weight.length) if weight is not None and weight.path is not None else None


_READ: WeakKeyDictionary[GraphView, Arithmetic] = WeakKeyDictionary()


def read_arithmetic(file: OnnxFile, head_dim: int | None, *, alone: bool) -> Arithmetic | None:
    """The arithmetic of a decoder, read once; None where its graph cannot be followed.

    `alone` says that it is one file, whose weights can be looked up.
    """
    dataflow = file.dataflow
    if dataflow is None or file.view is None:
        return None
    if file.view not in _READ:
        _READ[file.view] = Arithmetic(dataflow.flow, file if alone else None, head_dim)
    return _READ[file.view]
