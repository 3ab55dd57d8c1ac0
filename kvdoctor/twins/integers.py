"""Dynamic quantisation without its rounding: real numbers where integers were multiplied.

`DynamicQuantizeLinear` gives round(x / scale) + zero point, and `MatMulInteger` multiplies that by quantised weights.
Here x itself stands for the first, with a scale of 1 and a zero point of 0, and the product is that of real numbers:
what follows, the product of the scales, is then right as it stands. The weights keep the values they were quantised to.
"""

from kvdoctor.exactness import DYNAMIC, INT8_LEVEL
from kvdoctor.graph import GraphView
from kvdoctor.onnx_schema import ModelProto, NodeProto, TensorProto
from kvdoctor.scoping import graphs
from kvdoctor.twins.names import FLOAT, Names, NoTwin, bodies, cast, scalar

PRODUCTS = {"MatMulInteger": "MatMul", "ConvInteger": "Conv"}
TAKES_QUANTISED = {*PRODUCTS, "MatMulIntegerToFloat", "DequantizeLinear"}
"""Operators that can take the real number in the place of the quantised one."""


def apply(model: ModelProto) -> None:
    """Change a model in place.

    Raises:
        NoTwin: something other than a product takes what is quantised, or an operator rounds inside.
    """
    view = GraphView(model)
    used = set(view.operators)
    if used & {*DYNAMIC, *PRODUCTS, "MatMulIntegerToFloat"}:
        _Rewriting(model).run()
        for graph in graphs(model.graph):
            del graph.value_info[:]  # they may speak of integers
    for nodes in bodies(model):
        for node in nodes:
            if node.op_type in DYNAMIC:
                raise NoTwin(f"the operator {node.op_type} rounds inside")
            if node.op_type == "MatMulNBits":
                _in_float(node)


def _in_float(node: NodeProto) -> None:
    kept = [a for a in node.attribute if a.name != "accuracy_level" or a.i < INT8_LEVEL]
    del node.attribute[:]
    node.attribute.extend(kept)


class _Rewriting:
    """One model under way. `real` are the names of what was quantised and is a real number now."""

    def __init__(self, model: ModelProto) -> None:
        self.model, self.names = model, Names(model)
        self.sizes = {t.name: list(t.dims) for graph in graphs(model.graph) for t in graph.initializer}
        self.real: set[str] = set()
        self.given_out = {value.name for graph in graphs(model.graph) for value in graph.output}
        self.given_out |= {name for function in model.functions for name in function.output}

    def run(self) -> None:
        every = [node for nodes in bodies(self.model) for node in nodes]
        self.real = {node.output[0] for node in every if node.op_type == "DynamicQuantizeLinear"}
        self._refuse_others(every)
        for nodes in bodies(self.model):
            changed: list[NodeProto] = []
            for node in nodes:
                changed += self._changed(node)
            del nodes[:]
            nodes.extend(changed)

    def _refuse_others(self, every: list[NodeProto]) -> None:
        products = {node.output[0] for node in every if node.op_type in PRODUCTS and self.real & {*node.input[:2]}}
        for node in every:
            if self.real.intersection(node.input) and node.op_type not in TAKES_QUANTISED:
                raise NoTwin(f"the operator {node.op_type} takes what DynamicQuantizeLinear gives")
            if products.intersection(node.input) and node.op_type != "Cast":
                raise NoTwin(f"the operator {node.op_type} takes the integers that a product gives")
        if self.given_out & (self.real | products):
            raise NoTwin("what is quantised leaves the graph")

    def _changed(self, node: NodeProto) -> list[NodeProto]:
        if node.op_type == "DynamicQuantizeLinear":
            quantised, scale, zero = node.output
            return [
                NodeProto(op_type="Identity", name=node.name, input=[node.input[0]], output=[quantised]),
                scalar(scale, FLOAT, 1.0),
                scalar(zero, int(TensorProto.UINT8), 0),
            ]
        if node.op_type == "DequantizeLinear" and node.input[0] in self.real:
            return [NodeProto(op_type="Identity", name=node.name, input=[node.input[0]], output=list(node.output))]
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
            raise NoTwin("a ConvInteger has a zero point for each channel")
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
            operands.append(self._joined(made, "Mul", operand, scale) if scale else operand)
        out = node.output[0]
        product = self.names.fresh(out) if bias else out
        made.append(NodeProto(op_type="MatMul", name=node.name, input=operands, output=[product]))
        if bias:
            made.append(NodeProto(op_type="Add", input=[product, bias], output=[out]))
        return made

    def _real(self, made: list[NodeProto], name: str, zero: str) -> str:
        """The real number behind an operand: itself, or the integer less its zero point."""
        if name in self.real:
            return name
        number = self.names.fresh(name)
        made.append(cast(name, number))
        if not zero:
            return number
        shift = self.names.fresh(zero)
        made.append(cast(zero, shift))
        return self._joined(made, "Sub", number, shift)

    def _joined(self, made: list[NodeProto], operator: str, one: str, other: str) -> str:
        joined = self.names.fresh(one)
        made.append(NodeProto(op_type=operator, input=[one, other], output=[joined]))
        return joined
