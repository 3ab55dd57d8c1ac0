"""The cache without its rounding, where a graph rounds it on the way to the output alone.

The attention of the same call does not use what is rounded. A copy that returns it unrounded shows whether anything
else is wrong; how far the logits of the model itself are off is then the error that the rounding makes.
"""

from kvdoctor.analysis.dataflow.walks import COMPUTES
from kvdoctor.analysis.processed_presents import ProcessedPresent, list_rounded
from kvdoctor.contract import DECODING, CacheContract
from kvdoctor.diagnose.float32.widen import FLOAT, cast, unrounded_name
from kvdoctor.errors import CannotCheck
from kvdoctor.model.operators import has, operators_with
from kvdoctor.model.proto import GraphProto, ModelProto, NodeProto
from kvdoctor.model.traverse import find_attribute, names_in, readers
from kvdoctor.model.view import ELEMENT_TYPES, GraphView, Scope

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
                _pass_on(node)
            elif has(node.op_type, "round"):
                _pass_on(node)
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


def _pass_on(node: NodeProto) -> None:
    node.CopyFrom(NodeProto(op_type="Identity", name=node.name, input=[node.input[0]], output=list(node.output)))
