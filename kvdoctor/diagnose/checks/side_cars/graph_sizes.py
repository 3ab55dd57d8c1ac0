"""Reads from the graph itself the sizes that configs declare.

The contract cannot serve: its sizes that the graph leaves open come from the configs that are to be checked.
"""

from kvdoctor.analysis.arithmetic.rotary import TABLES, list_tables
from kvdoctor.analysis.axes import as_number, find_head_dim
from kvdoctor.analysis.dataflow.walks import KEEPS
from kvdoctor.analysis.port_roles import FEW_ROWS
from kvdoctor.analysis.stacks import StackFiles
from kvdoctor.contract import Axis, CacheContract
from kvdoctor.diagnose.context import ContractContext
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import CONTRIB, operators_with
from kvdoctor.model.view import ELEMENT_TYPES

COUNTS = operators_with("range", "accumulate", "measure")
SHIFTS = operators_with("add", "clamp")
RECKONED = 0
"""Stands for the rows of a table whose index is computed from the token ids."""
RECKONS = operators_with("arithmetic", "select")
COSINES = {**{operator: at for operator, (at, _) in TABLES.items()}, (CONTRIB, "PagedAttention"): 8}
"""The input of an operator that takes the table of cosines, one row for each position."""
BIAS = 10
"""The input of GroupQueryAttention that takes a bias, which may hold a window."""
NEAR = 200


def cache_sizes(context: ContractContext, axis: Axis, parts: tuple[str, ...]) -> set[int]:
    """The declared sizes of an axis over the self-attention caches of the layers."""
    found: set[int] = set()
    for slot in context.contract.of_kind("self-attention"):
        heads = {"kv_heads", "batch_heads"} & set(slot.axes)  # else the last axis may hold all heads in a row
        packed = axis == "head_dim" and not slot.dtype.startswith(("float", "bfloat", "double"))
        if slot.part not in parts or axis not in slot.axes or not heads or packed:
            continue
        at = slot.axes.index(axis)
        ports = (context.decode_graph.inputs.get(slot.past), context.decode_graph.outputs.get(slot.present or ""))
        shapes = [port.shape for port in ports if port is not None and len(port.shape or ()) == len(slot.axes)]
        sizes = [as_number(shape[at], axis) for shape in shapes if shape is not None]
        found.update([size for size in sizes if isinstance(size, int)][:1])
    return found


def logits_width(context: ContractContext) -> int | None:
    """The declared width of the logits."""
    port = context.contract.graph("decode").port("logits")
    if port is None or not port.shape or port.axes[-1:] != ("vocabulary",):
        return None
    size = as_number(port.shape[-1], "vocabulary")
    return size if isinstance(size, int) else None


def head_widths(context: ContractContext) -> set[int]:
    """Widths of the heads of fused attentions."""
    flow = _flow(context.stack)
    found = (find_head_dim(context.decode_graph, flow, node) for node in flow.nodes) if flow is not None else ()
    return {width for width in found if width is not None}


def windows(context: ContractContext) -> dict[int | None, int] | None:
    """How far GroupQueryAttention looks back, by layer, -1 without limit; None where a bias may hold a window."""
    flow, found = _flow(context.stack), {}
    layers = {slot.past: slot.layer for slot in context.contract.slots}
    for node in flow.nodes if flow is not None else ():
        if (node.domain, node.op) == (CONTRIB, "GroupQueryAttention") and len(node.inputs) > 3:
            if len(node.inputs) > BIAS and node.inputs[BIAS]:
                return None
            found[layers.get(node.inputs[3])] = node.number("local_window_size", -1)
    return found


def positions(stack: StackFiles, contract: CacheContract) -> int | None:
    """Rows of the shortest table that is looked up by position; None where the graph shows none."""
    return min(_find_tables(stack, contract)[0], default=None)


def token_rows(context: ContractContext) -> int | None:
    """Rows of the smallest table that is looked up by token id; None without one, or where ids are computed with."""
    words = _find_tables(context.stack, context.contract)[1]
    return None if RECKONED in words else min(words, default=None)


def _find_tables(stack: StackFiles, contract: CacheContract) -> tuple[list[int], list[int]]:
    """Rows of the tables that are looked up by position, and of those that are looked up by token id."""
    flow = _flow(stack)
    if flow is None:
        return [], []
    ports = contract.graph("decode").inputs
    tokens = {port.name for port in ports if port.role in ("token_ids", "token_and_position")}
    places = {port.name for port in ports if port.role in ("position_ids", "cache_position")}
    widths = {port.shape[-1] for port in ports if port.role == "embeddings" and port.shape}
    found, counted, words = list[int](), [], list[int]()
    for node in flow.nodes:
        at = COSINES.get((node.domain, node.op))
        tables = list_tables(flow, node.inputs[at]) if at is not None and len(node.inputs) > at else []
        rows = [int(table.dims[0]) for table in tables if table is not None and len(table.dims) == 2]
        found += [max(rows)] if rows and len(rows) == len(tables) else []  # of several, the longest one counts
        table = _table(flow, node)
        if table is None:
            continue
        if _roots(flow, node, SHIFTS)[0] & places:
            found.append(table[0])
            continue
        roots, counts = _roots(flow, node, RECKONS)
        if counts or roots & places:
            counted.append(table)
        elif roots & tokens:
            widths.add(table[1])
            words.append(table[0] if _roots(flow, node, frozenset())[0] & tokens else RECKONED)
    # A value that is first computed with may be a bias by distance; a table of positions is as wide as the embeddings.
    found += [rows for rows, width in counted if rows >= FEW_ROWS and width in widths]
    return found, words


def _table(flow: Flow, node: FlatNode) -> tuple[int, int] | None:
    """The size of the constant table that a node looks rows up in."""
    if not node.has("pick") or len(node.inputs) < 2 or node.number("axis", 0) != 0:
        return None
    tensor = flow.constant(node.inputs[0])
    if tensor is None or len(tensor.dims) != 2 or ELEMENT_TYPES.get(tensor.data_type) == "bool":
        return None
    rows, width = int(tensor.dims[0]), int(tensor.dims[1])
    # The weights of tied logits are transposed on their way: onnxruntime-genai, Gemma.
    name, transposed, left = node.inputs[0], False, NEAR
    while left and (made := flow.producers.get(name)) is not None and made.inputs:
        transposed, name, left = transposed ^ made.has("permute"), made.inputs[0], left - 1
    return (width, rows) if transposed else (rows, width)


def _roots(flow: Flow, node: FlatNode, through: frozenset[str]) -> tuple[set[str], bool]:
    """Where an index comes from: the names at its roots, and whether something is counted on the way."""
    waiting, found, counts, left = list(node.inputs[1:3]), set[str](), False, NEAR
    seen = set(waiting)
    while waiting and left:
        name, left = waiting.pop(), left - 1
        made = flow.producers.get(name)
        if made is None:
            found.add(name)
        elif made.op in COUNTS:
            counts = True
        elif made.op in KEEPS or made.op in through:
            sources = made.inputs if made.op in through else made.inputs[:1]
            waiting += [source for source in sources if source not in seen]
            seen.update(sources)
    return found, counts


def _flow(stack: StackFiles) -> Flow | None:
    dataflow = stack.main.dataflow
    return dataflow.flow if dataflow is not None else None
