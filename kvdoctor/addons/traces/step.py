"""One step of a trace in its sequence: what the contract makes of its sizes. numpy only."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field, replace
from functools import partial
from typing import Literal

import numpy as np

from kvdoctor.addons.traces.recorded import TraceStep, TraceTensor, same_values
from kvdoctor.contract import Axis, CacheContract, Dim, Graph, PhaseName, Port, Role, Slot
from kvdoctor.decode.calls import Answer, Array, Past, Scenario
from kvdoctor.decode.feeds import FeedBuilder
from kvdoctor.records import record

TOKENS: tuple[Role, ...] = ("token_ids", "embeddings", "token_and_position")

_OfInputs = Literal[
    "input-missing", "input-unknown", "wrong-type", "wrong-rank", "wrong-size", "batch-changes", "setting"
]
_OfCalls = Literal["cached-too-early", "cached-too-late", "cache-dropped", "all-ids-with-cache", "capacity-exceeded"]
_OfPasts = Literal[
    "past-not-empty", "past-stale", "past-length", "past-differs", "rows-disagree", "placeholder-fed-back"
]
_OfStates = Literal["cross-cache-replaced", "slots-crossed", "encoder-missing", "encoder-changes", "state-adopted"]
_OfNumbers = Literal["mask-length", "mask-values", "positions", "counter", "token-unknown"]
Kind = _OfInputs | _OfCalls | _OfPasts | _OfStates | _OfNumbers
"""The ways in which a step breaks the contract."""


@record
class ContractViolation:
    """How a step breaks the contract: the inputs, what they should have been and were, and the fix.

    `graph_returned` marks a present that is not as the graph promises and was fed back unchanged: the loop is plain
    and the graph at fault. `suspected`: shapes alone cannot tell it from a right loop. `mild`: a graph may not even
    read the input, so that later inputs are checked as well. `hidden` is the one token id that a mask leaves out inside
    a prompt, and never shows.
    """

    kind: Kind
    inputs: tuple[str, ...]
    declared: str
    observed: str
    cause: str
    advice: str
    graph_returned: str | None = None
    suspected: str | None = None
    mild: bool = False
    hidden: int | None = None


@record
class SequenceState:
    """What the steps of a sequence so far leave to the next. Lengths in tokens.

    `filled` is the right value of each slot that is held, by the name of its past; `count` the steps of the sequence;
    `ids` all token ids so far, where they are known. `buffered`: slots that could grow are fed as buffers. `earlier`
    are some steps before the last, the newest first.
    """

    first: TraceStep
    last: TraceStep
    phase: PhaseName
    tokens: int
    new: int
    batch: int
    count: int
    encoder: int | None
    filled: dict[str, TraceTensor]
    ids: Array | None = None
    buffered: bool = False
    earlier: tuple[TraceStep, ...] = ()


@record(slots=False)
class StepContext:
    """One step, the contract it is compared with, and what is known of the steps around it.

    `blind` collects inputs whose values would have been asked for and are not in the trace.
    """

    contract: CacheContract
    phase: PhaseName
    step: TraceStep
    before: SequenceState | None = None
    encoded: TraceStep | None = None
    following: TraceStep | None = None
    blind: dict[str, None] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The graph that was called."""
        return self.contract.graph(self.phase)

    def ports(self, *roles: Role) -> Iterator[tuple[Port, TraceTensor]]:
        """The inputs of some roles that were fed."""
        for port in self.graph.inputs:
            if port.role in roles and port.name in self.step.fed:
                yield port, self.step.fed[port.name]

    @property
    def slots(self) -> Iterator[tuple[Slot, TraceTensor]]:
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

    def batch_of(self, axes: tuple[Axis, ...], fed: TraceTensor) -> int | None:
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


def first_length(moment: StepContext) -> int:
    """The length that the pasts which must grow are fed with."""
    growing = {slot.past for slot in moment.contract.growing}
    sizes = (size_of(slot.axes, fed.shape, "past") for slot, fed in moment.slots if slot.past in growing)
    return next((size for size in sizes if size is not None), 0)


def size_of(axes: Sequence[Axis], shape: Sequence[int], axis: Axis) -> int | None:
    """The size of an axis, if the tensor has it and the rank that the contract says."""
    return shape[axes.index(axis)] if axis in axes and len(axes) == len(shape) else None


def misfits(due: Sequence[Dim], tensor: TraceTensor) -> bool:
    """Whether a tensor has another rank or size; sizes that are no numbers are any."""
    return len(due) != len(tensor.shape) or any(
        isinstance(size, int) and size != got for size, got in zip(due, tensor.shape, strict=True)
    )


