"""Tensors as configs declare them, `{"dtype": "float32", "shape": ["batch", 2, "past", 8]}`, against ports."""

from typing import Any

from kvdoctor.analysis.configs import is_count
from kvdoctor.diagnose.checks.side_cars.disagreement import MOST_SHOWN, plain
from kvdoctor.model.view import ELEMENT_TYPES, Declared

ONNX_TYPES = {
    "float32": "float",
    "fp32": "float",
    "float64": "double",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float8_e4m3fn": "float8e4m3fn",
    "float8_e5m2": "float8e5m2",
}
"""Words of configs for element types that have another word in ONNX."""


def fits_port(declared: dict[str, Any], port: Declared) -> bool:
    """Whether a port takes a tensor that a config declares.

    What is no known type, rank or size says nothing. A name stands for any size, of the config and of the graph alike.
    """
    dtype, shape = declared.get("dtype"), port.shape
    word = ONNX_TYPES.get(dtype, dtype) if isinstance(dtype, str) else ""
    if word in ELEMENT_TYPES.values() and port.dtype and word != port.dtype:
        return False
    sizes = _read_shape(declared)
    rank = len(sizes) if sizes is not None else declared.get("rank")
    if shape is None or not is_count(rank):
        return True
    pairs = zip(shape, sizes or shape, strict=False)
    numbers = ((dim, size) for dim, size in pairs if isinstance(dim, int) and isinstance(size, int))
    return rank == len(shape) and all(dim == size for dim, size in numbers)


def describe_tensor(declared: dict[str, Any]) -> str:
    """`float32 [batch, 2, past, 8]`, or `float32 of rank 4`."""
    dtype, sizes = declared.get("dtype"), _read_shape(declared)
    word = plain(dtype) if isinstance(dtype, str) else "a tensor"
    if sizes is None:
        return f"{word} of rank {declared.get('rank')!r:.20}"
    more = ", ..." if len(sizes) > MOST_SHOWN else ""
    return f"{word} [{', '.join(plain(str(size)) for size in sizes[:MOST_SHOWN])}{more}]"


def _read_shape(declared: dict[str, Any]) -> list[int | str] | None:
    """The sizes, numbers and names; None where there are none, or anything else is among them."""
    shape = declared.get("shape")
    known = isinstance(shape, list) and all(is_count(size) or isinstance(size, str) for size in shape)
    return shape if known else None
