"""Rounding taken out of a graph: of quantization, and of a cache that is rounded on the way to the output alone.

Dynamic: `DynamicQuantizeLinear` returns round(x / scale) + zero point, and `MatMulInteger` multiplies that by quantized
weights. Here x itself replaces the first, with a scale of 1 and a zero point of 0, and the product is one of real
numbers: the product of the scales that follows is then right as it is. Weights keep their quantized values.

Static: a QuantizeLinear and DequantizeLinear on an activation become a clip: the saturation at the ends of the scale
belongs to the mathematics of the graph.

Cache: where the attention of the same call does not use what is rounded, a copy that returns it unrounded shows whether
anything else is wrong; how far the logits of the model itself are off is then the error that the rounding makes.
"""

import struct
from collections.abc import Iterator

from kvdoctor.analysis.dataflow.walks import COMPUTES
from kvdoctor.analysis.processed_presents import ProcessedPresent, list_rounded
from kvdoctor.contract import DECODING, CacheContract
from kvdoctor.diagnose.float32.widen import FLOAT, cast, unrounded_name
from kvdoctor.errors import CannotCheck
from kvdoctor.model.edit import keep_only, replace_all
from kvdoctor.model.operators import has, operators_with
from kvdoctor.model.precision import DYNAMIC, INT8_LEVEL, activations_rounded
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.model.traverse import all_nodes, find_attribute, graphs_in, names_in, node_lists, readers
from kvdoctor.model.view import ELEMENT_TYPES, GraphView, Scope

PRODUCTS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
TAKES_QUANTIZED = {*PRODUCTS, "MatMulIntegerToFloat", "DequantizeLinear"}
"""Operators that can read the real number in place of the quantized one."""


def unround_integers(model: ModelProto) -> None:
    """Replace integer products by real ones, in place; raises `CannotCheck` where anything else reads integers."""
    if set(GraphView(model).operators) & {*DYNAMIC, *PRODUCTS, "MatMulIntegerToFloat"}:
        _IntegerRewriter(model).run()
        for graph in graphs_in(model.graph):
            del graph.value_info[:]  # they may declare integers
    for nodes in node_lists(model):
        for node in nodes:
            if node.op_type in DYNAMIC:
                raise CannotCheck(f"the operator {node.op_type} rounds internally")
            if node.op_type == "MatMulNBits":
                keep_only(node.attribute, lambda one: one.name != "accuracy_level" or one.i < INT8_LEVEL)