def list_inputs(names: Iterable[str], fed: dict[str, TraceTensor] | StepContext) -> str:
    """Inputs with their types, at most three: `input_ids int64[1, 3], ...`."""
    tensors = fed.step.fed if isinstance(fed, StepContext) else fed
    listed = list(names)
    text = ", ".join(f"{name} {tensors[name]}" for name in listed[:3] if name in tensors)
    return text + (f", and {len(listed) - 3} more" if len(listed) > 3 else "")


def tokens(count: int) -> str:
    """`1 token`, `3 tokens`."""
    return f"{count} token{'s' * (count != 1)}"


MOST_ROWS = 64
"""Rows of a batch that are looked for one by one: more beams than that nobody has."""


@record
class ExpectedPast:
    """The shape (None: not known), the value where the trace has it, and where it comes from, as text."""

    shape: tuple[int | None, ...]
    value: TraceTensor | None
    words: str


def expect_past(slot: Slot, moment: StepContext) -> ExpectedPast:
    """Say what a past is due to be."""
    before = moment.before
    if before is None:
        return _expect_first_past(slot, moment)
    if slot.carry == "hold" or slot.present is None:
        value, words = before.filled.get(slot.past), f"{slot.filled_by} of step {before.first.number}, held"
        if slot.filled_in == "encode":
            words = f"{slot.filled_by} of the encoder graph, held"
        elif slot.filled_by is None:
            words = f"what step {before.first.number} was fed, held"
        known = _contract_shape(slot, moment, None) if value is None else _shape_for_batch(value, slot, moment)
        return ExpectedPast(known, value, words)
    source = slot.filled_by if before.phase == "prefill" else slot.present
    got = before.last.got.get(source or "")
    words = f"{source} as step {before.last.number} returned it"
    at = slot.length_axis
    if slot.carry == "feed-back" or at is None:
        if got is None or len(got.shape) != len(slot.axes):
            return ExpectedPast(_contract_shape(slot, moment, _count_tokens(slot, moment)), None, words)
        return ExpectedPast(_shape_for_batch(got, slot, moment), got, words)
    return _expect_carried_past(slot, moment, before, got, f"{words}, by the rule {slot.carry}")


def _expect_first_past(slot: Slot, moment: StepContext) -> ExpectedPast:
    if slot.filled_in == "encode" and slot.filled_by is not None:
        made = moment.encoded.got.get(slot.filled_by) if moment.encoded is not None else None
        return ExpectedPast(_contract_shape(slot, moment, None), made, f"{slot.filled_by} of the encoder graph")
    words = {"empty": "a past of length 0", "dummy": "a past of length 1, masked", "zeros": "zeros"}
    length = {"empty": 0, "dummy": 1}.get(slot.first) if "past" in slot.axes and not moment.buffered else None
    shape = _contract_shape(slot, moment, length)
    if slot.first == "empty" and slot.kind == "cross-attention":  # the graph fills it in this call
        shape = tuple(0 if axis == "encoder" else size for axis, size in zip(slot.axes, shape, strict=True))
    return ExpectedPast(shape, None, words.get(slot.first, "anything"))


def _expect_carried_past(
    slot: Slot, moment: StepContext, before: SequenceState, got: TraceTensor | None, words: str
) -> ExpectedPast:
    """Where a past is made of the past before and the present's rows."""
    at, past = slot.length_axis, before.last.fed.get(slot.past)
    assert at is not None  # noqa: S101 - such a rule is one of lengths
    rows = got.shape[at] if got is not None and at < len(got.shape) else None
    had = past.shape[at] if past is not None and at < len(past.shape) else None
    lengths = {
        "append": None if rows is None else (had or 0) + rows,
        "drop-oldest": None if rows is None else rows - 1,
        "extend": None if rows is None else rows + moment.new,
    }
    length = lengths.get(slot.carry, had)
    value = None
    known = got is not None and got.has_values and past is not None and past.has_values
    if known and past is not None and got is not None and slot.carry != "extend":
        shape = tuple(length if axis == at and length is not None else size for axis, size in enumerate(past.shape))
        value = TraceTensor(slot.dtype, shape, partial(_carry_past, slot, moment, past, got))
    return ExpectedPast(_contract_shape(slot, moment, length), value, words)


def _carry_past(slot: Slot, moment: StepContext, past: TraceTensor, got: TraceTensor) -> Array:
    """The next past as kvdoctor's own loop makes it."""
    before = moment.before
    assert before is not None  # noqa: S101 - made for later steps only
    alone = replace(moment.contract, slots=(replace(slot, present="present"),))
    builder = FeedBuilder(alone, Scenario(batch=before.batch))
    answer = Answer({"present": got}, "", before.tokens - before.new, before.new)
    carried = builder.carry(Past({slot.past: past.array()}, before.tokens), answer, "held")[slot.past]
    return carried if isinstance(carried, np.ndarray) else carried.array()


