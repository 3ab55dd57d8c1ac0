"""`--prompt-ids` and `--inputs`: what the user gives, held against the contract before anything runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from kvdoctor.contract import CacheContract, Port, describe
from kvdoctor.errors import UsageError
from kvdoctor.samples import Array, BadSamples, Samples, read_arrays

TAKEN = ("token_ids", "encoder_input", "encoder_states")
"""Roles of inputs that can be given; all others follow from the contract."""


def given_samples(prompt: tuple[int, ...], file: str | None, contracts: Sequence[CacheContract]) -> Samples:
    """Read what was given, and hold it against the inputs of all stacks.

    Raises:
        UsageError: the file cannot be read, or what it holds fits no input.
    """
    arrays: dict[str, Array] = {}
    if file is not None:
        try:
            arrays = read_arrays(Path(file))
        except BadSamples as error:
            raise UsageError(f"--inputs {file}: {error}; it takes an .npz file of arrays by input name") from None
    ports = {port.name: port for contract in contracts for port in _takers(contract)}
    for name, array in arrays.items():
        _demand(name, array, ports, file or "")
    for name, port in ports.items():
        if port.role == "token_ids" and name in arrays:
            if prompt:
                raise UsageError(f"give the prompt once: --prompt-ids, or {name} in {file}")
            prompt = tuple(int(word) for word in arrays.pop(name)[0])
    size = min((c.vocabulary for c in contracts if c.vocabulary is not None), default=None)
    wrong = next((word for word in prompt if word < 0 or (size is not None and word >= size)), None)
    if wrong is not None:
        raise UsageError(f"token id {wrong} is not in the vocabulary, which has {size} words; ids count from 0")
    limit = min((c.usable_length for c in contracts if c.usable_length is not None), default=None)
    if limit is not None and len(prompt) > limit - 2:
        raise UsageError(f"the prompt has {len(prompt)} tokens, and the context {limit}: leave room for two steps")
    return Samples(prompt, arrays)


def _takers(contract: CacheContract) -> Iterator[Port]:
    for graph in contract.graphs.values():
        yield from (port for port in graph.inputs if port.role in TAKEN)


def _demand(name: str, array: Array, ports: dict[str, Port], file: str) -> None:
    port = ports.get(name)
    if port is None:
        raise UsageError(
            f"--inputs {file}: {name!r} is no input that can be given; give {', '.join(sorted(ports)) or 'none'} "
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
