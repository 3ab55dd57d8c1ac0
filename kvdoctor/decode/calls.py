"""What an experiment wants run, and what came back: tensors, the sizes of a scenario, calls and answers. numpy only."""

import math
from collections.abc import Callable, Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from kvdoctor.contract import PhaseName
from kvdoctor.records import record

Array = np.ndarray[Any, Any]

NUMPY_TYPES: dict[str, Any] = {
    "float": np.float32,
    "float16": np.float16,
    "double": np.float64,
    "int8": np.int8,
    "uint8": np.uint8,
    "int32": np.int32,
    "int64": np.int64,
    "bool": np.bool_,
}


Embed = Callable[[PhaseName, Array], Mapping[str, Array]]
"""Makes the embeddings of token ids int64[batch, new] for the inputs of a phase, by their names."""


CountRows = Callable[[], Mapping[PhaseName, int]]
"""The number of rows that each encoder of images or audio makes for one image or one audio clip."""


class TooShort(Exception):
    """An experiment needs more tokens than a sequence may have."""


class NothingToRun(Exception):
    """An experiment does not apply to the model after all. The message says why, for the report."""


class NoPower(Exception):
    """What an experiment changes has no effect on the model: it would pass a faulty one. The message says what."""


class Refused(Exception):
    """The runtime does not open a file at any optimization level."""


class StepFailed(Exception):
    """The runtime failed while it ran a call."""


class Value(Protocol):
    """A tensor as the runtime holds it; the array is made only when asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    def array(self) -> Array: ...  # noqa: D102


def as_array(value: "Value | Array") -> Array:
    """Give the numpy array of a value, whoever holds it."""
    return value if isinstance(value, np.ndarray) else value.array()


class Past(dict[str, "Value | Array"]):
    """Past inputs by name, and how many tokens they hold."""

    def __init__(self, values: "Mapping[str, Value | Array] | None" = None, length: int = 0) -> None:
        super().__init__(values or {})
        self.length = length


Loop = Literal["plain", "held"]

Way = Literal["run", "io-binding", "one-buffer", "basic", "off"]
"""How a call is run: plainly, with bound inputs and outputs, with presents bound to the memory of their pasts, or at a
lower level of graph optimization."""


@record
class Scenario:
    """The sizes of an experiment: `prompt` tokens in the prefill, then one token a step; `steps` counts the prefill."""

    batch: int = 1
    prompt: int = 3
    steps: int = 8
    encoder: int = 7
    seed: int = 0

    @property
    def total(self) -> int:
        """Tokens of the whole sequence."""
        return self.prompt + self.steps - 1


@record
class Call:
    """What an experiment wants run: a phase and its feeds; past and new in tokens.

    `expected` float[batch, n, vocabulary] is compared with the logits of the last n positions; where it is `sampled`,
    float[1, 1, 64], with a sample of all logits. A `control`
    must differ from it, and names what was `spoilt`. The answer to a `reference` is kept for equal feeds. A `timing`
    is repeated, and its median kept under `label`. A `noise` call measures what the graph's own arithmetic makes of
    splitting a sequence, without a cache. A `probe` is answered without outputs where it fails, and is not on record.
    `via` names another way to run the same file.
    `slots` are tensors of a cache by the name of the present that is compared with them. `in_place` has the past into
    whose memory a present is written, by the name of the present, where `via` is `one-buffer`.
    """

    phase: PhaseName
    feeds: "Mapping[str, Value | Array]"
    past: int
    new: int
    expected: Array | None = None
    sampled: bool = False
    kind: Literal["step", "reference", "control", "timing", "noise", "probe"] = "step"
    label: str = ""
    via: Way = "run"
    slots: "Mapping[str, Value | Array]" = field(default_factory=dict)
    in_place: Mapping[str, str] = field(default_factory=dict)


@record
class Answer:
    """What came back: outputs by name, and how many new tokens and past tokens the call had."""

    outputs: Mapping[str, Value]
    logits_name: str
    past: int = 0
    new: int = 0

    @property
    def failed(self) -> bool:
        """Whether the runtime refused the call: only a probe is answered so."""
        return not self.outputs

    @property
    def logits(self) -> Array:
        """float[batch, new, vocabulary], or in another shape if the graph returns one of no such meaning."""
        return self.outputs[self.logits_name].array().reshape(self.logits_shape)

    @property
    def logits_shape(self) -> tuple[int, ...]:
        """The shape of the logits; where a graph gives only the last token's it may leave their axis out."""
        shape = self.outputs[self.logits_name].shape
        if len(shape) == 1:
            return (1, 1, *shape)
        return (shape[0], 1, math.prod(shape[1:])) if len(shape) in (2, 4) else shape


@record
class Encoded:
    """What the encoder gave: its states float[batch, encoder, hidden], and all its outputs by name.

    `fed` is what it was fed, by name; empty where no encoder was run and its states are synthetic.
    """

    states: Array | None = None
    outputs: Mapping[str, Array] = field(default_factory=dict)
    fed: Mapping[str, Array] = field(default_factory=dict)


MOST_DATA = 64
"""Elements of a tensor that a line of a trace holds all of; of a larger one it holds a sample of so many."""


def take_sample(values: Array) -> Array:
    """The elements at `k * (size - 1) // 63` of the flat tensor: what a trace has of one that is too large for data."""
    size = values.size
    places = [k * (size - 1) // (MOST_DATA - 1) for k in range(MOST_DATA)]
    found: Array = values.reshape(-1)[places].astype(np.float64)
    return found


def save_call(path: Path, feeds: "Mapping[str, Value | Array]") -> None:
    """Write the feeds of a call, one array for each input."""
    arrays = {f"feed{index}": as_array(value) for index, value in enumerate(feeds.values())}
    np.savez(path, names=np.array(list(feeds), dtype=np.str_), **arrays)  # type: ignore[arg-type]


def load_call(path: Path) -> dict[str, Array]:
    """Read the feeds of a call."""
    with np.load(path) as kept:
        return {str(name): kept[f"feed{index}"] for index, name in enumerate(kept["names"])}
