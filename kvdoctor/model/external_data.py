"""The external data of a model: which files its tensors point to, and whether those can hold what is promised.

Only names and sizes are looked at; no data file is ever opened. Source of the rules: `TensorProto.external_data` in
onnx.proto (location is a POSIX path relative to the model's folder, offset and length are bytes as decimal text) and,
for sizes, ONNX Runtime, which refuses a length other than that of dims and type and reads 0 as "not given".
"""

import errno
import os
import re
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path, PureWindowsPath
from typing import Final, Literal

from kvdoctor.errors import UsageError
from kvdoctor.model.proto import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto
from kvdoctor.records import record

# Bits of one element by TensorProto.DataType. Strings cannot be external. Elements of fewer than 8 bits are packed.
BITS: Final[dict[int, int]] = (
    dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8)
    | dict.fromkeys((4, 5, 10, 16), 16)
    | dict.fromkeys((1, 6, 12), 32)
    | dict.fromkeys((7, 11, 13, 14), 64)
    | {15: 128}
    | dict.fromkeys((21, 22, 23), 4)
    | dict.fromkeys((25, 26), 2)
    | dict.fromkeys((27, 28), 6)
)
# Bytes. The three lines of https://git-lfs.github.com/spec/v1 with a SHA-256 and a size of 1 to 13 digits.
LFS_POINTER: Final = range(124, 140)
_NAMES_SHOWN: Final = 3
PORTION: Final = 1 << 20
"""Bytes that are read at once."""
BEYOND: Final = "data end beyond the file"


NO_NAME: Final = (errno.EINVAL, errno.ENAMETOOLONG)
"""Errors of the system for a text that cannot be the name of a file."""

Wrong = Literal["file", "entry", "place"]


@record
class ExternalFile:
    """One distinct location that tensors name.

    Attributes:
        location: as written in the model.
        path: the location within the folder of the model.
        bytes: size of the file, or None where there is no such file or it must not be looked at.
    """

    location: str
    path: Path
    bytes: int | None


@record
class ExternalProblem:
    """What is wrong with one location, in one way, for one or more tensors.

    Attributes:
        kind: "missing" (no data there), "truncated" (too little data, or numbers that cannot be right) or "escapes"
            (the location leads out of the folders where a model's data may lie).
        tensor: names of the first tensors concerned.
        location: as written in the model; empty where the model names none.
        detail: what is wrong, and for how many tensors.
        wrong: what must be changed: the "file", the "entry" in the model, or the "place" of the file.
    """

    kind: Literal["missing", "truncated", "escapes"]
    tensor: str
    location: str
    detail: str
    wrong: Wrong = "file"


@record
class _Use:
    """One tensor's use of a location; sizes in bytes, `needed` is None where dims or type do not tell."""

    name: str
    offset: str
    length: str
    needed: int | None


@record
class ExternalReference:
    """Where the bytes of a tensor lie: `length` bytes at `offset` of the file at `location`, as the model names it."""

    location: str
    offset: int
    length: int


def is_external(tensor: TensorProto) -> bool:
    """Whether the bytes of a tensor lie in another file."""
    return bool(tensor.data_location == TensorProto.EXTERNAL)


def read_reference(tensor: TensorProto) -> ExternalReference | None:
    """Where the bytes of an external tensor lie, None for any other; a length that is not given is that of its dims.

    Raises:
        ValueError: its numbers are none, which `examine` reports.
    """
    if not is_external(tensor):
        return None
    entries = {entry.key: _text(entry.value) for entry in tensor.external_data}
    length = int(entries.get("length") or 0) or count_bytes(tensor) or 0
    return ExternalReference(entries.get("location", ""), int(entries.get("offset") or 0), length)


