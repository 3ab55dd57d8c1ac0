"""What a trace holds, tensors with or without their values by step; a session that records one, and a reader.

The session, of onnxruntime, is wrapped in the caller's program. The reader validates everything before it is used,
since the file comes from a program with a fault: JSON lines, one call a line. Standard library and numpy only; no
runtime is imported.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvdoctor.contract import describe
from kvdoctor.decode.calls import MOST_DATA, NUMPY_TYPES, Array, take_sample
from kvdoctor.errors import UsageError
from kvdoctor.records import record

WORDS = "float uint8 int8 uint16 int16 int32 int64 string bool float16 double uint32 uint64"
NUMBERED = dict(enumerate(WORDS.split(), 1)) | {16: "bfloat16"}
"""Element types as the C interface of ONNX Runtime numbers them. Source: onnx.proto, TensorProto.DataType."""

SPELLINGS = {
    **dict.fromkeys(("float32", "f32", "single"), "float"),
    **dict.fromkeys(("float64", "f64"), "double"),
    **dict.fromkeys(("f16", "half"), "float16"),
    **dict.fromkeys(("boolean", "bool_"), "bool"),
    "bf16": "bfloat16",
    "long": "int64",
    "int": "int32",
    "byte": "uint8",
    **{
        f"{letter}{bits}": f"{word}{bits}" for letter, word in (("i", "int"), ("u", "uint")) for bits in (8, 16, 32, 64)
    },
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
        """The values; zeros where the trace does not have them."""
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


@dataclass(eq=False, repr=False)
class RecordingSession:
    """A session that writes down what it is fed and what it returns; all else is the session's own.

    Calls by `run`, `run_with_ort_values` and `run_with_iobinding` are recorded; of a failed call there is what it was
    fed, and its error.
    """

    _session: Any
    _path: Path
    _file: str | None
    _every_value: bool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, output_names: Sequence[str] | None, input_feed: Mapping[str, Any], *more: Any, **named: Any) -> Any:
        """Run as the session does, and record it."""
        return self._noted("run", output_names, input_feed, *more, **named)

    def run_with_ort_values(
        self, output_names: Sequence[str] | None, input_dict_ort_values: Mapping[str, Any], *more: Any, **named: Any
    ) -> Any:
        """Run as the session does, and record it."""
        return self._noted("run_with_ort_values", output_names, input_dict_ort_values, *more, **named)

    def io_binding(self) -> "RecordingBinding":
        """A binding of this session that remembers what it binds."""
        return RecordingBinding(self._session.io_binding())

    def run_with_iobinding(self, iobinding: Any, *more: Any, **named: Any) -> None:
        """Run with a binding of `io_binding()`, and record it; a binding made otherwise is run and not recorded."""
        if not isinstance(iobinding, RecordingBinding):
            self._session.run_with_iobinding(iobinding, *more, **named)
            return

        def call() -> Any:
            self._session.run_with_iobinding(iobinding.binding, *more, **named)
            return iobinding.binding.get_outputs()

        self._record(iobinding.fed, iobinding.names, call)

    def _noted(self, how: str, names: Sequence[str] | None, feed: Mapping[str, Any], *more: Any, **named: Any) -> Any:
        wanted = list(names) if names else [output.name for output in self._session.get_outputs()]
        method, asked = getattr(self._session, how), names if how == "run" else wanted
        return self._record(feed, wanted, lambda: method(asked, feed, *more, **named))

    def _record(self, feed: Mapping[str, Any], names: Sequence[str], call: Callable[[], Any]) -> Any:
        # Taken at once: a call may write into what it is fed.
        line = {"file": self._file, "fed": dict(_entries(feed, self._every_value))}
        try:
            values = call()
        except Exception as raised:
            self._write({**line, "got": {}, "error": str(raised)})
            raise
        got = dict(_entries(dict(zip(names, values, strict=False)), self._every_value))
        self._write({**line, "got": got})
        return values

    def _write(self, line: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({name: value for name, value in line.items() if value is not None}) + "\n")


@dataclass(eq=False, repr=False)
class RecordingBinding:
    """A binding that remembers its inputs and the names of its outputs; all else is the binding's own."""

    binding: Any
    fed: dict[str, Any] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)

    def __getattr__(self, method: str) -> Any:
        own = getattr(self.binding, method)
        if not method.startswith(("bind_", "clear_binding_")):
            return own

        def noted(*given: Any, **named: Any) -> Any:
            self._note(method, *given, **named)
            return own(*given, **named)

        return noted

    def _note(self, method: str, name: str = "", *more: Any, **named: Any) -> None:
        if method.startswith("clear_"):
            (self.fed if method.endswith("inputs") else self.names).clear()
        elif method == "bind_input":  # memory by its address: element type and shape are known
            words = dict(zip(("device_type", "device_id", "element_type", "shape"), more, strict=False)) | named
            self.fed[name] = TraceTensor(np.dtype(words.get("element_type")).name, tuple(words.get("shape") or ()))
        elif method.endswith("_input"):
            self.fed[name] = [*more, *named.values()][0]
        elif name not in self.names:  # bound again in each step, it keeps its place
            self.names.append(name)


