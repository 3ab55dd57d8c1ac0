"""What a trace holds: tensors with or without their values, by step. numpy only."""

from collections.abc import Callable, Mapping
from dataclasses import field

import numpy as np

from kvdoctor.contract import describe
from kvdoctor.decode.calls import NUMPY_TYPES, Array
from kvdoctor.records import record

NUMBERED = {
    1: "float",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    8: "string",
    9: "bool",
    10: "float16",
    11: "double",
    12: "uint32",
    13: "uint64",
    16: "bfloat16",
}
"""Element types as the C interface of ONNX Runtime numbers them. Source: onnx.proto, TensorProto.DataType."""

SPELLINGS = {
    "float32": "float",
    "f32": "float",
    "single": "float",
    "float64": "double",
    "f64": "double",
    "f16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "boolean": "bool",
    "bool_": "bool",
    "long": "int64",
    "int": "int32",
    "byte": "uint8",
    **{f"i{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"u{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
}
"""The names of other languages and bindings for the element types of ONNX."""

CLOSE = 1e-4
"""Values that were printed and read again differ by their last digit, by 1e-6; two tensors of a model by their size."""


@record
class TraceTensor:
    """A tensor of a trace: element type as ONNX spells it, shape, and its values if the trace has them.

    `sample` are some of its values, float64[64], as `take_sample` takes them.
    """

    dtype: str
    shape: tuple[int, ...]
    source: Callable[[], Array] | None = field(default=None, compare=False, repr=False)
    sample: Array | None = field(default=None, compare=False, repr=False)

    @property
    def empty(self) -> bool:
        """Whether it has no elements."""
        return 0 in self.shape

    @property
    def has_values(self) -> bool:
        """Whether the values are known; of a tensor without elements they always are."""
        return self.source is not None or (0 in self.shape and self.dtype in NUMPY_TYPES)

    def array(self) -> Array:
        """The values, read when they are asked for.

        Raises:
            UsageError: the file changed since, or is damaged.
        """
        if self.source is None:
            return np.zeros(self.shape, NUMPY_TYPES.get(self.dtype, np.float32))
        return self.source()

    def equals(self, other: "TraceTensor") -> bool | None:
        """Whether another tensor has its values, all or those of its sample; None where that is not known."""
        if self.shape != other.shape or (self.has_values and other.has_values):
            return self.shape == other.shape and same_values(self.array(), other.array())
        if self.sample is None or other.sample is None:
            return None
        return same_values(self.sample, other.sample)

    def __str__(self) -> str:
        return describe(self.dtype, self.shape)


@record
class TraceStep:
    """One call of the user's program: what it fed and got. `place` is a line or a file of the trace.

    `number` counts calls from 0, when the trace is compared with a contract those of the decoder. `file` is the model
    that was called and `error` what the caller's runtime said, where the trace tells. `run` names the run where a trace
    has several, and `likeliest` has the token that the program found likeliest after the step, for each sequence.
    `embedded` is what an embedding graph was fed for the step.
    """

    number: int
    place: str
    fed: Mapping[str, TraceTensor]
    got: Mapping[str, TraceTensor] = field(default_factory=dict)
    file: str | None = None
    error: str | None = None
    run: str | None = None
    likeliest: tuple[int, ...] = ()
    embedded: Mapping[str, TraceTensor] = field(default_factory=dict)


Trace = tuple[TraceStep, ...]


def onnx_dtype(word: object) -> str | None:
    """Give the ONNX name of an element type as any binding writes it, a number of the C interface included."""
    if isinstance(word, bool) or not isinstance(word, (str, int)):
        return None
    if isinstance(word, int):
        return NUMBERED.get(word)
    plain = word.strip().lower().removeprefix("onnx_tensor_element_data_type_").removeprefix("torch.")
    plain = plain.removeprefix("tensor(").removesuffix(")")
    plain = SPELLINGS.get(plain, plain)
    return plain if plain in NUMBERED.values() else None


def same_values(one: Array, other: Array) -> bool:
    """Whether two arrays hold the same values, but for the digits that printing costs."""
    if one.shape != other.shape:
        return False
    if one.dtype.kind in "biu" and other.dtype.kind in "biu":
        return bool(np.array_equal(one, other))
    left, right = one.astype(np.float64), other.astype(np.float64)
    size = float(np.abs(right[np.isfinite(right)]).max(initial=0.0))
    return bool(np.allclose(left, right, rtol=CLOSE, atol=CLOSE * size, equal_nan=True))
