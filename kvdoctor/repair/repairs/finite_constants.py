"""Replaces infinite constants by the largest finite numbers.

Requires: `non-finite`, in a graph with a constant of one or a few infinite values. Zero times infinity is not a number,
and neither is the softmax of a row that is -inf throughout; with the largest finite number the first is zero and the
second the mean. If the constant is multiplied or divided somewhere, only those inputs are changed.
Ensures: such constants are finite where they are read; everything else stays as it is.
"""

import math
from collections.abc import Iterator

from kvdoctor.model.operators import has, operators_with
from kvdoctor.model.proto import NodeProto, TensorProto
from kvdoctor.model.traverse import describe_node
from kvdoctor.model.view import Scope
from kvdoctor.repair.repairs.registry import Repair
from kvdoctor.repair.workspace import Change, RepairContext

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
PRODUCTS = operators_with("scale", "product")
MOST_VALUES = 64

IN_FLOAT32 = "export again in float32, and check that the checkpoint's own weights are finite"


def apply(context: RepairContext) -> tuple[Change, ...]:
    """Make infinite constants finite: in products if there are any, otherwise everywhere."""
    files = dict.fromkeys(file for _, file in context.graphs())
    found = [(file, *read) for file in files for read in _find_infinite(context, file)]
    if not found:
        context.cannot("no constant is infinite: the numbers become infinite during the computation", IN_FLOAT32)
    products = [one for one in found if one[2].op_type in PRODUCTS]
    return tuple(_make_finite(context, *one) for one in products or found)


def _find_infinite(context: RepairContext, file: str) -> Iterator[tuple[Scope, NodeProto, int]]:
    """Every input of a node that is a constant with infinite values."""
    for scope in context.view(file).scopes():
        for node in scope.graph.node:
            for at, name in enumerate(node.input if not has(node.op_type, "copy") else ()):
                tensor = scope.constant(name) if name else None
                if tensor is not None and _is_infinite(context, file, tensor):
                    yield scope, node, at


def _is_infinite(context: RepairContext, file: str, tensor: TensorProto) -> bool:
    import numpy as np

    small = tensor.data_type in FLOATS and 0 < math.prod(tensor.dims) <= MOST_VALUES
    return small and bool(np.isinf(context.values(file, tensor)).any())


def _make_finite(context: RepairContext, file: str, scope: Scope, node: NodeProto, at: int) -> Change:
    import numpy as np
    from onnx import numpy_helper

    tensor = scope.constant(node.input[at])
    if tensor is None:
        context.cannot(f"{node.input[at]!r} is no longer a constant")
    values = context.values(file, tensor)
    limits = np.finfo(values.dtype)
    clipped, name = np.clip(values, limits.min, limits.max), f"{node.input[at]}.finite"
    if all(one.name != name for one in scope.graph.initializer):
        scope.graph.initializer.append(numpy_helper.from_array(clipped, name))
    node.input[at] = name
    before, after = (str(some.ravel()[:4].tolist()) for some in (values, clipped))
    return Change(file, f"{describe_node(node)}, input {at}", before, after)


ADVICE = ("Without a change to the model: no row of a mask may hide every token.",)
REPAIR = Repair("finite-constants", ("non-finite",), "values", "first-step", apply, ADVICE)
