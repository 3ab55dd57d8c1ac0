"""What the axes of a slot count: by the producer's rule, held against the shape and against the dataflow."""

from kvdoctor.contract import Axis, Dim, Growth, SlotKind
from kvdoctor.dataflow import StateFlow
from kvdoctor.dialects import SlotName, axes

BUFFERED: set[Growth] = {"static", "delta", "ring"}
COUNTED: set[Axis] = {"batch", "past"}
WIDTHS: set[Axis] = {"kv_heads", "head_dim", "layers"}
STATES = ("conv-state", "recurrent-state", "counter")


def slot_axes(
    shape: tuple[Dim, ...], kind: SlotKind, growth: Growth, name: SlotName | None, state: StateFlow | None
) -> tuple[Axis, ...]:
    """Name the axes of a past input.

    The order of the rule holds where its rank is the tensor's and the dataflow does not bring new entries along another
    axis; else shape and dataflow tell.
    """
    if kind == "recurrent-state" and state is not None and state.batch == 1:
        return axes("1B" + "Z" * (len(shape) - 2))  # of an LSTM, GRU or RNN of ONNX
    if growth == "paged":
        known = axes("KkNH" if len(shape) == 4 else "KkH")[: len(shape)]
        return (*known, *axes("1" * (len(shape) - len(known))))
    at = state.axis if state is not None else None
    ruled = _ruled(shape, name)
    length = next((i for i, axis in enumerate(ruled or ()) if axis in ("past", "capacity", "encoder")), None)
    if ruled is None or (at is not None and length is not None and at != length and kind != "cross-attention"):
        ruled = structural_axes(shape, kind, at, state.layers if state is not None else None)
    if not {"past", "capacity", "encoder"} & set(ruled):
        return ruled
    if ruled[0] == "parts" and name is not None and name.part in ("key", "value"):
        ruled = ("layers", *ruled[1:])  # keys alone, or values alone, have no parts
    if ruled[:2] == ("batch", "kv_heads") and shape[1] == 1 and isinstance(shape[0], int) and shape[0] > 1:
        ruled = ("kv_heads", "batch", *ruled[2:])  # NPU layouts have the heads in front of a batch of 1
    word = _length_word(shape, ruled, kind, growth, state is not None and state.cut)
    return tuple(word if axis in ("past", "capacity", "encoder") else axis for axis in ruled)


def as_number(dim: Dim, axis: Axis | None = None) -> Dim:
    """A size that is written as a name, "8": the exporter of transformers does so.

    With the axis of an output given it stays a name where that axis varies: Optimum calls the number of new tokens of
    its outputs "1". On inputs none has been seen to.
    """
    varies = axis in ("batch", "batch_heads", "new", "past", "total")
    return int(dim) if isinstance(dim, str) and dim.isascii() and dim.isdigit() and not varies else dim


def structural_axes(
    shape: tuple[Dim, ...], kind: SlotKind, at: int | None, layers: int | None = None
) -> tuple[Axis, ...]:
    """Axes by rank, by which sizes are numbers, and by the axis `at` along which entries come, and that of `layers`."""
    rank = len(shape)
    if kind in STATES:
        return _state_axes(shape, kind)
    if layers is not None and rank > 3 and at != layers and isinstance(shape[layers], int):
        within = at - (at > layers) if at is not None else None
        rest = structural_axes((*shape[:layers], *shape[layers + 1 :]), kind, within)
        return (*rest[:layers], "layers", *rest[layers:])
    return _by_rank(shape, kind, _likely_length(shape) if at is None else at)


def _by_rank(shape: tuple[Dim, ...], kind: SlotKind, at: int) -> tuple[Axis, ...]:
    rank = len(shape)
    if rank == 6:
        return axes("L2BNSH" if at == 4 else "L2BSNH")
    if rank == 5:
        if shape[0] == 2:
            return axes("2BNSH" if at == 3 else "2BSNH")
        if shape[1] == 2:
            return axes("B2NSH")
        if isinstance(shape[0], int) and not isinstance(shape[1], int):
            return axes("LBNSH" if at == 3 else "LBSNH")
        return axes("BN1HS" if at == 4 else "BN1SH")
    if rank == 4:
        return axes({0: "SBNH", 1: "BSNH", 3: "BNHS"}.get(at, "BNSH"))
    if rank == 3:
        first = "X" if "head" in str(shape[0]) else "B"
        width = "D" if kind == "hidden-memory" else "H"
        return axes({0: "SB" + width, 2: f"{first}{width}S"}.get(at, f"{first}S{width}"))
    return tuple("past" if index == at else "state" for index in range(rank))


def _ruled(shape: tuple[Dim, ...], name: SlotName | None) -> tuple[Axis, ...] | None:
    if name is None:
        return None
    order = name.rule.value_order if name.part == "value" and name.rule.value_order else name.rule.order
    if not order or len(order) != len(shape):
        return None
    ruled = axes(order)
    if ruled[0] == "parts" and isinstance(as_number(shape[0]), str):
        return None
    # A name alone is no proof: where a count is a number and a width is open, somebody else chose another order.
    counts = any(isinstance(as_number(d), int) for d, axis in zip(shape, ruled, strict=True) if axis in COUNTED)
    open_widths = any(not isinstance(as_number(d), int) for d, axis in zip(shape, ruled, strict=True) if axis in WIDTHS)
    return None if counts and open_widths else ruled


def _length_word(shape: tuple[Dim, ...], ruled: tuple[Axis, ...], kind: SlotKind, growth: Growth, cut: bool) -> Axis:
    if kind in ("cross-attention", "encoder-states"):
        return "encoder"
    at = next(i for i, axis in enumerate(ruled) if axis in ("past", "capacity", "encoder"))
    if growth == "delta" and not isinstance(shape[at], int) and ruled[at] == "past" and not cut:
        return "past"
    return "capacity" if growth in BUFFERED else "past"


def _likely_length(shape: tuple[Dim, ...]) -> int:
    """The axis that most likely counts tokens: the one behind the batch whose size is no number."""
    rank = len(shape)
    usual = rank - 2 if rank != 3 else 1
    open_axes = [i for i in range(1, rank) if not isinstance(shape[i], int)]
    return usual if usual in open_axes or not open_axes else open_axes[0]


def _state_axes(shape: tuple[Dim, ...], kind: SlotKind) -> tuple[Axis, ...]:
    """A state has a batch axis in front where its first size is no number, or is 1 before two others."""
    if kind == "counter":
        return axes("1" * len(shape))
    if len(shape) > 1 and isinstance(shape[0], int) and str(shape[1]).lower().startswith("batch"):
        return axes("ZB" + "Z" * (len(shape) - 2))
    batched = bool(shape) and (not isinstance(shape[0], int) or (shape[0] == 1 and len(shape) >= 3))
    if not batched:
        return axes("Z" * len(shape))
    return axes("BCZ" if kind == "conv-state" and len(shape) == 3 else "B" + "Z" * (len(shape) - 1))
