"""Embeddings: which output of the embedding graph goes to which input, and rows of images and audio among them.

A decoder that takes embeddings has the graph that makes them in a file next to it. The encoders of images and audio
run once, and their rows replace the embeddings of placeholder tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from kvdoctor.contract import CacheContract, Dim, Features, PhaseName
from kvdoctor.decode.calls import Answer, Array, Call, StepFailed
from kvdoctor.decode.inputs import embedding_feeds, feature_feeds, plain_token_ids
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record


class Tensor(Protocol):
    """An input or output as a file or a contract declares it."""

    @property
    def name(self) -> str: ...  # noqa: D102
    @property
    def dtype(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> tuple[Dim, ...] | None: ...  # noqa: D102


Port = TypeVar("Port", bound=Tensor)


def pair_tensors(
    inputs: Sequence[Port], outputs: Sequence[Port], fits: Callable[[Port, Port], bool]
) -> dict[str, str] | None:
    """The output that each input takes: of the same name, else the only one that fits. None where one has none."""
    found = {}
    for one in inputs:
        fitting = [other.name for other in outputs if fits(one, other)]
        if one.name in fitting:
            found[one.name] = one.name
        elif len(fitting) == 1:
            found[one.name] = fitting[0]
    return found if len(found) == len(inputs) else None


def pair_embeddings(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> dict[str, str] | None:
    """The output that each input takes, by name, type and width; None where two inputs have the same one as well."""
    found = pair_tensors(inputs, outputs, _fits)
    return found if found is not None and len(found) == len(set(found.values())) else None


def _fits(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same element type and, after batch and tokens, the same sizes.

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


LENGTHS = (7, 280, 2800)
"""Samples or frames of audio that are tried: an encoder may take many for each row."""


@record(slots=False)
class EncodedRows:
    """What an encoder made of one image or one audio clip: rows float[rows, width], and all its outputs."""

    rows: Array
    outputs: Mapping[str, Array]


@dataclass(eq=False, repr=False)
class FeatureRows:
    """The rows of all encoders of a stack. `run` runs a call of a phase."""

    contract: CacheContract
    seed: int
    run: Callable[[Call], Answer]
    made: dict[PhaseName, EncodedRows] = field(default_factory=dict)

    def count(self) -> dict[PhaseName, int]:
        """The number of rows that each encoder makes.

        Raises:
            CannotCheck: one of them cannot be run on synthetic input, or returns no rows.
        """
        return {one.phase: len(self.encode(one).rows) for one in self.contract.features}

    def encode(self, one: Features) -> EncodedRows:
        """The rows of one encoder; see `count` for errors."""
        if one.phase in self.made:
            return self.made[one.phase]
        graph, error = self.contract.graph(one.phase), ""
        for length in LENGTHS:
            try:
                answer = self.run(Call(one.phase, feature_feeds(graph, self.seed, length), 0, 0))
                break
            except (StepFailed, CannotCheck) as refusal:
                error = error or str(refusal)
        else:
            raise CannotCheck(f"{graph.file} could not be run on synthetic input ({error})")
        outputs = {name: value.array() for name, value in answer.outputs.items()}
        rows = outputs[one.output]
        if rows.ndim < 2 or not rows.shape[-1] or (not rows.size and one.rows is None):
            raise CannotCheck(f"{graph.file} returns {one.output} of shape {list(rows.shape)}, which has no rows")
        flat = rows.reshape(-1, rows.shape[-1])
        self.made[one.phase] = EncodedRows(flat[: max(len(flat) // one.pieces, 1)], outputs)
        return self.made[one.phase]

    def list_rows(self) -> "list[tuple[Features, int]]":
        """Each row of all encoders: its encoder and its number there; a token -1 - n stands for the n-th of them."""
        return [(one, number) for one in self.contract.features for number in range(len(self.encode(one).rows))]

    def embedding_call(self, tokens: Array) -> Call:
        """The call of the embedding graph: placeholders in the places of rows, and the rows where it takes them.

        Raises:
            CannotCheck: no config gives the id of the placeholder that the graph replaces.
        """
        graph = self.contract.graph("embed")
        places = tokens < 0
        if not places.any():
            return Call("embed", embedding_feeds(graph, tokens), 0, tokens.shape[1])
        listed = self.list_rows()
        chosen = [listed[-1 - int(token)] for token in tokens[places]]
        taken = self._taken_by_graph(chosen)
        if taken and any(one.token is None for one, _ in chosen):
            raise CannotCheck("no config gives the id of the placeholder token that the embedding graph replaces")
        usual, known = plain_token_ids(self.contract)[0], self.contract.vocabulary
        ids = np.array(tokens)
        # An id beyond the table, of a placeholder that the caller replaces, is not looked up by any loop.
        inside = [one.token is not None and (taken or known is None or one.token < known) for one, _ in chosen]
        ids[places] = [one.token if fits else usual for (one, _), fits in zip(chosen, inside, strict=True)]
        return Call("embed", embedding_feeds(graph, ids, taken), 0, tokens.shape[1])

    def _taken_by_graph(self, chosen: "list[tuple[Features, int]]") -> dict[str, Array]:
        """The rows by the input of the embedding graph that takes them; empty where the caller mixes them in."""
        found: dict[str, Array] = {}
        for port in self.contract.graph("embed").inputs:
            if port.role != "features":
                continue
            for one in self.contract.features:
                outputs = self.encode(one).outputs
                source = port.name if port.name in outputs else one.output
                numbers = [number for other, number in chosen if other is one]
                # By its name, an input is for the rows of one kind of encoder.
                heard = any(word in port.name for word in ("audio", "speech", "sound"))
                if numbers and (source == port.name or heard == (one.phase == "audio")):
                    made = outputs[source]
                    found[port.name] = made.reshape(-1, made.shape[-1])[numbers]
        return found

    def replace_rows(self, embedded: Array, tokens: Array) -> Array:
        """The embeddings of tokens with the rows in their places, where they have the width of the rows.

        A graph that takes the rows has put them there itself.
        """
        places = tokens < 0
        if not places.any() or any(port.role == "features" for port in self.contract.graph("embed").inputs):
            return embedded
        listed = self.list_rows()
        rows = [self.encode(one).rows[number] for one, number in (listed[-1 - int(t)] for t in tokens[places])]
        if embedded.ndim != 3 or any(row.shape != embedded.shape[2:] for row in rows):
            return embedded
        mixed = np.array(embedded)
        mixed[places] = np.stack(rows).astype(embedded.dtype)
        return mixed
