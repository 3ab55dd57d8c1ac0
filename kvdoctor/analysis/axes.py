"""What the axes of a slot count: by the exporter's naming rule, checked against the shape and the dataflow."""

from kvdoctor.analysis.dataflow.axis_walks import DeclaredSizes
from kvdoctor.analysis.dataflow.states import StateFlow
from kvdoctor.analysis.dialects.dialect import SlotName, parse_axes
from kvdoctor.contract import Axis, Dim, Growth, Port, SlotKind
from kvdoctor.model.flatten import FlatNode
from kvdoctor.model.flow import Flow
from kvdoctor.model.operators import CONTRIB
from kvdoctor.model.view import Declared, GraphView

BUFFERED: set[Growth] = {"static", "delta", "ring"}
LENGTHS: set[Axis] = {"batch", "past"}
WIDTHS: set[Axis] = {"kv_heads", "head_dim", "layers"}
STATES = ("conv-state", "recurrent-state", "counter")
FUSED = ("GroupQueryAttention", "MultiHeadAttention", "PagedAttention")
MOST_NODES_BACK = 4
"""Nodes between the queries and the weight that makes them: a cast, an addition of the bias."""


def slot_axes(
    shape: tuple[Dim, ...], kind: SlotKind, growth: Growth, name: SlotName | None, state: StateFlow | None
) -> tuple[Axis, ...]:
    """Name the axes of a past input.

    The rule's order holds where its rank is the tensor's and new entries join along the axis that it calls the length;
    otherwise shape and dataflow decide.
    """
    if kind == "recurrent-state" and state is not None and state.batch == 1 and len(shape) > 2:
        return parse_axes("1B" + "Z" * (len(shape) - 2))  # of an LSTM, GRU or RNN of ONNX
    if growth == "paged":
        known = parse_axes("KkNH" if len(shape) == 4 else "KkH")[: len(shape)]
        return (*known, *parse_axes("1" * (len(shape) - len(known))))
    at = state.axis if state is not None else None
    ruled = _axes_by_name(shape, name)
    length = next((i for i, axis in enumerate(ruled or ()) if axis in ("past", "capacity", "encoder")), None)
    if ruled is None or (at is not None and length is not None and at != length and kind != "cross-attention"):
        layers, parts = (state.layers, state.parts) if state is not None else (None, None)
        ruled = _axes_by_structure(shape, kind, at, layers, parts)
    if not {"past", "capacity", "encoder"} & set(ruled):
        return ruled
    if ruled[0] == "parts" and name is not None and name.part in ("key", "value"):
        ruled = ("layers", *ruled[1:])  # a tensor of keys alone, or of values alone, has no parts axis
    if ruled[0] == "layers" and state is not None and (state.layers, state.parts) == (None, 0):
        ruled = ("parts", *ruled[1:])  # the graph takes it apart into the keys and values of one layer
    if ruled[:2] == ("batch", "kv_heads") and shape[1] == 1 and isinstance(shape[0], int) and shape[0] > 1:
        ruled = ("kv_heads", "batch", *ruled[2:])  # NPU layouts have the heads in front of a batch of 1
    at = next(i for i, axis in enumerate(ruled) if axis in ("past", "capacity", "encoder"))
    appended = not isinstance(shape[at], int) and ruled[at] == "past" and not (state is not None and state.cut)
    meaning: Axis = "capacity" if growth in BUFFERED - ({"delta"} if appended else set()) else "past"
    if kind in ("cross-attention", "encoder-states"):
        meaning = "encoder"
    return tuple(meaning if axis in ("past", "capacity", "encoder") else axis for axis in ruled)


def as_number(dim: Dim, axis: Axis | None = None) -> Dim:
    """Convert a size that is written as a name, "8", to a number: the exporter of transformers writes such names.

    A name stays a name where `axis`, that of an output, varies: Optimum calls the number of new tokens of its outputs
    "1". No exporter is known to do so on inputs.
    """
    varies = axis in ("batch", "batch_heads", "new", "past", "total")
    return int(dim) if isinstance(dim, str) and dim.isascii() and dim.isdigit() and not varies else dim


def unequal_axes(one: Declared | Port, other: Declared | Port) -> set[int] | None:
    """The axes on which two ports declare different numbers; None where their element types or ranks differ."""
    before, after = one.shape or (), other.shape or ()
    if one.dtype != other.dtype or len(before) != len(after):
        return None
    sizes = enumerate(zip(map(as_number, before), map(as_number, after), strict=True))
    return {at for at, (a, b) in sizes if isinstance(a, int) and isinstance(b, int) and a != b}


def _axes_by_structure(
    shape: tuple[Dim, ...], kind: SlotKind, at: int | None, layers: int | None = None, parts: int | None = None
) -> tuple[Axis, ...]:
    """Axes by rank, by which sizes are numbers, by the axis `at` of new entries, and by those of `layers` and `parts`.

    An axis of two parts is one next to the heads: of a tensor of rank 4, key and value may be adjacent heads.
    """
    rank = len(shape)
    if kind in STATES:
        return _state_axes(shape, kind)
    stacked: Axis | None = None
    if layers is not None and rank > 3 and at != layers and isinstance(shape[layers], int):
        stacked, place, layers = "layers", layers, None
    elif parts is not None and rank > 4 and at != parts and shape[parts] == 2:
        stacked, place, parts = "parts", parts, None
    if stacked is not None:
        within, *others = (axis - (axis > place) if axis is not None else None for axis in (at, layers, parts))
        rest = _axes_by_structure((*shape[:place], *shape[place + 1 :]), kind, within, *others)
        return (*rest[:place], stacked, *rest[place:])
    return _by_rank(shape, kind, likely_length(shape) if at is None else at)


