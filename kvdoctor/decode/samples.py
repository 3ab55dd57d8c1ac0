"""`--prompt-ids` and `--inputs`: a prompt and encoder inputs of the user, in place of synthetic feeds."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from kvdoctor.contract import CacheContract, Port, describe
from kvdoctor.errors import UsageError
from kvdoctor.records import record

Array = np.ndarray[Any, Any]


FORMATS = (b"PK", b"\x93NUMPY")
"""How the files of numpy begin: several arrays, and one."""


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


def read_arrays(file: Path) -> dict[str, Array]:
    """The arrays of an .npz file; nothing in it is executed.

    Raises:
        UsageError: it is no such file, or holds something else than arrays of numbers.
    """
    try:
        with file.open("rb") as opened:
            if not opened.read(6).startswith(FORMATS):
                raise UsageError("it is not a file that numpy.savez wrote")
        with np.load(file, allow_pickle=False) as held:
            if not hasattr(held, "files"):
                raise UsageError("it holds a single array; save it with numpy.savez(FILE, name=array)")
            arrays = {name: held[name] for name in held.files}
    except (OSError, ValueError, EOFError, BadZipFile, MemoryError, KeyError) as error:
        raise UsageError(str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub" or not array.size:
            raise UsageError(f"{name!r} is not an array of numbers ({array.dtype}{list(array.shape)})")
    return arrays


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
    named = set(_read_file(file))
    unknown = {one.subject for contract in contracts for one in contract.ambiguities if one.unknown}
    graphs = (graph for contract in contracts for graph in contract.graphs.values())
    return {port.name for graph in graphs for port in graph.inputs if port.role in FREE or port.name in unknown} & named


def _read_file(file: str) -> dict[str, Array]:
    try:
        return read_arrays(Path(file))
    except UsageError as error:
        raise UsageError(f"--inputs {file}: {error}; it takes an .npz file of arrays by input name") from None


def read_samples(prompt: tuple[int, ...], file: str | None, contracts: Sequence[CacheContract]) -> Samples:
    """Read the user's samples, and compare them with the inputs of all stacks.

    Raises:
        UsageError: the file cannot be read, or what it holds fits no input.
    """
    arrays = _read_file(file) if file is not None else {}
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
