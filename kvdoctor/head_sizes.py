"""How wide the heads of a fused attention are, by the graph itself: caches may leave that to a config."""

from kvdoctor.cache_operators import CONTRIB
from kvdoctor.flow import Flow, FlowNode
from kvdoctor.graph import GraphView

FUSED = ("GroupQueryAttention", "MultiHeadAttention", "PagedAttention")


def head_width(view: GraphView, flow: Flow, node: FlowNode) -> int | None:
    """The width of a head of one attention, by the number of heads and the width of the queries."""
    if node.domain != CONTRIB or node.op not in FUSED:
        return None
    heads, groups = node.number("num_heads", 0), node.number("kv_num_heads", 0)
    if len(node.inputs) < 2 or not node.inputs[1]:  # queries, keys and values in one
        heads = heads + 2 * groups if groups > 0 else 0
    width = _width(view, flow, node.inputs[0])
    return width // heads if width and heads > 0 and width % heads == 0 else None


def _width(view: GraphView, flow: Flow, name: str) -> int | None:
    """The last size of a value in the graph: as declared, or as the weight that it is multiplied with has it."""
    declared = {value.name: value.type.tensor_type.shape.dim for value in view.model.graph.value_info}
    for _ in range(4):
        sizes = declared.get(name)
        if sizes and len(sizes) <= 3 and sizes[-1].dim_value > 0:
            return int(sizes[-1].dim_value)
        node = flow.producers.get(name)
        if node is None or node.op not in ("MatMul", "MatMulNBits", "Add", "Cast", "Identity"):
            return None
        if node.op == "MatMulNBits":
            return node.number("N", 0) or None
        if node.op == "MatMul":
            weight = flow.constant(node.inputs[1]) if len(node.inputs) > 1 else None
            return int(weight.dims[-1]) if weight is not None and len(weight.dims) == 2 else None
        name = node.inputs[0]
    return None