def portions(path: Path, reference: ExternalReference) -> Iterator[bytes]:
    """The bytes of a reference into a file, a portion at a time.

    Raises:
        UsageError: the file is shorter than it was.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        file.seek(reference.offset)
        left = reference.length
        while left:
            portion = file.read(min(left, PORTION))
            if not portion:
                raise UsageError(f"{path.name!r} became shorter while it was read; wait until it is written completely")
            left -= len(portion)
            yield portion


def external_tensors(model: ModelProto) -> Iterator[TensorProto]:
    """Yield the tensors of a model, at any depth, whose data lie in another file."""
    graphs = [model.graph, *(graph for one in model.training_info for graph in (one.initialization, one.algorithm))]
    held = (attribute for function in model.functions for attribute in function.attribute_proto)
    nodes = (node for function in model.functions for node in function.node)
    yield from filter(is_external, _tensors(graphs, held, nodes))


def examine(model: ModelProto, model_path: Path) -> tuple[tuple[ExternalFile, ...], tuple[ExternalProblem, ...]]:
    """Look up every external file of a model; the model may be a skeleton.

    Data may lie below the folder of `model_path`, or below that of the real file where `model_path` is a link: a
    snapshot of the Hugging Face cache links the model and its data into one folder, `blobs`.
    """
    uses: dict[str, list[_Use]] = {}
    for tensor in external_tensors(model):
        entries = {_text(entry.key): _text(entry.value) for entry in tensor.external_data}
        use = _Use(_text(tensor.name), entries.get("offset", "0"), entries.get("length", "0"), count_bytes(tensor))
        uses.setdefault(entries.get("location", ""), []).append(use)
    files: list[ExternalFile] = []
    problems: list[ExternalProblem] = []
    for location, users in uses.items():
        path = model_path.parent / location
        size, problem = _look_up(location, model_path, users)
        if location:
            files.append(ExternalFile(location, path, size))
        if problem:
            problems.append(problem)
        elif size is not None and (short := _describe_short_file(location, size, users)):
            problems.append(short)
    return tuple(files), tuple(problems)


def _tensors(
    graphs: Iterable[GraphProto], attributes: Iterable[AttributeProto] = (), nodes: Iterable[NodeProto] = ()
) -> Iterator[TensorProto]:
    """The tensors of graphs, attributes and nodes, at any depth."""
    for graph in graphs:
        yield from graph.initializer
        yield from (tensor for sparse in graph.sparse_initializer for tensor in (sparse.values, sparse.indices))
        yield from _tensors((), (), graph.node)
    # By presence, not by `type`: a model may leave the type out or give a wrong one.
    for attribute in chain(attributes, (attribute for node in nodes for attribute in node.attribute)):
        for field, value in attribute.ListFields():
            listed = value if field.name in ("tensors", "graphs", "sparse_tensors") else (value,)
            if field.name in ("t", "tensors"):
                yield from listed
            elif field.name in ("g", "graphs"):
                yield from _tensors(listed)
            elif field.name in ("sparse_tensor", "sparse_tensors"):
                yield from (tensor for sparse in listed for tensor in (sparse.values, sparse.indices))


def _text(value: str | bytes) -> str:
    """Undo what protobuf does to a string that is not UTF-8: it comes out as bytes."""
    return os.fsdecode(value) if isinstance(value, bytes) else value


def count_bytes(tensor: TensorProto) -> int | None:
    """Return the bytes that dims and data_type ask for, or None where they do not tell."""
    bits = BITS.get(tensor.data_type)
    if bits is None or any(dim < 0 for dim in tensor.dims):
        return None
    if not all(tensor.dims):
        return 0
    for dim in tensor.dims:
        bits *= dim
        if bits >= 2**66:  # beyond any file, and damaged dims must not grow numbers without end
            return None
    return -(-bits // 8)


def _look_up(location: str, model_path: Path, users: list[_Use]) -> tuple[int | None, ExternalProblem | None]:
    """Return the size in bytes of the file at a location, or None, and what keeps it from being used."""
    if not location:
        why = "the model names no file (external_data has no location, or an empty one)"
        return None, _problem("missing", users, location, why, "entry")
    if "\0" in location:
        why = "the location holds a NUL character, which no name of a file has"
        return None, _problem("missing", users, location, why, "entry")
    if outside := _leaves(location):
        return None, _problem("escapes", users, location, outside, "place")
    try:
        # realpath also follows the links of folders on the way, and does not mind what is not there.
        target = Path(os.path.realpath(model_path.parent / location))
        allowed = {Path(os.path.realpath(model_path.parent)), Path(os.path.realpath(model_path)).parent}
        if not any(target.is_relative_to(folder) for folder in allowed):
            why = f"a link leads to {target}, out of the model's folder"
            return None, _problem("escapes", users, location, why, "place")
        status = target.stat()
    except FileNotFoundError:
        return None, _problem("missing", users, location, "there is no such file")
    except (OSError, ValueError) as error:  # ValueError: a text that no file name can hold
        wrong: Wrong = "entry" if getattr(error, "errno", errno.EINVAL) in NO_NAME else "file"
        return None, _problem("missing", users, location, getattr(error, "strerror", None) or str(error), wrong)
    return _judge(status, location, users)


def _judge(status: os.stat_result, location: str, users: list[_Use]) -> tuple[int | None, ExternalProblem | None]:
    if not stat.S_ISREG(status.st_mode):
        what = "a folder" if stat.S_ISDIR(status.st_mode) else "something that is not a regular file"
        return None, _problem("missing", users, location, f"there is {what} in its place")
    size, needed = status.st_size, max(use.needed or 0 for use in users)
    if size == 0 and needed:
        return size, _problem("missing", users, location, "the file is empty")
    if size in LFS_POINTER and size < needed:
        why = f"a file of {size} bytes, by its size a Git LFS pointer, is in its place; run `git lfs pull`"
        return size, _problem("missing", users, location, why)
    return size, None


def _leaves(location: str) -> str | None:
    """Say why a location leads out of the model's folder by its text alone, on whatever system it is read."""
    if location.startswith("/") or PureWindowsPath(location).anchor:
        return "the location is absolute, or names a drive or server"
    depth = 0
    for part in re.split(r"[/\\]", location):
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        if depth < 0:
            return "the location leads out of the model's folder by `..`"
    return None


