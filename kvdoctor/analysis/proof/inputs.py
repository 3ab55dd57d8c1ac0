"""The types of inputs: what a loop feeds by the cache contract, to rows without padding."""

from kvdoctor.analysis.proof.terms import BATCH, ENCODER, ONE, Term, number, symbol
from kvdoctor.analysis.proof.types import HIDDEN, Axis, Lengths, Linear, Region, Type, axis_of
from kvdoctor.contract import Axis as Counted
from kvdoctor.contract import CacheContract, Dim, PhaseName, Port, Role, Slot

MASKS: tuple[Role, ...] = ("attention_mask", "padding_mask", "additive_mask")
POSITIONS: tuple[Role, ...] = ("position_ids", "cache_position")
TOKENS: tuple[Role, ...] = ("token_ids", "embeddings", "token_states", "rotary_cos", "rotary_sin")
GIVEN: tuple[Role, ...] = ("encoder_states", "encoder_mask", "adapter", "scale", "condition", "past")
"""Inputs that are the same in all calls of a sequence."""


def input_type(port: Port, contract: CacheContract, phase: PhaseName, lengths: Lengths) -> Type:
    """The type of an input that is no growing past."""
    kind = "b" if port.dtype == "bool" else "f" if "float" in port.dtype or port.dtype == "double" else "i"
    shape = _shape(port, contract, lengths)
    if shape is None:
        return Type(kind, None)
    value = _value(port, contract, phase, lengths)
    if value is not None:
        start: Term | float = value
        if kind == "f" and value.number is not None:
            start = float(value.number)
        return Type(kind, shape, items=(value,) if kind == "i" and shape in ((), ((),)) else None, linear=(start, ()))
    counted = any(axis in ((lengths.new,), (lengths.total,)) for axis in shape)
    if port.role in POSITIONS and "new" in port.axes:
        where: Linear = (lengths.past, ((port.axes.index("new") - len(shape), 1),))
        return Type(kind, shape, linear=where)
    if port.role in MASKS:
        return _mask(port, kind, shape, lengths)
    if port.role in TOKENS or (port.role in GIVEN and not counted):
        calm = kind != "f" or port.role != "encoder_mask"
        return Type(kind, shape, uniform=all(map(lengths.is_proper, shape)), calm=calm)
    return Type(kind, shape)


def _value(port: Port, contract: CacheContract, phase: PhaseName, lengths: Lengths) -> Term | None:
    """The number that all elements of an input have."""
    values: dict[Role, Term] = {
        "past_length": lengths.past,
        "write_index": lengths.past,
        "total_length": lengths.total,
        "last_index": lengths.total - ONE,
        "new_length": lengths.new,
        "last_new_index": lengths.new - ONE,
        "batch_size": symbol(BATCH),
        "logits_to_keep": number(0),
        "unused": number(0),
        "branch_switch": number(int(bool(contract.phases[phase].switch))),
    }
    if port.role == "setting" and port.value is not None and port.value == int(port.value):
        return number(int(port.value))
    return values.get(port.role)


def _mask(port: Port, kind: str, shape: tuple[Axis, ...], lengths: Lengths) -> Type:
    """A mask: of all entries, or of those that each new token may see."""
    seen, hidden = {"attention_mask": (1.0, 0.0), "padding_mask": (0.0, 1.0)}.get(port.role, (0.0, HIDDEN))
    if port.role == "additive_mask" and kind != "f":
        seen, hidden = 1.0, 0.0
    if "new" not in port.axes and port.axes.count("total") == 1:
        return Type(kind, shape, linear=(seen if kind == "f" else number(int(seen)), ()))
    if port.axes.count("new") != 1 or port.axes.count("total") != 1:
        return Type(kind, shape)
    pair = (port.axes.index("new") - len(shape), port.axes.index("total") - len(shape))
    regions: tuple[Region, ...] = ((pair, (hidden, seen, seen)),)
    return Type(kind, shape, uniform=all(map(lengths.is_proper, shape)), calm=kind != "f", regions=regions)


def slot_shape(slot: Slot, length: Term, contract: CacheContract) -> tuple[Axis, ...]:
    """The shape of the past or present of a slot."""
    sizes: dict[Counted, Axis] = {"past": (length,), "batch": (symbol(BATCH),), "batch_heads": _rows(contract)}
    return tuple(_axis(sizes, axis, dim) for axis, dim in zip(slot.axes, slot.shape, strict=True))


def _rows(contract: CacheContract) -> Axis:
    heads = number(contract.heads) if contract.heads else symbol("heads")
    return axis_of(symbol(BATCH), heads)


def _axis(sizes: dict[Counted, Axis], axis: Counted, dim: Dim) -> Axis:
    if isinstance(dim, int):
        return axis_of(number(dim))
    return sizes.get(axis) or axis_of(symbol(f"{axis} {dim}"))


def _shape(port: Port, contract: CacheContract, lengths: Lengths) -> tuple[Axis, ...] | None:
    """The axes of an input by what they count; None where the file declares no shape."""
    if port.shape is None or len(port.shape) != len(port.axes):
        return None
    sizes: dict[Counted, Axis] = {
        "batch": (symbol(BATCH),),
        "batch_heads": _rows(contract),
        "new": (lengths.new,),
        "past": axis_of(lengths.past),
        "total": (lengths.total,),
        "encoder": (symbol(ENCODER),),
        "batch_new": (symbol(BATCH), lengths.new),
    }
    return tuple(_axis(sizes, axis, dim) for axis, dim in zip(port.axes, port.shape, strict=True))
