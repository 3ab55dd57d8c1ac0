"""The types of what a graph is given: constants, and what a loop feeds by the cache contract to rows without padding.

Constants are numbers, tables that count up, masks, and weights, which are not read.
"""

import math
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any

from kvdoctor.analysis.arithmetic.numbers import read_numbers
from kvdoctor.analysis.proof.elementwise import KINDS
from kvdoctor.analysis.proof.types import (
    BATCH,
    ENCODER,
    HIDDEN,
    MOST_ITEMS,
    ONE,
    Axis,
    Lengths,
    Linear,
    Mark,
    Region,
    Term,
    Type,
    axis_of,
    number,
    symbol,
)
from kvdoctor.contract import Axis as Counted
from kvdoctor.contract import CacheContract, Dim, PhaseName, Port, Role, Slot
from kvdoctor.errors import UnreadableError
from kvdoctor.model.operators import has
from kvdoctor.model.proto import TensorProto
from kvdoctor.model.traverse import find_attribute
from kvdoctor.model.view import GraphView, integers
from kvdoctor.model.weights import find_weights, list_tensors


def read_constant(tensor: TensorProto, table: Any) -> Type:
    """The type of a constant; `table` is its content where the skeleton leaves it out and it may be a mask."""
    kind = KINDS.get(tensor.data_type, "?")
    dims = tuple(int(size) for size in tensor.dims)
    shape = tuple(axis_of(number(size)) for size in dims)
    if prod(dims) == 0:
        listed = len(dims) == 1 and kind == "i"
        return Type(kind, shape, items=()) if listed else Type(kind, shape, linear=(number(0), ()))
    values = _list_values(tensor) if table is None else None
    if table is not None:
        return _read_table(kind, dims, table)
    if values is None:
        # A weight. A square one may be a mask that hides scores; it counts as one.
        square = len(dims) > 1 and dims[-1] == dims[-2] > 1
        return Type(kind, shape, uniform=True, calm=not square)
    linear = _find_linear(kind, tensor, values)
    items = None
    if kind in "ib" and len(dims) < 2 and len(values) <= MOST_ITEMS:
        items = tuple(number(int(value)) for value in integers(tensor) or values)
    calm = kind != "f" or min(values) > HIDDEN
    regions = () if linear is not None else _find_regions(dims, values)
    return Type(kind, shape, items, linear, uniform=True, calm=calm, regions=regions)


def _list_values(tensor: TensorProto) -> tuple[float, ...] | None:
    if tensor.data_type != TensorProto.BOOL:
        return read_numbers(tensor)
    listed = tuple(tensor.raw_data) or tuple(tensor.int32_data)
    return tuple(float(bool(one)) for one in listed) if len(listed) == prod(tensor.dims) else None


def _find_linear(kind: str, tensor: TensorProto, values: tuple[float, ...]) -> Linear | None:
    """The elements as a linear function of one index."""
    first, dims = values[0], tuple(tensor.dims)
    if all(value == first for value in values):
        exact = integers(tensor) or values
        return (first if kind == "f" else number(int(exact[0]))), ()
    long = [at for at, size in enumerate(dims) if size > 1]
    step = values[1] - first if len(long) == 1 else math.inf
    if not math.isfinite(first) or not math.isfinite(step) or first != int(first):
        return None
    if step != int(step) or any(value != first + step * at for at, value in enumerate(values)):
        return None
    return number(int(first)), ((long[0] - len(dims), int(step)),)


def _find_regions(dims: tuple[int, ...], values: tuple[float, ...]) -> tuple[Region, ...]:
    """What a square mask has above, on and below its diagonal."""
    if len(dims) < 2 or dims[-1] != dims[-2] or dims[-1] < 2 or prod(dims[:-2]) != 1:
        return ()
    size = dims[-1]
    parts: list[set[float]] = [set(), set(), set()]
    for at, value in enumerate(values):
        row, column = divmod(at, size)
        parts[0 if column > row else 1 if column == row else 2].add(value)
    marks: list[Mark] = [next(iter(part)) if len(part) == 1 else None for part in parts]
    return (((-2, -1), (marks[0], marks[1], marks[2])),)


