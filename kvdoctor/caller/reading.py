"""Reads a trace: JSON lines, one call a line, or one .npz for each call in a folder or a zip. numpy only.

The file comes from a program with a fault: everything in it is held against what a trace can be before it is used.
"""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from kvdoctor.caller import archives
from kvdoctor.caller.recorded import Recorded, Trace, TraceStep, onnx_dtype
from kvdoctor.calls import NUMPY_TYPES, Array
from kvdoctor.errors import UsageError

MOST_LINE = 64 << 20
MOST_FILE = 1 << 30
MOST_STEPS = 4096
MOST_TENSORS = 8192
MOST_RANK = 16
MOST_WIDE = 1 << 40
FIELDS = ("step", "file", "fed", "got", "error")
GUIDE = "docs/trace.md shows how to write one"
SHORTER = "give the first steps up to the failure"
ONE_LINE = f"a trace has one JSON object a line; {GUIDE}"


def read_trace(path: str) -> Trace:
    """Read a trace; values of .npz files stay on disk until they are asked for.

    Raises:
        UsageError: it cannot be read, or is no trace; the message names the line or the file, and what to do.
    """
    place = Path(path)
    try:
        if place.is_dir():
            steps = archives.folder_steps(place)
        elif not place.is_file():
            reason = "is no file" if place.exists() else "does not exist"
            raise UsageError(f"the trace {path!r} {reason}; give a file of JSON lines, or a folder or zip of .npz")
        else:
            steps = _file_steps(place)
        trace = tuple(_limited(steps, path))
    except (OSError, ValueError) as error:  # a null character in the path is a ValueError
        raise UsageError(f"the trace {path!r} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not trace:
        raise UsageError(f"the trace {path!r} holds no step; {GUIDE}")
    return trace


def _limited(steps: Iterator[TraceStep], path: str) -> Iterator[TraceStep]:
    for step in steps:
        if step.number >= MOST_STEPS:
            raise UsageError(f"the trace {path!r} has more than {MOST_STEPS} steps; {SHORTER}")
        yield step


def _file_steps(path: Path) -> Iterator[TraceStep]:
    with path.open("rb") as stream:
        start = stream.read(4)
    if start.startswith(b"PK"):
        return archives.zip_steps(path)
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UsageError(f"{str(path)!r} is UTF-16, as the > of PowerShell writes it; write it as UTF-8")
    if start.startswith(b"\x93NUM"):
        raise UsageError(f"{str(path)!r} is one array; save the arrays of a step together with np.savez; {GUIDE}")
    return _lines(path)


def _lines(path: Path) -> Iterator[TraceStep]:
    if path.stat().st_size > MOST_FILE:
        raise UsageError(f"{str(path)!r} is larger than 1 GiB; {SHORTER}, or tensors as one .npz for each step")
    with path.open("rb") as stream:
        for number, (line, text) in enumerate(_texts(stream, str(path))):
            yield _step(_object(text, f"{str(path)!r}, line {line}"), number, line, str(path))


def _texts(stream: BinaryIO, name: str) -> Iterator[tuple[int, bytes]]:
    """The lines that are not empty, each with its number from 1; none is held that is too long to be one."""
    line = 0
    while text := stream.readline(MOST_LINE + 1):
        line += 1
        if len(text) > MOST_LINE:
            raise UsageError(f"{name!r}, line {line} is longer than 64 MiB; give tensors as one .npz for each step")
        text = text.removeprefix(b"\xef\xbb\xbf") if line == 1 else text
        if text.strip():
            yield line, text


def _object(text: bytes, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_no_name_twice)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no JSON object: {error}"[:300] + f"; {ONE_LINE}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{where} is no JSON object; {ONE_LINE}")
    return found


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(n for n in names if names.count(n) > 1)!r} stands there twice")
    return found


def _step(found: dict[str, Any], number: int, line: int, name: str) -> TraceStep:
    where = f"{name!r}, line {line}"
    unknown = [key for key in found if key not in FIELDS]
    if unknown:
        raise UsageError(f"{where} has a field {unknown[0]!r}; known are {', '.join(FIELDS)}; {GUIDE}"[:600])
    for field in ("file", "error"):
        if not isinstance(found.get(field), (str, type(None))):
            raise UsageError(f"{where}: {field!r} must be a text; {GUIDE}")
    if not isinstance(found.get("step", 0), int):
        raise UsageError(f"{where}: 'step' must be a whole number, or be left out; {GUIDE}")
    fed = _tensors(found.get("fed"), f"{where}, fed")
    if not fed:
        raise UsageError(f"{where} says nothing of what was fed: 'fed' maps each input to its dtype and shape; {GUIDE}")
    got = _tensors(found.get("got") or {}, f"{where}, got")
    return TraceStep(number, f"line {line}", fed, got, found.get("file"), found.get("error"))


def _tensors(found: Any, where: str) -> dict[str, Recorded]:
    if found is None:
        return {}
    if not isinstance(found, dict) or len(found) > MOST_TENSORS:
        raise UsageError(f"{where} must map up to {MOST_TENSORS} names to their dtype and shape; {GUIDE}")
    return {name: _tensor(entry, f"{where} {name[:200]!r}") for name, entry in found.items()}


def _tensor(found: Any, where: str) -> Recorded:
    if not isinstance(found, dict) or not {"dtype", "shape"} <= set(found) <= {"dtype", "shape", "data"}:
        raise UsageError(f"{where} must have dtype and shape, may have data, and nothing else; {GUIDE}")
    dtype, shape = onnx_dtype(found["dtype"]), found["shape"]
    if dtype is None:
        raise UsageError(f"{where}: {str(found['dtype'])[:80]!r} is no element type; write float, int64, bool, ...")
    if not isinstance(shape, list) or len(shape) > MOST_RANK or not all(map(_is_size, shape)):
        raise UsageError(f"{where}: shape must list the sizes of the tensor, not those declared; {GUIDE}")
    if math.prod(shape) > MOST_WIDE:
        raise UsageError(f"{where}: no tensor has {len(shape)} axes of such sizes; {GUIDE}")
    return Recorded(dtype, tuple(shape), _source(found.get("data"), dtype, tuple(shape), where))


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and 0 <= size <= MOST_WIDE


def _source(data: Any, dtype: str, shape: tuple[int, ...], where: str) -> Callable[[], Array] | None:
    """The values as an array; null stands for a number that JSON has no word for."""
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
