"""The standard operators by version, from the table `operators.json`; `docs/make_operators.py` writes it from onnx."""

import json
from functools import cache
from importlib.resources import files
from typing import Any

from kvdoctor.records import record

OF_RUNTIME = frozenset(
    {"ATen", "Affine", "ConstantFill", "Crop", "DynamicSlice", "GRUUnit", "GivenTensorFill", "ImageScaler"}
    | {"LayerNormalization", "ParametricSoftplus", "Scale", "ScaledTanh", "SimplifiedLayerNormalization"}
)
"""Operators that ONNX Runtime has under the standard domain beside those of ONNX, at any version of it.

Source: onnxruntime/core/graph/contrib_ops/contrib_defs.cc, `.SetDomain(kOnnxDomain)`.
"""


@record
class Signature:
    """What one version of an operator takes and returns.

    Attributes:
        since: The first opset that has this version.
        inputs: The least and the greatest number of inputs; the greatest is None where any number is allowed.
        outputs: The same of the outputs.
        needed: The places of the inputs that may not be left out by an empty name.
        attributes: The type of each attribute, a number of `AttributeProto.AttributeType`.
        required: The attributes without a default.
        deprecated: Whether this version says only that the operator is no more.
    """

    since: int
    inputs: tuple[int, int | None]
    outputs: tuple[int, int | None]
    needed: tuple[int, ...]
    attributes: dict[str, int]
    required: tuple[str, ...]
    deprecated: bool


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(files("kvdoctor.model").joinpath("operators.json").read_text(encoding="utf-8"))
    return table


def newest_opset() -> int:
    """The newest opset of the table."""
    return int(_table()["opset"])


def is_operator(name: str) -> bool:
    """Whether some opset has a standard operator of that name."""
    return name in _table()["operators"]


@cache
def find_signature(name: str, opset: int) -> Signature | None:
    """The version of a standard operator in an opset; None where it has none yet."""
    fitting = [entry for entry in _table()["operators"].get(name, ()) if entry[0] <= opset]
    if not fitting:
        return None
    since, inputs, outputs, needed, attributes, required, deprecated = fitting[-1]
    return Signature(since, tuple(inputs), tuple(outputs), tuple(needed), attributes, tuple(required), deprecated)
