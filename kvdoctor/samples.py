"""What the user gives in place of made-up feeds: a prompt, the inputs of the encoder. numpy only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

Array = np.ndarray[Any, Any]


class BadSamples(Exception):
    """The file of inputs cannot be read; its text says why."""


@dataclass(frozen=True, slots=True)
class Samples:
    """`prompt` are token ids of one sequence; `arrays` inputs by name, of which the first row is used."""

    prompt: tuple[int, ...] = ()
    arrays: Mapping[str, Array] = field(default_factory=dict)

    def laid_over(self, name: str, made: Array) -> Array:
        """What was made up for an input, with the user's first row in place of its first row where the sizes agree."""
        given = self.arrays.get(name)
        if given is None or given.ndim != made.ndim or given.shape[1:] != made.shape[1:]:
            return made
        laid: Array = made.copy()
        laid[:1] = given[:1]
        return laid

    def tokens(self, made: Array) -> Array:
        """Made-up tokens int64[rows, total] with the user's prompt at the start of the first row."""
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
        BadSamples: it is no such file, or holds something else than arrays of numbers.
    """
    try:
        with np.load(file, allow_pickle=False) as held:
            if not hasattr(held, "files"):
                raise BadSamples("it holds a single array; save it with numpy.savez(FILE, name=array)")
            arrays = {name: held[name] for name in held.files}
    except (OSError, ValueError, EOFError, BadZipFile, MemoryError, KeyError) as error:
        raise BadSamples(str(error).splitlines()[0] if str(error) else type(error).__name__) from None
    for name, array in arrays.items():
        if array.dtype.kind not in "fiub" or array.ndim == 0 or not array.size:
            raise BadSamples(f"{name!r} is no array of numbers with a batch axis ({array.dtype}{list(array.shape)})")
    return arrays
