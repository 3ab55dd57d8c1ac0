"""What an experiment wants run, and what came back: tensors, the sizes of a scenario, calls and answers. numpy only."""

import math
from collections.abc import Callable, Generator, Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import numpy as np

from kvdoctor.contract import Axis, PhaseName
from kvdoctor.decode import search
from kvdoctor.decode.search import SearchPlan
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record

Array = search.Array
T = TypeVar("T")

NUMPY_TYPES = {"float": "float32", "double": "float64"}
NUMPY_TYPES |= {name: name for name in ("float16", "int8", "uint8", "int32", "int64", "bool")}

Embed = Callable[[PhaseName, Array], Mapping[str, Array]]
"""Makes the embeddings of token ids int64[batch, new] for the inputs of a phase, by their names."""


CountRows = Callable[[], Mapping[PhaseName, int]]
"""The number of rows that each encoder of images or audio makes for one image or one audio clip."""


TOO_SHORT = "the context is too short for it"
"""Why an experiment is not run that needs more tokens than a sequence may have."""


class ControlFailed(CannotCheck):
    """What an experiment changes has no effect on the model: it would pass a faulty one. The reason says what."""


class StepFailed(Exception):
    """The runtime failed while it ran a call."""


class Unanswered(Exception):
    """A call that may fail did: what an experiment would learn from it stays open."""


class Value(Protocol):
    """A tensor as the runtime holds it; the array is made only when asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    def array(self) -> Array: ...  # noqa: D102


def as_array(value: "Value | Array") -> Array:
    """Give the numpy array of a value, whoever holds it."""
    return value if isinstance(value, np.ndarray) else value.array()


class Past(dict[str, "Value | Array"]):
    """Past inputs by name, how many tokens they hold, and how many each call added, where that is known."""

    def __init__(
        self, values: "Mapping[str, Value | Array] | None" = None, length: int = 0, calls: tuple[int, ...] = ()
    ) -> None:
        super().__init__(values or {})
        self.length, self.calls = length, calls

    def newest_first(self) -> Array:
        """The positions of the tokens in a slot to whose front each call adds its own, int64[length]."""
        spans = [np.arange(sum(self.calls[:at]), sum(self.calls[: at + 1])) for at in range(len(self.calls))]
        return np.concatenate([*spans[::-1], np.arange(0)])


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


@record(kw_only=True)
class Conditions:
    """What experiments are judged by and know besides the contract.

    Attributes:
        tolerances: Largest differences that pass, by arithmetic, as fractions of the logits' standard deviation.
        thresholds: Lengths in tokens at which the graphs may change what they compute.
        scratch: A private folder for files that an experiment leaves for another worker.
        search: How the operator with the whole loop is called, in the phase `generate`; None without one.
    """

    tolerances: dict[str, float] = field(default_factory=dict)
    thresholds: tuple[int, ...] = ()
    scratch: Path | None = None
    search: SearchPlan | None = None


@record
class Call:
    """What an experiment wants run: a phase and its feeds; past and new in tokens.

    `expected` float[batch, n, vocabulary] is compared with the logits of the last n positions; where it is `sampled`,
    float[1, 1, 64], with a sample of all logits. A `control` must differ from it; its `label` names what was corrupted.
    The answer to a `reference` is reused for equal feeds. A `timing` is repeated; its median is reported as `label`. A
    `noise` call measures by how much splitting a sequence changes logits without a cache. A `probe` that fails is
    answered without outputs, and is not on record.
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
    kind: Literal["step", "reference", "control", "timing", "noise", "probe", "trial"] = "step"
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
    logits_axes: tuple[Axis, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether the runtime refused the call: only a probe is answered so."""
        return not self.outputs

    @property
    def logits(self) -> Array:
        """float[batch, new, vocabulary], or in another shape if the graph returns one of no such meaning.

        Token ids in place of logits become rows that are equal where the ids are.
        """
        array, order = self.outputs[self.logits_name].array(), _order_of(self.logits_axes)
        if order is not None and array.ndim == len(order):
            array = array.transpose(order)
        array = array.reshape(self.logits_shape)
        return as_rows(array[..., 0]) if array.dtype.kind in "iu" else array

    @property
    def logits_shape(self) -> tuple[int, ...]:
        """The shape of the logits; where a graph gives only the last token's it may leave their axis out."""
        shape, axes = self.outputs[self.logits_name].shape, self.logits_axes
        if len(axes) == len(shape) and (_order_of(axes) is not None or "batch_new" in axes):
            if "batch_new" in axes and shape[0] % max(self.new, 1) == 0:
                return (shape[0] // max(self.new, 1), self.new, math.prod(shape[1:]))
            groups = [[size for size, axis in zip(shape, axes, strict=True) if _group(axis) == at] for at in range(3)]
            return tuple(math.prod(group) for group in groups)
        if len(shape) == 1:
            return (1, 1, *shape)
        return (shape[0], 1, math.prod(shape[1:])) if len(shape) in (2, 4) else shape


Asking = Generator[Call, Answer, T]
"""Yields calls, is sent their answers, and ends with what they show."""


def _group(axis: Axis) -> int:
    """The place of an axis in float[batch, new, vocabulary]: rows of codebooks belong to the batch."""
    return 0 if axis in ("batch", "batch_codebooks", "codebooks") else 1 if axis == "new" else 2


def _order_of(axes: tuple[Axis, ...]) -> tuple[int, ...] | None:
    """The axes of an output of logits in the order batch, new, vocabulary; None where they are not known."""
    if "batch_new" in axes or not {"batch", "batch_codebooks"}.intersection(axes):
        return None
    return tuple(sorted(range(len(axes)), key=lambda at: _group(axes[at])))


ID_ROW = 16
"""Numbers in the row that stands for a token id where a graph returns ids in place of logits."""


def as_rows(ids: Array) -> Array:
    """Rows of noise for token ids int64[batch, new], each drawn from its id: float64[batch, new, 16]."""
    found, places = np.unique(ids.reshape(-1), return_inverse=True)
    rows = [np.random.default_rng([ID_ROW, int(token) % (1 << 64)]).standard_normal(ID_ROW) for token in found]
    table: Array = np.array(rows).reshape(len(found), ID_ROW)
    return table[places].reshape(*ids.shape, ID_ROW)


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