def _count_tokens(slot: Slot, moment: StepContext) -> int | None:
    """The length of a past whose source is not in the trace, by counting tokens."""
    before = moment.before
    if before is None or slot not in moment.contract.growing:
        return None
    if before.buffered and slot.growth == "shared":
        fed = before.last.fed.get(slot.past)
        return size_of(slot.axes, fed.shape, "past") if fed is not None else None
    return before.tokens


def _contract_shape(slot: Slot, moment: StepContext, length: int | None) -> tuple[int | None, ...]:
    """The shape by the contract, `length` long where the slot counts tokens."""
    sizes, shape = moment.sizes, list[int | None]()
    for axis, declared in zip(slot.axes, slot.shape, strict=True):
        size = declared if isinstance(declared, int) else None
        if axis == "past" or (axis == "capacity" and length is not None):
            size = length  # a number on this axis may be meant for another use of the graph
        elif axis in ("batch", "batch_heads", "encoder") and size is None:
            size = sizes.get(axis)
        shape.append(size)
    return tuple(shape)


def _shape_for_batch(value: TraceTensor, slot: Slot, moment: StepContext) -> tuple[int | None, ...]:
    known: dict[Axis, int | None] = {a: moment.sizes[a] for a in slot.axes if a in ("batch", "batch_heads")}
    if len(value.shape) != len(slot.axes) or moment.before is None or moment.batch == moment.before.batch:
        return value.shape
    return tuple(known.get(axis, size) for axis, size in zip(slot.axes, value.shape, strict=True))


def holds_values_of(slot: Slot, fed: TraceTensor, due: ExpectedPast, moment: StepContext) -> bool:
    """Whether a past holds what is due, row by row in any order: beams are picked and repeated.

    Tensors without elements say nothing.
    """
    if (sampled := compare_samples(slot, fed, due, moment)) is not None:
        return sampled
    if due.value is None or not due.value.has_values or not fed.has_values or fed.empty:
        return False
    if same_values(take_readable(slot, fed.array(), moment), take_readable(slot, due.value.array(), moment)):
        return True
    found = match_rows(slot, fed, due, moment) if moment.before is not None else ()
    return bool(found) and all(found)


def compare_samples(slot: Slot, fed: TraceTensor, due: ExpectedPast, moment: StepContext) -> bool | None:
    """Whether a past has the sampled values of what is due; None where samples cannot tell.

    Other values say nothing where rows may be reordered, or where a buffer has arbitrary values after its tokens.
    """
    if due.value is None or fed.sample is None or due.value.sample is None or fed.shape != due.value.shape:
        return None
    if same_values(fed.sample, due.value.sample):
        return True
    whole = slot.growth not in ("static", "delta", "shared")
    return False if whole and moment.batch == 1 and not moment.buffered else None


def match_rows(slot: Slot, fed: TraceTensor, due: ExpectedPast, moment: StepContext) -> tuple[frozenset[int], ...]:
    """For each row of a past the rows of what is due that it may be; nothing where that cannot be decided."""
    if due.value is None or not due.value.has_values or not fed.has_values or fed.empty or due.value.empty:
        return ()
    mine, theirs = take_readable(slot, fed.array(), moment), take_readable(slot, due.value.array(), moment)
    axis = slot.axes.index("batch") if "batch" in slot.axes else None
    if axis is None or mine.ndim != theirs.ndim or not 1 <= theirs.shape[axis] <= MOST_ROWS:
        return ()
    if mine.shape[axis] > MOST_ROWS or max(mine.shape[axis], theirs.shape[axis]) == 1:
        return ()
    rows = [np.take(theirs, [row], axis) for row in range(theirs.shape[axis])]
    picked = (np.take(mine, [row], axis) for row in range(mine.shape[axis]))
    return tuple(frozenset(i for i, other in enumerate(rows) if same_values(row, other)) for row in picked)


def take_readable(slot: Slot, values: Array, moment: StepContext) -> Array:
    """The entries of a past that a step may read: entries of a buffer after the tokens have arbitrary values."""
    at = slot.length_axis
    if at is None or at >= values.ndim or slot.growth not in ("static", "delta") or moment.before is None:
        return values
    if slot.carry in ("write", "feed-back") and slot.axes[at] == "capacity":
        return np.take(values, range(min(moment.before.tokens, values.shape[at])), axis=at)
    return values
