"""`--prompt-ids` and `--inputs`: a prompt and encoder inputs of the user, in place of synthetic feeds."""

import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

import numpy as np

from kvdoctor.contract import CacheContract, Port, describe
from kvdoctor.decode.search import Array
from kvdoctor.decode.side_files import open_side_file
from kvdoctor.errors import UsageError
from kvdoctor.records import record

MOST_BYTES = 512 << 20
"""Bytes of all inputs: an image of 4,096 pixels a side as float32 takes 192 MiB."""
MOST_ARRAYS = 8192
DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, ValueError, RuntimeError, MemoryError, KeyError)
"""What numpy and zipfile raise for archives that are damaged, encrypted, or packed in an unknown way."""


@record
class Samples:
    """`prompt` are token ids of one sequence.

    `arrays` are inputs by name, of which the first row is used, or all where there is no batch.
    """

    prompt: tuple[int, ...] = ()
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def overlay(self, name: str, made: Array) -> Array:
        """The synthetic input, with the user's first row in place of its first row where the sizes agree."""
        given = self.arrays.get(name)
        if given is None or given.ndim != made.ndim or given.shape[1:] != made.shape[1:]:
            return made
        laid: Array = made.copy()
        laid[:1] = given[:1]
        return laid

    def tokens(self, made: Array) -> Array:
        """Synthetic tokens int64[rows, total] with the user's prompt at the start of the first row."""
        count = min(len(self.prompt), made.shape[1])
        tokens: Array = made.copy()
        tokens[:1, :count] = np.array(self.prompt[:count], dtype=made.dtype)
        return tokens

    def length(self, name: str, axis: int) -> int | None:
        """The size of an input that was given, along an axis."""
        given = self.arrays.get(name)
        return None if given is None or axis >= given.ndim else int(given.shape[axis])


def read_arrays(path: Path, most: int = MOST_BYTES) -> dict[str, Array]:
    """The arrays of `--inputs`, an `.npz` of at most so many bytes, packed and unpacked; nothing in it is executed.

    Raises:
        UsageError: it cannot be read, is damaged or too large, or holds something else than arrays of numbers.
    """
    try:
        with open_side_file(path, most) as file:
            if (start := file.read(6)).startswith(b"\x93NUMPY"):
                raise ValueError("it holds a single array; save it with numpy.savez(FILE, name=array)")
            if not start.startswith(b"PK"):
                raise ValueError("it is not a file that numpy.savez wrote")
            with zipfile.ZipFile(file) as opened:
                entries = opened.infolist()
                if sum(entry.file_size for entry in entries) > most or len(entries) > MOST_ARRAYS:
                    raise ValueError(f"it is larger than {most >> 20} MiB, or has more than {MOST_ARRAYS} arrays")
                return {entry.filename.removesuffix(".npy"): _read_array(opened, entry) for entry in entries}
    except DAMAGE as error:
        reason = getattr(error, "strerror", None) or next(iter(str(error).splitlines()), "") or type(error).__name__
        text = f"--inputs {path}: {reason[:200]}; it takes an .npz file of arrays by input name"
        raise UsageError(text) from None


def _read_array(opened: zipfile.ZipFile, entry: zipfile.ZipInfo) -> Array:
    """One array, whose header must not promise more than the entry holds: that memory would be taken first."""
    with opened.open(entry) as stream:
        version, name = np.lib.format.read_magic(stream), entry.filename.removesuffix(".npy")
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"it is written in format {version}, which numbers do not need; save it with np.savez")
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(stream)
        if dtype.hasobject:
            raise ValueError(f"{name!r} holds pickled objects, which are not loaded")
        size = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if min(shape, default=0) < 0 or stream.tell() + size != entry.file_size:
            raise ValueError(f"{name!r} has {entry.file_size} bytes, and its header says otherwise")
        if dtype.kind not in "fiub" or not size:
            raise ValueError(f"{name!r} is not an array of numbers ({dtype}{list(shape)})")
    with opened.open(entry) as stream:
        array: Array = np.lib.format.read_array(stream, allow_pickle=False)
    return array


ROOM = 16
"""Tokens of the runs after the prompt."""
TAKEN = ("token_ids", "encoder_input", "encoder_states", "condition")
"""Roles of inputs that can be given; all others follow from the contract."""
FREE = ("auxiliary", "condition", "setting")
"""Roles of inputs of which the contract says nothing but that they are the same in every call."""


def given_names(file: str | None, contracts: Iterable[CacheContract]) -> set[str]:
    """The inputs that a file of arrays gives a value to, and that no contract explains.

    Raises:
        UsageError: the file cannot be read.
    """
    if file is None:
        return set()
    named = set(read_arrays(Path(file)))
    unknown = {one.subject for contract in contracts for one in contract.ambiguities if one.unknown}
    graphs = (graph for contract in contracts for graph in contract.graphs.values())
    return {port.name for graph in graphs for port in graph.inputs if port.role in FREE or port.name in unknown} & named


def read_samples(
    prompt: tuple[int, ...], file: str | None, contracts: Sequence[CacheContract], rows: int | None = None
) -> Samples:
    """Read the user's samples, and compare them with the inputs of all stacks.

    `rows` are those of the shortest table of positions.

    Raises:
        UsageError: the file cannot be read, or what it holds fits no input.
    """
    arrays = read_arrays(Path(file)) if file is not None else {}
    graphs = (graph for contract in contracts for graph in contract.graphs.values())
    ports = {port.name: port for graph in graphs for port in graph.inputs if port.role in TAKEN}
    for name, array in arrays.items():
        _require_fit(name, array, ports, file or "")
    for name, port in ports.items():
        if port.role == "token_ids" and name in arrays:
            if prompt:
                raise UsageError(f"give the prompt once: --prompt-ids, or {name} in {file}")
            prompt = tuple(int(token) for token in arrays.pop(name)[0])
    size = min((c.vocabulary for c in contracts if c.vocabulary is not None), default=None)
    wrong = next((token for token in prompt if token < 0 or (size is not None and token >= size)), None)
    if wrong is not None:
        raise UsageError(f"token id {wrong} is not in the vocabulary, which has {size} tokens; ids count from 0")
    limit = min((c.usable_length for c in contracts if c.usable_length is not None), default=None)
    if limit is not None and len(prompt) > limit - 2:
        raise UsageError(f"the prompt has {len(prompt)} tokens, and the context {limit}: leave room for two steps")
    if rows is not None and len(prompt) > max(rows - ROOM, 2):
        taken = f"the graph looks positions up in a table of {rows} rows"
        raise UsageError(f"the prompt has {len(prompt)} tokens, and {taken}: give at most {max(rows - ROOM, 2)}")
    return Samples(prompt, arrays)


def _require_fit(name: str, array: Array, ports: dict[str, Port], file: str) -> None:
    port = ports.get(name)
    if port is None:
        raise UsageError(
            f"--inputs {file}: {name!r} is not an input that can be given; give {', '.join(sorted(ports)) or 'none'} "
            "(masks, positions and the cache follow from the contract)"
        )
    shape = port.shape or ()
    fits = len(shape) == array.ndim and all(
        not isinstance(size, int) or axis == "batch" or size == got
        for size, got, axis in zip(shape, array.shape, port.axes, strict=True)
    )
    if not fits:
        got = describe(array.dtype.name, array.shape)
        raise UsageError(f"--inputs {file}: {name!r} is {got}, the model takes {describe(port.dtype, port.shape)}")
    if (array.dtype.kind in "iu") != ("int" in port.dtype):
        raise UsageError(f"--inputs {file}: {name!r} holds {array.dtype.name}, the model takes {port.dtype}")