class _IntegerRewriter:
    """Rewrites one model. `real` are the names of values that were quantized and are real numbers now."""

    def __init__(self, model: ModelProto) -> None:
        self.model, self.known = model, names_in(model)
        self.sizes = {t.name: list(t.dims) for graph in graphs_in(model.graph) for t in graph.initializer}
        self.real: set[str] = set()
        self.given_out = {value.name for graph in graphs_in(model.graph) for value in graph.output}
        self.given_out |= {name for function in model.functions for name in function.output}

    def run(self) -> None:
        every = [node for nodes in node_lists(self.model) for node in nodes]
        self.real = {node.output[0] for node in every if has(node.op_type, "quantize-dynamically")}
        self._refuse_other_readers(every)
        for nodes in node_lists(self.model):
            replace_all(nodes, [made for node in nodes for made in self._rewrite(node)])

    def _refuse_other_readers(self, every: list[NodeProto]) -> None:
        products = {node.output[0] for node in every if node.op_type in PRODUCTS and self.real & {*node.input[:2]}}
        for node in every:
            if self.real.intersection(node.input) and node.op_type not in TAKES_QUANTIZED:
                raise CannotCheck(f"the operator {node.op_type} reads the output of DynamicQuantizeLinear")
            if products.intersection(node.input) and not has(node.op_type, "cast"):
                raise CannotCheck(f"the operator {node.op_type} reads the integers of a product")
        if self.given_out & (self.real | products):
            raise CannotCheck("a quantized value is an output of the graph")

    def _rewrite(self, node: NodeProto) -> list[NodeProto]:
        if has(node.op_type, "quantize-dynamically"):
            quantized, scale, zero = node.output
            return [_passing(node, quantized), scalar(scale, FLOAT, 1.0), scalar(zero, int(TensorProto.UINT8), 0)]
        if has(node.op_type, "dequantize") and node.input[0] in self.real:
            return [_passing(node, *node.output)]
        if node.op_type in PRODUCTS and self.real & {*node.input[:2]}:
            return self._product(node)
        if node.op_type == "MatMulIntegerToFloat" and self.real & {*node.input[:2]}:
            given = [*node.input, *[""] * 7]
            left, right = (given[0], given[2], given[4]), (given[1], given[3], given[5])
            return self._scaled_product(node, left, right, given[6])
        if node.op_type == "DynamicQuantizeMatMul":
            given = [*node.input, *[""] * 5]
            return self._scaled_product(node, (given[0], "", ""), (given[1], given[2], given[3]), given[4])
        return [node]

    def _product(self, node: NodeProto) -> list[NodeProto]:
        """MatMulInteger and ConvInteger: operands, then their zero points."""
        made: list[NodeProto] = []
        zeros = [*node.input[2:], "", ""]
        if node.op_type == "ConvInteger" and any(n > 1 for n in self.sizes.get(zeros[1], [])):
            raise CannotCheck("a ConvInteger has a zero point for each channel")
        operands = [self._real(made, name, zero) for name, zero in zip(node.input[:2], zeros, strict=False)]
        kind = PRODUCTS[node.op_type]
        product = NodeProto(op_type=kind, name=node.name, input=operands, output=list(node.output))
        product.attribute.extend(node.attribute)
        return [*made, product]

    def _scaled_product(
        self, node: NodeProto, left: tuple[str, str, str], right: tuple[str, str, str], bias: str
    ) -> list[NodeProto]:
        """Operands as (name, scale, zero point), real ones without both, and a bias."""
        made: list[NodeProto] = []
        operands = []
        for name, scale, zero in (left, right):
            operand = name if not scale else self._real(made, name, zero)
            operands.append(self._combine(made, "Mul", operand, scale) if scale else operand)
        out = node.output[0]
        product = unrounded_name(out, self.known) if bias else out
        made.append(NodeProto(op_type="MatMul", name=node.name, input=operands, output=[product]))
        if bias:
            made.append(NodeProto(op_type="Add", input=[product, bias], output=[out]))
        return made

    def _real(self, made: list[NodeProto], name: str, zero: str) -> str:
        """The real number of an operand: itself, or the integer less its zero point."""
        if name in self.real:
            return name
        number = unrounded_name(name, self.known)
        made.append(cast(name, number))
        if not zero:
            return number
        shift = unrounded_name(zero, self.known)
        made.append(cast(zero, shift))
        return self._combine(made, "Sub", number, shift)

    def _combine(self, made: list[NodeProto], operator: str, one: str, other: str) -> str:
        joined = unrounded_name(one, self.known)
        made.append(NodeProto(op_type=operator, input=[one, other], output=[joined]))
        return joined


RANGES: dict[int, tuple[int, int]] = {
    int(TensorProto.UINT8): (0, 255),
    int(TensorProto.INT8): (-128, 127),
    int(TensorProto.UINT16): (0, 65535),
    int(TensorProto.INT16): (-32768, 32767),
}
"""The ranges of the integer types that activations are quantized to."""


def unround_scales(model: ModelProto) -> None:
    """Replace by a clip, in place, every pair whose scale and zero point are one constant number each."""
    chosen = _pairs(model)
    if not chosen:
        return
    known = names_in(model)
    for nodes in node_lists(model):
        changed: list[NodeProto] = []
        for node in nodes:
            if has(node.op_type, "quantize") and node.output[0] in chosen:
                changed += _clip(node, chosen[node.output[0]], known)
            elif has(node.op_type, "dequantize") and node.input[0] in chosen:
                changed.append(_passing(node, *node.output))
            else:
                changed.append(node)
        replace_all(nodes, changed)
    for graph in graphs_in(model.graph):
        del graph.value_info[:]  # they may declare integers


