"""Adapter files of ONNX Runtime (`.onnx_adapter`): the names, types and shapes of their matrices, without the values.

A file is a FlatBuffer with the identifier TORT. Source: onnxruntime/lora/adapter_format/adapter_schema.fbs.
"""

import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdoctor.contract import Dim
from kvdoctor.model.view import ELEMENT_TYPES
from kvdoctor.records import record

if TYPE_CHECKING:
    from flatbuffers.table import Table

IDENTIFIER = b"TORT"
MOST_PARAMETERS, MOST_DIMS, MOST_NAME = 100_000, 8, 4096
PARAMETERS, NAME, DIMS, TYPE = 10, 4, 6, 8
"""Where the table of an adapter, or of a parameter, has the offset of a field: 4 and twice the number of the field."""
DAMAGE = (OSError, ValueError, IndexError, struct.error, TypeError, OverflowError)


@record
class AdapterParameter:
    """A matrix of an adapter."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@record
class AdapterFile:
    """An adapter file; `problem` says why it cannot be read, None where it can."""

    name: str
    parameters: tuple[AdapterParameter, ...] = ()
    problem: str | None = None


def read_adapter(path: Path) -> AdapterFile:
    """Read the parameters of an adapter file; their values are not loaded."""
    from flatbuffers import encode, number_types  # few models have an adapter
    from flatbuffers.table import Table

    if not path.is_file():  # a pipe would wait for a writer
        link = "a link to a file that is not there" if path.is_symlink() else "no file"
        return AdapterFile(path.name, problem=f"it is {link}")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content[4:8] != IDENTIFIER:
                return AdapterFile(path.name, problem="it does not have the identifier of an adapter (TORT)")
            root = Table(content, encode.Get(number_types.UOffsetTFlags.packer_type, content, 0))
            return AdapterFile(path.name, tuple(_read_parameters(root)))
    except DAMAGE as error:
        return AdapterFile(path.name, problem=f"it is damaged ({type(error).__name__})")


def _read_parameters(root: "Table") -> list[AdapterParameter]:
    start, count = _find_vector(root, PARAMETERS, MOST_PARAMETERS)
    tables = (type(root)(root.Bytes, root.Indirect(start + 4 * number)) for number in range(count))
    return [_read_parameter(table) for table in tables]


def _read_parameter(table: "Table") -> AdapterParameter:
    name, kind = table.Offset(NAME), table.Offset(TYPE)
    text: bytes = table.String(table.Pos + name) if name else b""
    (number,) = struct.unpack_from("<i", table.Bytes, table.Pos + kind) if kind else (0,)
    start, count = _find_vector(table, DIMS, MOST_DIMS)
    shape = struct.unpack_from(f"<{count}q", table.Bytes, start)
    return AdapterParameter(text[:MOST_NAME].decode("utf-8", "replace"), ELEMENT_TYPES.get(number, "unknown"), shape)


def _find_vector(table: "Table", field: int, most: int) -> tuple[int, int]:
    """Where the elements of a vector begin, and how many there are."""
    at = table.Offset(field)
    if not at:
        return 0, 0
    count: Any = table.VectorLen(at)
    if count > most:
        raise ValueError("a list of the file is too long")
    return table.Vector(at), count


def find_misfit(parameter: AdapterParameter, dtype: str, shape: tuple[Dim, ...] | None) -> str | None:
    """Why a matrix does not fit an input of that type and declared shape; None where it does."""
    if parameter.dtype != dtype:
        return f"it is {parameter.dtype}, and the input takes {dtype}"
    if 0 in parameter.shape:
        return f"it has the shape {list(parameter.shape)}, which has no elements"
    if shape is None:
        return None
    fits = len(shape) == len(parameter.shape) and all(
        not isinstance(dim, int) or dim == size for dim, size in zip(shape, parameter.shape, strict=True)
    )
    return None if fits else f"it has the shape {list(parameter.shape)}, and the input takes {list(shape)}"