def _describe_short_file(location: str, size: int, users: list[_Use]) -> ExternalProblem | None:
    found = [(use, *defect) for use in users if (defect := _defect(use, size))]
    if not found:
        return None
    counts = Counter(kind for _, kind, _ in found)
    summary = ", ".join(f"{kind} ({count})" for kind, count in counts.items())
    wrong: Wrong = "file" if found[0][1] == BEYOND else "entry"
    users = [use for use, _, _ in found]
    return _problem("truncated", users, location, f"{summary}; first: {found[0][2]}", wrong)


def _defect(use: _Use, size: int) -> tuple[str, str] | None:
    """Return kind and description of what keeps a tensor's bytes from lying inside a file of `size` bytes."""
    for key, text in (("offset", use.offset), ("length", use.length)):
        if not re.fullmatch(r"[0-9]{1,19}", text):
            digits = re.fullmatch(r"(-?)[0-9]+", text)
            kind = "not a number" if digits is None else "negative" if digits[1] else "larger than any file"
            return f"{key} is {kind}", f"{key} is {text[:40]!r}"
    offset, length = int(use.offset), int(use.length)
    if length and use.needed is not None and length != use.needed:
        return "length disagrees with dims", f"length is {length:,} bytes, dims and type need {use.needed:,}"
    end = offset + (length or use.needed or 0)
    if end > size:
        return BEYOND, f"data end at byte {end:,} of a file of {size:,} bytes"
    return None


def _problem(
    kind: Literal["missing", "truncated", "escapes"], users: list[_Use], location: str, why: str, wrong: Wrong = "file"
) -> ExternalProblem:
    names = ", ".join(use.name or "(no name)" for use in users[:_NAMES_SHOWN])
    more = f" and {len(users) - _NAMES_SHOWN:,} more" if len(users) > _NAMES_SHOWN else ""
    tensors = "1 tensor" if len(users) == 1 else f"{len(users):,} tensors"
    return ExternalProblem(kind, names + more, location, f"{why}; {tensors}", wrong)