def _pairs(model: ModelProto) -> dict[str, int]:
    """The values that are quantized and at once dequantized by the same scale, with their integer type."""
    kinds: dict[str, int | None] = {}
    for scope, node in activations_rounded(GraphView(model)):
        name, kind = node.output[0], _kind(scope, node)
        # The branches of an `If` may give one name to two values.
        kinds[name] = kind if kinds.get(name, kind) == kind else None
    for graph in graphs_in(model.graph):
        for value in graph.output:
            kinds.pop(value.name, None)
    scales = {node.output[0]: list(node.input[1:3]) for node in all_nodes(model) if has(node.op_type, "quantize")}
    for node in all_nodes(model):
        for name in kinds.keys() & set(node.input):
            if not has(node.op_type, "dequantize") or list(node.input) != [name, *scales[name]]:
                kinds[name] = None
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _kind(scope: Scope, node: NodeProto) -> int | None:
    """The integer type of a QuantizeLinear with one scale for all; None where it has several, or computes them."""
    constants = [scope.constant(name) for name in node.input[1:3]]
    if len(constants) < 2:
        return None
    scale, zero = constants
    if scale is None or zero is None or zero.data_type not in RANGES or any(dim != 1 for dim in scale.dims):
        return None
    return int(zero.data_type)


def _clip(node: NodeProto, kind: int, known: set[str]) -> Iterator[NodeProto]:
    """The real number, limited to the range of the scale."""
    value, scale, zero = node.input
    shift = unrounded_name(zero, known)
    yield cast(zero, shift)
    for operator, end in zip(("Max", "Min"), RANGES[kind], strict=True):
        whole, above, number = (unrounded_name(zero, known) for _ in range(3))
        yield scalar(whole, FLOAT, end)
        yield NodeProto(op_type="Sub", input=[whole, shift], output=[above])
        yield NodeProto(op_type="Mul", input=[above, scale], output=[number])
        bounded = node.output[0] if operator == "Min" else unrounded_name(value, known)
        yield NodeProto(op_type=operator, input=[value, number], output=[bounded])
        value = bounded


def scalar(name: str, kind: int, value: float) -> NodeProto:
    """A Constant of one number, float32 or of an integer type."""
    tensor = TensorProto(data_type=kind)
    if kind == FLOAT:
        tensor.raw_data = struct.pack("<f", value)
    else:
        tensor.int32_data.append(int(value))
    attribute = AttributeProto(name="value", type=AttributeProto.TENSOR, t=tensor)
    return NodeProto(op_type="Constant", output=[name], attribute=[attribute])


FLOAT8 = {"float8e4m3fn", "float8e4m3fnuz", "float8e5m2", "float8e5m2fnuz"}
DEFAULTS = {"axis": 1, "block_size": 0}
"""Attributes of a QuantizeLinear and its DequantizeLinear that say which numbers have a scale in common."""


def unround_presents(model: ModelProto, contract: CacheContract) -> None:
    """Return the cache without its rounding, in place, where a graph rounds it on the way to the output alone.

    Pairs of QuantizeLinear and DequantizeLinear, and Round between two scales, pass on what they take; a Cast to
    integers of what was rounded is one to float32, and so is a Cast to a float of 8 bits whose result is cast back. A
    cache that is returned in integers stays as it is.

    Raises:
        CannotCheck: an operator that has no counterpart for real numbers reads the integers.
    """
    known = names_in(model)
    for phase in DECODING:
        view = GraphView(model)
        found = list_rounded(view, contract, phase)
        chains = {name: one for name, one in found.items() if "int" not in view.outputs[name].dtype}
        pairs = _find_pairs(chains)
        for name, processed in chains.items():
            _ChainRewriter(processed, pairs, known, view.outputs[name].dtype in FLOAT8).run()
            del processed.graph.value_info[:]  # they may declare 8 bits


def _find_pairs(chains: dict[str, ProcessedPresent]) -> set[str]:
    """The values that are quantized, and that nothing reads but a DequantizeLinear by the same scale."""
    graph = next((one.graph for one in chains.values()), GraphProto())
    read, returned = readers(graph), {value.name for value in graph.output}
    nodes = [node for one in chains.values() for node in one.nodes if has(node.op_type, "quantize")]
    found = set()
    for node in (node for node in nodes if node.output[0] not in returned):
        others = read.get(node.output[0], ())
        undone = (has(o.op_type, "dequantize") and at == 0 and _scale_of(o) == _scale_of(node) for o, at in others)
        found |= {node.output[0]} if others and all(undone) else set()
    return found