def _read_table(kind: str, dims: tuple[int, ...], table: Any) -> Type:
    """The type of a large table of integers, or of a mask."""
    shape, flat = tuple(axis_of(number(size)) for size in dims), table.reshape(-1)
    first, long = flat[0].item(), [at for at, size in enumerate(dims) if size > 1]
    if bool((flat == flat[0]).all()):
        return Type(kind, shape, linear=((float(first) if kind == "f" else number(int(first))), ()))
    if len(long) == 1 and kind == "i":
        step = int(flat[1]) - int(flat[0])
        steps = flat[1:] - flat[:-1]
        if bool((steps == step).all()):
            return Type(kind, shape, linear=(number(int(first)), ((long[0] - len(dims), step),)))
    regions: tuple[Region, ...] = ()
    if len(dims) > 1 and dims[-1] == dims[-2] > 1 and prod(dims[:-2]) == 1:
        import numpy as np

        square, size = table.reshape(dims[-2:]), dims[-1]
        parts = (square[np.triu_indices(size, 1)], np.diagonal(square), square[np.tril_indices(size, -1)])
        marks = [float(part[0]) if bool((part == part[0]).all()) else None for part in parts]
        regions = (((-2, -1), (marks[0], marks[1], marks[2])),)
    calm = kind != "f" or float(flat.min()) > HIDDEN
    return Type(kind, shape, uniform=True, calm=calm, regions=regions)


def identify(tensor: TensorProto, table: Any) -> bytes | None:
    """A digest of a constant whose content is known; None of a weight."""
    if table is not None:
        content = table.tobytes()
    else:
        values = _list_values(tensor)
        if values is None:
            return None
        content = repr(values).encode()
    return blake2b(repr((tensor.data_type, tuple(tensor.dims))).encode() + content).digest()


MOST_COMPARED = 64 << 20
"""Bytes of weights of a file that are read to compare them with another one, at most."""


def digest_weights(view: GraphView, path: Path) -> dict[str, bytes]:
    """Digests of the weights of the outermost graph by name; none where there are too many to read."""
    names = [tensor.name for tensor in view.model.graph.initializer]
    try:
        weights = find_weights(path, names)
    except UnreadableError:
        return {}
    if len(names) > len(set(names)) or sum(weight.length for weight in weights.values()) > MOST_COMPARED:
        return {}
    found: dict[str, bytes] = {}
    for name, weight in weights.items():
        digest = blake2b(repr((weight.data_type, weight.dims)).encode())
        try:
            for part in weight.read():
                digest.update(part)
        except OSError:
            continue
        found[name] = digest.digest()
    return found


def has_one_float(view: GraphView) -> bool:
    """Whether all floats of a graph are of 32 bits: a Cast from one to another then changes nothing."""
    ports = [*view.inputs.values(), *view.outputs.values()]
    others = any(port.dtype == "double" or ("float" in port.dtype and port.dtype != "float") for port in ports)
    if view.model.functions or others:
        return False
    nodes = (node for scope in view.scopes() for node in scope.graph.node if has(node.op_type, "cast"))
    casts = filter(None, (find_attribute(node, "to") for node in nodes))
    kinds = {one.data_type for _, one in list_tensors(view)} | {one.i for one in casts}
    if any(kind != TensorProto.FLOAT and KINDS.get(kind, "f") == "f" for kind in kinds):
        return False
    return not any(has(op, "quantize", "dequantize") for op in view.operators)


MASK_ROLES: tuple[Role, ...] = ("attention_mask", "padding_mask", "additive_mask")
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
    if port.role in MASK_ROLES:
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
    one = lengths.single and "new" in port.axes  # where the file says 1, it still counts tokens
    dims = [None if one and axis == "new" else dim for axis, dim in zip(port.axes, port.shape, strict=True)]
    return tuple(_axis(sizes, axis, dim) for axis, dim in zip(port.axes, dims, strict=True))