def _by_rank(shape: tuple[Dim, ...], kind: SlotKind, at: int) -> tuple[Axis, ...]:
    rank = len(shape)
    if rank == 6:
        third, fourth = (size if isinstance(size, int) else 0 for size in shape[3:5])
        heads_first = at == 4 or (at != 3 and fourth > third)
        return parse_axes("L2BNSH" if heads_first else "L2BSNH")
    if rank == 5:
        if shape[0] == 2:
            return parse_axes("2BNSH" if at == 3 else "2BSNH")
        if shape[1] == 2:
            return parse_axes("B2SNH" if at == 2 else "B2NSH")
        if isinstance(shape[0], int) and not isinstance(shape[1], int):
            return parse_axes("LBNSH" if at == 3 else "LBSNH")
        if at == 1:
            return parse_axes("BS2NH" if shape[2] == 2 else "BSN2H" if shape[3] == 2 else "BS1NH")
        if at == 2:
            return parse_axes("BNS2H" if shape[3] == 2 else "BNS1H")
        return parse_axes("BN1HS" if at == 4 else "BN1SH")
    if rank == 4:
        return parse_axes({0: "SBNH", 1: "BSNH", 3: "BNHS"}.get(at, "BNSH"))
    if rank == 3:
        first = "X" if "head" in str(shape[0]) else "B"
        width = "D" if kind == "hidden-memory" else "H"
        return parse_axes({0: "SB" + width, 2: f"{first}{width}S"}.get(at, f"{first}S{width}"))
    return tuple("past" if index == at else "state" for index in range(rank))


def _axes_by_name(shape: tuple[Dim, ...], name: SlotName | None) -> tuple[Axis, ...] | None:
    if name is None:
        return None
    order = name.rule.value_order if name.part == "value" and name.rule.value_order else name.rule.order
    if not order or len(order) != len(shape):
        return None
    ruled = parse_axes(order)
    if ruled[0] == "parts" and isinstance(as_number(shape[0]), str):
        return None
    # A name alone proves nothing: where a length is a number and a width is open, the axes come in another order.
    fixed_lengths = any(isinstance(as_number(d), int) for d, axis in zip(shape, ruled, strict=True) if axis in LENGTHS)
    open_widths = any(not isinstance(as_number(d), int) for d, axis in zip(shape, ruled, strict=True) if axis in WIDTHS)
    return None if fixed_lengths and open_widths else ruled


def likely_length(shape: tuple[Dim, ...]) -> int:
    """The axis that most likely counts tokens: the one named so, else the first after the batch that is no number."""
    named = [i for i, size in enumerate(shape) if isinstance(size, str) and "past" in size.lower()]
    if len(named) == 1:
        return named[0]
    rank = len(shape)
    usual = rank - 2 if rank != 3 else 1
    batch = "batch" if rank > 4 else None  # which follows layers and parts there
    open_axes = [i for i in range(1, rank) if not isinstance(shape[i], int) and shape[i] != batch]
    return usual if usual in open_axes or not open_axes else open_axes[0]


def _state_axes(shape: tuple[Dim, ...], kind: SlotKind) -> tuple[Axis, ...]:
    """Axes of a state: the first is the batch where its size is no number, or is 1 followed by two others."""
    if kind == "counter":
        return parse_axes("".join("1" if isinstance(size, int) else "B" for size in shape))
    if len(shape) > 1 and isinstance(shape[0], int) and str(shape[1]).lower().startswith("batch"):
        return parse_axes("ZB" + "Z" * (len(shape) - 2))
    batched = bool(shape) and (not isinstance(shape[0], int) or (shape[0] == 1 and len(shape) >= 3))
    if not batched:
        return parse_axes("Z" * len(shape))
    return parse_axes("BCZ" if kind == "conv-state" and len(shape) == 3 else "B" + "Z" * (len(shape) - 1))


def find_head_dim(view: GraphView, flow: Flow, node: FlatNode) -> int | None:
    """The head_dim of one fused attention: the width of its queries over its number of heads."""
    if node.domain != CONTRIB or node.op not in FUSED:
        return None
    heads, groups = node.number("num_heads", 0), node.number("kv_num_heads", 0)
    if not node.input(1):  # queries, keys and values in one
        heads = heads + 2 * groups if groups > 0 else 0
    declared = {value.name: value.type.tensor_type.shape.dim for value in view.model.graph.value_info}
    shapes = {name: [dim.dim_value or None for dim in dims] for name, dims in declared.items() if len(dims) <= 3}
    sizes = DeclaredSizes(flow, {name: tuple(shape) for name, shape in shapes.items() if shape and shape[-1]})
    width = (sizes.shape(node.input(0), MOST_NODES_BACK, rank=3) or (None,))[-1]
    return width // heads if width and heads > 0 and width % heads == 0 else None
