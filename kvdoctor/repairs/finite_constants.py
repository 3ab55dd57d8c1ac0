"""Puts the largest finite numbers in the place of infinite constants.

Requires: `non-finite`, in a graph with a constant of one or a few infinite values. Zero times infinity is no number,
and neither is the softmax of a row that is -inf throughout; with the largest finite number the one is zero and the
other the mean. Where the constant is multiplied or divided somewhere, those places alone are changed.
Ensures: such constants are finite where they are read; everything else is as it was.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kvdoctor.graph import Scope
from kvdoctor.onnx_schema import NodeProto, TensorProto
from kvdoctor.patient import CannotRepair, Patient
from kvdoctor.repairs import Repair
from kvdoctor.report.document import Change

if TYPE_CHECKING:
    import numpy as np

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
PRODUCTS = ("Mul", "Div", "MatMul")
MOST_VALUES = 64

IN_FLOAT32 = "export again in float32, and see that the checkpoint's own weights are numbers"


def apply(patient: Patient) -> tuple[Change, ...]:
    """Make infinite constants finite, in products where there are such, else everywhere."""
    files = dict.fromkeys(file for _, file in patient.graphs())
    found = [(file, *read) for file in files for read in _reads(patient, file)]
    if not found:
        raise CannotRepair("no constant is infinite: the numbers become so as they are computed", IN_FLOAT32)
    products = [one for one in found if one[2].op_type in PRODUCTS]
    return tuple(_finite(patient, *one) for one in products or found)


def _reads(patient: Patient, file: str) -> Iterator[tuple[Scope, NodeProto, int]]:
    """Every place where a node reads a constant with infinite values."""
    for scope in patient.view(file).scopes():
        for node in scope.graph.node:
            for at, name in enumerate(node.input if node.op_type != "Identity" else ()):
                tensor = scope.constant(name) if name else None
                if tensor is not None and _is_infinite(patient, file, tensor):
                    yield scope, node, at


def _is_infinite(patient: Patient, file: str, tensor: TensorProto) -> bool:
    import numpy as np

    count = 1
    for dim in tensor.dims:
        count *= dim
    if tensor.data_type not in FLOATS or not 0 < count <= MOST_VALUES:
        return False
    return bool(np.isinf(patient.values(file, tensor)).any())


def _finite(patient: Patient, file: str, scope: Scope, node: NodeProto, at: int) -> Change:
    from onnx import numpy_helper

    tensor = scope.constant(node.input[at])
    if tensor is None:
        raise CannotRepair(f"{node.input[at]!r} is no constant any more")
    values = patient.values(file, tensor)
    name = f"{node.input[at]}.finite"
    if all(one.name != name for one in scope.graph.initializer):
        scope.graph.initializer.append(numpy_helper.from_array(_clipped(values), name))
    node.input[at] = name
    where = f'{node.op_type} "{node.name or node.output[0]}", input {at}'
    return Change(file, where, str(values.ravel()[:4].tolist()), str(_clipped(values).ravel()[:4].tolist()))


def _clipped(values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    import numpy as np

    limits = np.finfo(values.dtype)
    clipped: np.ndarray[Any, Any] = np.clip(values, limits.min, limits.max)
    return clipped


REPAIR = Repair(
    name="finite-constants",
    mends=("non-finite",),
    stage="values",
    keeps="first-step",
    apply=apply,
    advice=("Without a change to the model: no row of a mask may hide every token.",),
)
