"""One step of a trace in its sequence: what the contract makes of its sizes. numpy only."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvdoctor.caller.recorded import Recorded, TraceStep
from kvdoctor.calls import Array
from kvdoctor.contract import Axis, CacheContract, Graph, PhaseName, Port, Role, Slot

TOKENS: tuple[Role, ...] = ("token_ids", "embeddings", "token_and_position")

Kind = Literal[
    "input-missing",
    "input-unknown",
    "wrong-type",
    "wrong-rank",
    "wrong-size",
    "cached-too-early",
    "cached-too-late",
    "cache-dropped",
    "all-ids-with-cache",
    "batch-changes",
    "capacity-exceeded",
    "past-not-empty",
    "past-stale",
    "past-length",
    "past-differs",
    "placeholder-fed-back",
    "cross-cache-replaced",
    "slots-crossed",
    "mask-length",
    "mask-values",
    "positions",
    "counter",
    "encoder-missing",
    "encoder-changes",
]
"""The ways in which a step breaks the contract."""


@dataclass(frozen=True, slots=True)
class Break:
    """How a step breaks the contract: the inputs, what they should have been and were, and who mends it how.

    `graph_returned` tells of a present that is not as the graph promises and was fed back as it came: the loop is plain
    and the graph at fault. `suspected`: shapes alone cannot tell it from a right loop. `mild`: a graph may not even
    read the input, so that what comes behind is looked at as well.
    """

    kind: Kind
    inputs: tuple[str, ...]
    promised: str
    observed: str
    cause: str
    advice: str
    graph_returned: str | None = None
    suspected: str | None = None
    mild: bool = False


@dataclass(frozen=True, slots=True)
class Before:
    """What the steps of a sequence so far leave to the next. Lengths in tokens.

    `filled` is the right value of each slot that is held, by the name of its past; `count` the steps of the sequence;
    `ids` all token ids so far, where they are known. `buffered`: slots that could grow are fed as buffers.
    """

    first: TraceStep
    last: TraceStep
    phase: PhaseName
    tokens: int
    new: int
    batch: int
    count: int
    encoder: int | None
    filled: dict[str, Recorded]
    ids: Array | None = None
    buffered: bool = False


@dataclass(frozen=True)
class Moment:
    """One step, the contract it is held against, and what is known of the steps around it.

    `blind` collects inputs whose values would have been asked for and are not in the trace.
    """

    contract: CacheContract
    phase: PhaseName
    step: TraceStep
    before: Before | None = None
    encoded: TraceStep | None = None
    following: TraceStep | None = None
    blind: dict[str, None] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The graph that was called."""
        return self.contract.graph(self.phase)

    def ports(self, *roles: Role) -> Iterator[tuple[Port, Recorded]]:
        """The inputs of some roles that were fed."""
        for port in self.graph.inputs:
            if port.role in roles and port.name in self.step.fed:
                yield port, self.step.fed[port.name]

    @property
    def slots(self) -> Iterator[tuple[Slot, Recorded]]:
        """The slots whose past was fed to this graph."""
        pasts = {port.name for port in self.graph.inputs if port.role == "past"}
        for slot in self.contract.slots:
            if slot.past in pasts and slot.past in self.step.fed:
                yield slot, self.step.fed[slot.past]

    @property
    def new(self) -> int:
        """New tokens of the step; one where a token is fed with its position."""
        if any(True for _ in self.ports("token_and_position")):
            return 1
        sizes = (size_of(port.axes, fed.shape, "new") for port, fed in self.ports(*TOKENS))
        return next((size for size in sizes if size is not None), self.contract.new_tokens or 1)

    @property
    def batch(self) -> int:
        """Sequences that the token ids of the step have."""
        sizes = [self.batch_of(port.axes, fed) for port, fed in self.ports(*TOKENS)]
        if self.before is None:
            sizes += [self.batch_of(slot.axes, fed) for slot, fed in self.slots]
        return next((size for size in sizes if size is not None), self.before.batch if self.before else 1)

    def batch_of(self, axes: tuple[Axis, ...], fed: Recorded) -> int | None:
        """Sequences that an input was fed for."""
        streams = size_of(axes, fed.shape, "batch_codebooks")
        return size_of(axes, fed.shape, "batch") if streams is None else streams // self.contract.codebooks

    @property
    def past(self) -> int:
        """Tokens in the cache before the step."""
        if self.before is not None:
            return self.before.tokens
        return first_length(self) if self.contract.first_step == "empty-past" and not self.buffered else 0

    @property
    def buffered(self) -> bool:
        """Whether slots that could grow are fed as buffers, which are long from the first step on."""
        if self.before is not None:
            return self.before.buffered
        return any(
            slot.growth == "shared" and (slot.size("past") or size_of(slot.axes, fed.shape, "past") or 0) > 1
            for slot, fed in self.slots
        )

    @property
    def encoder(self) -> int | None:
        """Encoder states: by what the first step was fed."""
        if self.before is not None and self.before.encoder is not None:
            return self.before.encoder
        for port, fed in self.ports("encoder_states", "encoder_mask"):
            size = size_of(port.axes, fed.shape, "encoder")
            if size is not None:
                return size
        made = (size_of(slot.axes, fed.shape, "encoder") for slot, fed in self.slots if slot.filled_in == "encode")
        return next((size for size in made if size), None)

    @property
    def capacity(self) -> int | None:
        """Tokens that the smallest buffer holds that was fed."""
        static = (slot.growth in ("static", "delta") and slot.carry != "extend" for slot, _ in self.slots)
        axis: Axis = "past" if self.buffered else "capacity"
        fed = [
            size_of(slot.axes, tensor.shape, axis)
            for (slot, tensor), counts in zip(self.slots, static, strict=True)
            if counts or (self.buffered and slot.growth == "shared")
        ]
        return min((size for size in fed if size is not None), default=None)

    @property
    def sizes(self) -> dict[Axis, int | None]:
        """What each axis of an input counts in this step; None where it is not known."""
        batch, new, past = self.batch, self.new, self.past
        return {
            "batch": batch,
            "batch_codebooks": batch * self.contract.codebooks,
            "batch_heads": batch * self.contract.heads if self.contract.heads else None,
            "new": new,
            "past": past,
            "total": past + new,
            "encoder": self.encoder,
        }

    def values(self, name: str) -> Array | None:
        """What an input was fed, if the trace has its values; else it is noted that they were wanted."""
        fed = self.step.fed.get(name)
        if fed is not None and fed.has_values:
            return fed.array()
        if fed is not None:
            self.blind[name] = None
        return None

    @property
    def number(self) -> int:
        """The number of the step in the trace."""
        return self.step.number


def first_length(moment: Moment) -> int:
    """The length that the pasts which must grow are fed with."""
    growing = {slot.past for slot in moment.contract.growing}
    sizes = (size_of(slot.axes, fed.shape, "past") for slot, fed in moment.slots if slot.past in growing)
    return next((size for size in sizes if size is not None), 0)


def size_of(axes: Sequence[Axis], shape: Sequence[int], axis: Axis) -> int | None:
    """The size of an axis, if the tensor has it and the rank that the contract says."""
    return shape[axes.index(axis)] if axis in axes and len(axes) == len(shape) else None


def shown(names: Iterable[str], fed: dict[str, Recorded] | Moment) -> str:
    """Inputs with their types, at most three: `input_ids int64[1, 3], ...`."""
    tensors = fed.step.fed if isinstance(fed, Moment) else fed
    listed = list(names)
    text = ", ".join(f"{name} {tensors[name]}" for name in listed[:3] if name in tensors)
    return text + (f", and {len(listed) - 3} more" if len(listed) > 3 else "")


def tokens(count: int) -> str:
    """`1 token`, `3 tokens`."""
    return f"{count} token{'s' * (count != 1)}"