def recording(session: Any, path: str | Path, file: str | None = None, every_value: bool = False) -> RecordingSession:
    """Wrap a session of onnxruntime so that each of its calls becomes a step of a trace (docs/trace.md).

    Args:
        session: An `onnxruntime.InferenceSession`.
        path: The file to record into, as JSON lines. What is there already is continued, so that several sessions of
            one loop record into the same file.
        file: The name of the model's file, where the session was made from bytes.
        every_value: Record all values, of large tensors too; else a sample of those.
    """
    place = getattr(session, "_model_path", None)
    return RecordingSession(session, Path(path), file or (Path(place).name if place else None), every_value)


def _entries(tensors: Mapping[str, Any], every_value: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, tensor in tensors.items():
        if isinstance(tensor, TraceTensor):
            yield name, {"dtype": tensor.dtype, "shape": list(tensor.shape)}
            continue
        shape = tensor.shape() if callable(getattr(tensor, "shape", None)) else np.shape(tensor)
        dtype = tensor.data_type() if hasattr(tensor, "data_type") else str(np.asarray(tensor).dtype)
        entry: dict[str, Any] = {"dtype": dtype, "shape": list(map(int, shape))}
        array: np.ndarray[Any, Any] = tensor.numpy() if hasattr(tensor, "numpy") else np.asarray(tensor)
        small = every_value or math.prod(shape) <= MOST_DATA
        numbers = array.ravel() if small else take_sample(array)
        finite = (None if isinstance(one, float) and not math.isfinite(one) else one for one in numbers.tolist())
        entry["data" if small else "sample"] = [*finite]  # JSON has no NaN and no infinity
        yield name, entry


MOST_LINE = 64 << 20
MOST_FILE = 1 << 30
MOST_TENSORS = 8192
MOST_RANK = 16
MOST_WIDE = 1 << 40
FIELDS = ("step", "run", "file", "fed", "got", "error")
RUNS_FIELDS = ("run", "tokens", "error")
"""The fields of a line that ends a run. Source: docs/trace.md."""
GUIDE = "docs/trace.md shows how to write one"
SHORTER = "give the first steps up to the failure"
SAMPLES = "a sample of large tensors in place of their data (docs/trace.md)"
ONE_LINE = f"a trace has one JSON object a line; {GUIDE}"


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """The objects of a file of JSON lines, each with the number of its line.

    A last line without an end that is not whole comes as None: its program was ended while it wrote.

    Raises:
        UsageError: a line is no object.
    """
    if path.stat().st_size > MOST_FILE:
        raise UsageError(f"{str(path)!r} is larger than 1 GiB; {SHORTER}, or {SAMPLES}")
    with path.open("rb") as stream:
        for line, text in _iterate_lines(stream, str(path)):
            where = f"{str(path)!r}, line {line}"
            try:
                found = json.loads(text, object_pairs_hook=_refuse_duplicates)
            except (ValueError, RecursionError) as error:
                if line > 1 and not text.endswith(b"\n"):
                    yield line, None
                    return
                raise UsageError(f"{where} is not a JSON object: {error}"[:300] + f"; {ONE_LINE}") from None
            if not isinstance(found, dict):
                raise UsageError(f"{where} is not a JSON object; {ONE_LINE}")
            yield line, found


def _iterate_lines(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, each with its number from 1; none is held that is too long to be one."""
    line = 0
    while text := stream.readline(MOST_LINE + 1):
        line += 1
        if len(text) > MOST_LINE:
            raise UsageError(f"{name!r}, line {line} is longer than 64 MiB; give {SAMPLES}")
        if line == 1 and text.startswith((b"\xff\xfe", b"\xfe\xff")):
            raise UsageError(f"{name!r} is UTF-16, as the > of PowerShell writes it; write it as UTF-8")
        text = text.removeprefix(b"\xef\xbb\xbf") if line == 1 else text
        if text.strip():
            yield line, text


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} occurs twice")
    return found


def parse_step(found: dict[str, Any], line: int, name: str) -> TraceStep:
    """The call of a line.

    Raises:
        UsageError: it is none.
    """
    where = f"{name!r}, line {line}"
    unknown = [key for key in found if key not in FIELDS]
    if unknown:
        raise UsageError(f"{where} has a field {unknown[0]!r}; known are {', '.join(FIELDS)}; {GUIDE}"[:600])
    for key in ("file", "error", "run"):
        if not isinstance(found.get(key), (str, type(None))):
            raise UsageError(f"{where}: {key!r} must be a text; {GUIDE}")
    if not isinstance(found.get("step", 0), int):
        raise UsageError(f"{where}: 'step' must be a whole number, or be left out; {GUIDE}")
    fed = _parse_tensors(found.get("fed"), f"{where}, fed")
    if not fed:
        raise UsageError(f"{where} does not say what was fed: 'fed' maps each input to its dtype and shape; {GUIDE}")
    got = _parse_tensors(found.get("got") or {}, f"{where}, got")
    return TraceStep(0, f"line {line}", fed, got, found.get("file"), found.get("error"), found.get("run"))


def _parse_tensors(found: Any, where: str) -> dict[str, TraceTensor]:
    if found is None:
        return {}
    if not isinstance(found, dict) or len(found) > MOST_TENSORS:
        raise UsageError(f"{where} must map up to {MOST_TENSORS} names to their dtype and shape; {GUIDE}")
    return {name: _parse_tensor(entry, f"{where} {name[:200]!r}") for name, entry in found.items()}


def _parse_tensor(found: Any, where: str) -> TraceTensor:
    if not isinstance(found, dict) or not {"dtype", "shape"} <= set(found) <= {"dtype", "shape", "data", "sample"}:
        raise UsageError(f"{where} must have dtype and shape, may have data or a sample, and nothing else; {GUIDE}")
    dtype, shape = onnx_dtype(found["dtype"]), found["shape"]
    if dtype is None:
        raise UsageError(f"{where}: {str(found['dtype'])[:80]!r} is not an element type; write float, int64, bool, ...")
    if (
        not isinstance(shape, list)
        or len(shape) > MOST_RANK
        or not all(type(size) is int and 0 <= size <= MOST_WIDE for size in shape)
    ):
        raise UsageError(f"{where}: shape must list the sizes of the tensor, not those declared; {GUIDE}")
    if math.prod(shape) > MOST_WIDE:
        raise UsageError(f"{where}: no tensor has {len(shape)} axes of such sizes; {GUIDE}")
    values = _parse_data(found.get("data"), dtype, tuple(shape), where)
    sample = found.get("sample")
    if sample is not None and not (isinstance(sample, list) and len(sample) == MOST_DATA < math.prod(shape)):
        raise UsageError(f"{where}: a sample is a list of {MOST_DATA} numbers of a tensor that has more; {GUIDE}")
    taken = _parse_data(sample, "double", (MOST_DATA,), where)
    return TraceTensor(dtype, tuple(shape), values, taken() if taken is not None else None)


def _parse_data(data: Any, dtype: str, shape: tuple[int, ...], where: str) -> Callable[[], Array] | None:
    """The values as an array; null stands for a number that JSON cannot express."""
    if data is None:
        return None
    if not isinstance(data, list) or len(data) != math.prod(shape):
        counted = f"{len(data)} numbers" if isinstance(data, list) else "no list"
        raise UsageError(f"{where}: data must be a flat list of {math.prod(shape)} numbers, and is {counted}")
    if dtype not in NUMPY_TYPES:
        return None
    kind = np.dtype(NUMPY_TYPES[dtype])
    whole = kind.kind in "iub"
    allowed = (int, bool, float) if whole else (int, float, type(None))
    if not all(isinstance(number, allowed) for number in data):
        raise UsageError(f"{where}: data must be a flat list of numbers")
    try:
        with np.errstate(over="ignore"):
            array = np.array(
                [math.nan if number is None else number for number in data], np.float64 if not whole else None
            )
            values = array.astype(kind).reshape(shape)
    except (OverflowError, ValueError, TypeError):
        raise UsageError(f"{where}: data holds numbers that {dtype} does not") from None
    if whole and not np.array_equal(array.reshape(shape), values):
        raise UsageError(f"{where}: data holds numbers that {dtype} does not")
    return lambda: values