def _scale_of(node: NodeProto) -> tuple[object, ...]:
    """The names of scale and zero point, and the numbers that have one in common."""
    given = (find_attribute(node, name) for name in DEFAULTS)
    pairs = zip(given, DEFAULTS.values(), strict=True)
    return (*filter(None, node.input[1:]), *(value.i if value is not None else default for value, default in pairs))


class _ChainRewriter:
    """Rewrites what rounds one present. `whole` were whole numbers of a float type, `real` were integers."""

    def __init__(self, processed: ProcessedPresent, pairs: set[str], known: set[str], keep_float8: bool) -> None:
        self.nodes, self.scope = processed.nodes, Scope(processed.graph, "")
        self.pairs, self.known, self.keep_float8 = pairs, known, keep_float8
        self.whole, self.real = set[str](), set[str]()

    def run(self) -> None:
        for node in self.nodes:
            given, made = set(node.input), set(node.output)
            if self.pairs & (given | made) and not has(node.op_type, "copy"):
                node.CopyFrom(_passing(node, *node.output))
            elif has(node.op_type, "round"):
                node.CopyFrom(_passing(node, *node.output))
                self.whole |= made
            elif self.real & given:
                self._rewrite_integers(node)
            elif has(node.op_type, "cast"):
                self._rewrite_cast(node)
            elif self.whole & given:
                self.whole |= made

    def _rewrite_cast(self, node: NodeProto) -> None:
        """A Cast to 8 bits, or of whole numbers to integers, as one to float32."""
        target = next((attribute for attribute in node.attribute if attribute.name == "to"), None)
        kind = ELEMENT_TYPES.get(target.i, "") if target is not None else ""
        if target is None or (kind in FLOAT8 and self.keep_float8):
            return
        if "int" in kind and self.whole & set(node.input):
            target.i = FLOAT
            self.real |= set(node.output)
        elif kind in FLOAT8:
            target.i = FLOAT

    def _rewrite_integers(self, node: NodeProto) -> None:
        """An operator on what was integers: the same one on real numbers."""
        if has(node.op_type, "dequantize"):
            self._scale(node)
            return
        if node.op_type not in COMPUTES | operators_with("copy", "cast"):
            raise CannotCheck(f"the operator {node.op_type} reads integers of the cache that is returned")
        target = find_attribute(node, "to")
        if target is not None and "int" not in ELEMENT_TYPES.get(target.i, ""):
            return
        if target is not None:
            target.i = FLOAT
        for index, name in enumerate(node.input):
            if name and name not in self.real:
                node.input[index] = self._cast_before(node, name)
        self.real |= set(node.output)

    def _scale(self, node: NodeProto) -> None:
        """A DequantizeLinear with one scale as a product of what is left without the zero point."""
        value, scale, *zeros = node.input
        number = self.scope.constant(scale)
        if number is None or any(size != 1 for size in number.dims):
            raise CannotCheck("a DequantizeLinear of the cache that is returned has no single scale")
        for zero in filter(None, zeros):
            shift, value_less = self._cast_before(node, zero), unrounded_name(value, self.known)
            self._put_before(node, NodeProto(op_type="Sub", input=[value, shift], output=[value_less]))
            value = value_less
        node.CopyFrom(NodeProto(op_type="Mul", name=node.name, input=[value, scale], output=list(node.output)))

    def _cast_before(self, node: NodeProto, name: str) -> str:
        """The name of a value in float32; the Cast stands before the node."""
        number = unrounded_name(name, self.known)
        self._put_before(node, cast(name, number))
        return number

    def _put_before(self, node: NodeProto, made: NodeProto) -> None:
        nodes = self.scope.graph.node
        nodes.insert(next(at for at, other in enumerate(nodes) if node.output[0] in other.output), made)


def _passing(node: NodeProto, *outputs: str) -> NodeProto:
    return NodeProto(op_type="Identity", name=node.name, input=[node.input[0]], output=outputs)
