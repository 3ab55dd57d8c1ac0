"""Tables of a graph that a skeleton leaves out and an abstract run must know: causal masks, places, buckets.

Old GPT-2 exports cut a causal mask of bool[1, 1, 1024, 1024] to the lengths of a step; which tokens a step sees stands
in its numbers alone. Integers of 32 and 64 bits and booleans are no weights. Bytes and floats are, unless a square of
them holds two values only, as a mask does. A tensor that a product reads is never looked at.
"""

from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from kvdoctor.errors import UnreadableError
from kvdoctor.model.external_data import count_bytes, is_external
from kvdoctor.model.operators import operators_with
from kvdoctor.model.proto import TensorProto
from kvdoctor.model.skeleton import payload_left_out
from kvdoctor.model.traverse import STANDARD
from kvdoctor.model.view import GraphView
from kvdoctor.model.weights import Weight, find_weights, list_tensors

if TYPE_CHECKING:
    from kvdoctor.decode.calls import Array

MOST_BYTES = 16 << 20
"""Bytes of the tables of a file that differ, at most."""
MOST_READ = 64 << 20
"""Bytes of all tables of a file, at most: each layer may have the same mask."""

WHOLE = (TensorProto.BOOL, TensorProto.INT32, TensorProto.INT64)
"""Element types that no weight has."""
TWO_VALUED = (TensorProto.UINT8, TensorProto.INT8, TensorProto.FLOAT, TensorProto.FLOAT16)
"""Element types that a mask has as well."""

MOVING = operators_with("pick", "join", "copy", "cast", "repeat", "triangle", "view")
TAKING = MOVING | operators_with("select", "logic", "compare", "add", "subtract", "multiply")
"""Operators that cut a table, or compute with its elements one by one."""


def read_tables(view: GraphView, path: Path) -> dict[str, "Array"]:
    """The tables of a file by name, in their true shapes; equal ones are one array. Without one, nothing is read.

    A name that several bodies of the graph give to different tensors, and what cannot be read, is left out.
    """
    known = _TABLES.setdefault(view, {})
    if path not in known:
        known[path] = _read_tables(view, path)
    return known[path]


_TABLES: WeakKeyDictionary[GraphView, "dict[Path, dict[str, Array]]"] = WeakKeyDictionary()


def _read_tables(view: GraphView, path: Path) -> dict[str, "Array"]:
    wanted = _find_tables(view)
    if not wanted:
        return {}
    try:
        weights = find_weights(path, wanted)
    except (UnreadableError, OSError):
        return {}
    found: dict[str, Array] = {}
    kept: dict[bytes, Array] = {}
    for name, tensor in wanted.items():
        weight = weights.get(name)
        if weight is None or weight.dims != tuple(tensor.dims) or weight.data_type != tensor.data_type:
            continue
        values = _read_values(weight)
        if values is None:
            continue
        digest = blake2b(repr((weight.data_type, weight.dims)).encode() + values.tobytes()).digest()
        if digest not in kept and sum(one.nbytes for one in kept.values()) + values.nbytes > MOST_BYTES:
            break
        found[name] = kept.setdefault(digest, values)
    return found


def _find_tables(view: GraphView) -> dict[str, TensorProto]:
    """The tensors without values that may be tables, by the operators that read them."""
    found: dict[str, TensorProto] = {}
    known, repeated = set[str](), set[str]()
    for name, tensor in list_tensors(view):
        repeated |= {name} & known
        known.add(name)
        if _may_be_table(tensor):
            found[name] = tensor
    if not found:
        return {}
    others = repeated
    for scope in view.scopes():
        for node in scope.graph.node:
            if node.domain not in STANDARD or node.op_type not in TAKING:
                others.update(name for name in node.input if name in found)
    chosen = {name: tensor for name, tensor in found.items() if name not in others}
    return chosen if sum(count_bytes(one) or 0 for one in chosen.values()) <= MOST_READ else {}


def _may_be_table(tensor: TensorProto) -> bool:
    if not (payload_left_out(tensor) or is_external(tensor)):
        return False
    dims = tuple(tensor.dims)
    square = len(dims) >= 2 and dims[-1] == dims[-2] and prod(dims[:-2]) == 1
    kind = tensor.data_type in WHOLE or (tensor.data_type in TWO_VALUED and square)
    return kind and 0 < (count_bytes(tensor) or 0) <= MOST_BYTES


def _read_values(weight: Weight) -> "Array | None":
    """The values of a table; None of a weight, of which no more than a row is read."""
    import numpy as np  # only where there are tables

    if not weight.has_values:
        return None
    try:
        if weight.data_type in TWO_VALUED and not _has_two_values(next(weight.values(weight.dims[-1]))):
            return None
        flat = np.concatenate(list(weight.values()))
    except OSError:
        return None
    if weight.data_type in TWO_VALUED and not _has_two_values(flat):
        return None
    return (flat.astype(bool) if weight.data_type == TensorProto.BOOL else flat).reshape(weight.dims)


def _has_two_values(flat: "Array") -> bool:
    return bool(((flat == flat.min()) | (flat == flat.max())).all())
