"""Reads a trace: JSON lines, one call a line. numpy only.

The file comes from a program with a fault: everything in it is validated before it is used.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvdoctor.addons.traces.recorded import TraceStep, TraceTensor, onnx_dtype
from kvdoctor.decode.calls import MOST_DATA, NUMPY_TYPES, Array
from kvdoctor.errors import UsageError

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
    for field in ("file", "error", "run"):
        if not isinstance(found.get(field), (str, type(None))):
            raise UsageError(f"{where}: {field!r} must be a text; {GUIDE}")
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
