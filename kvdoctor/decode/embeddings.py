"""Which output of an embedding graph goes to which input of a decoder.

A decoder that takes embeddings has the graph that makes them in a file beside it. Standard library only.
"""

from collections.abc import Sequence
from typing import Protocol

from kvdoctor.contract import CacheContract, Dim, PhaseName


class Tensor(Protocol):
    """An input or output as a file or a contract declares it."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[Dim, ...] | None: ...  # noqa: D102


def pair_embeddings(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, str] | None:
    """The output that each input takes: of the same name, else the only one of its type and width.

    None where an input has no such output, or two inputs have the same one.
    """
    found = {}
    for one in inputs:
        fitting = [other.name for other in outputs if _fits(one, other)]
        if one.name in fitting:
            found[one.name] = one.name
        elif len(fitting) == 1:
            found[one.name] = fitting[0]
    return found if len(found) == len(inputs) == len(set(found.values())) else None


def _fits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same element type and, behind batch and tokens, the same sizes.

    A size that is no number proves nothing: there the names must agree.
    """
    if one.shape is None or other.shape is None or one.dtype != other.dtype or len(one.shape) != len(other.shape):
        return False
    widths = list(zip(one.shape[2:], other.shape[2:], strict=True))
    known = [pair for pair in widths if isinstance(pair[0], int) and isinstance(pair[1], int)]
    return all(a == b for a, b in known) and (len(known) == len(widths) or one.name == other.name)


def embedded_inputs(contract: CacheContract, phase: PhaseName) -> dict[str, str]:
    """The inputs of a phase that the embedding graph makes, each with the graph's output; empty without such a graph.

    Raises:
        ValueError: the outputs do not fit the inputs.
    """
    if "embed" not in contract.phases:
        return {}
    taken = [port for port in contract.graph(phase).inputs if port.role == "embeddings"]
    made = [port for port in contract.graph("embed").outputs if port.role == "embeddings"]
    found = pair_embeddings(taken, made)
    if found is None:
        raise ValueError(f"the outputs of {contract.graph('embed').file} do not fit the inputs of the phase {phase}")
    return found
