"""The plan of a decode loop: what each call is fed from where, and what the loop keeps of it. In no language.

A plan is made from a cache contract once. `contract.json` holds this plan, and every program reads it, so that a loop
has no rule that the contract does not have; nothing is left to be guessed from names when the loop runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Literal

from kvdoctor.contract import Axis, Carry
from kvdoctor.errors import KvdoctorError
from kvdoctor.records import record

Dim = int | Axis
"""The size of an axis: a number, or what it counts."""

Terms = Mapping[str, int | float]
"""A sum: each named number times its factor.

In every call: one, batch, batch_heads, new, past, total (past and new), capacity, and the sizes that `CallPlan.sizes`
finds. In a row of an input: columns (the size of its last axis), query (its place on the axis before that one),
sequence (its place on the axis of sequences), padding (the entries on the left of that sequence that are no tokens).
"""

SOURCE = "source"
"""The value that the caller gives to `encode`. Others are `cache`, `encoder` or `embed` with the name of a tensor."""

MANY = (1 << 31) - 1
"""In place of a limit that nothing sets."""
FLOATS = ("float", "float16")
INTEGERS = ("int64", "int32")


class NoLoop(KvdoctorError):
    """No loop can be written for a model: the message says why, and what to do."""


class CannotBuild(KvdoctorError):
    """A project could not be built here, which says nothing about the loop: the message has the reason."""


@record
class Input:
    """One input of a call: a value that is there (`value`), or one that is made row by row, along its last axis.

    A row has `inside` from the column `begin` to before the column `end`, both moved into the row, and `outside`
    elsewhere; `step` is added for each column before. What `copy` names is then written over its first columns, where
    it is not longer than the row: the new tokens of the sequence, or the caller's mask of its source. Where the last
    axis is that of the sequences (`batch_axis`), each entry is a row.
    """

    name: str
    dtype: str
    dims: tuple[Dim, ...]
    batch_axis: int | None = None
    value: str | None = None
    copy: Literal["tokens", "mask"] | None = None
    begin: Terms = field(default_factory=dict)
    end: Terms = field(default_factory=lambda: {"columns": 1})
    inside: Terms = field(default_factory=dict)
    outside: float = 0
    step: int = 0


@record
class Take:
    """An output of a call that becomes a value, by a rule along an axis or as it is; `dims` is its shape, if known."""

    output: str
    value: str
    carry: Carry
    axis: int | None
    dtype: str
    dims: tuple[Dim, ...] | None


@record
class SizeOf:
    """The size of an axis of a value, in units of `each` entries."""

    value: str
    axis: int
    each: int = 1


@record
class CallPlan:
    """One kind of call: the file it goes to, its inputs without the cache, and the parts of the cache that it takes.

    `logits` is the output of which the next token is made, `logits_type` its element type, `logits_dims` its shape.
    `outputs` are all outputs that the loop uses, in the order of the graph; `takes` are those that become values.
    `sizes` says where sizes are found that only values have.
    """

    file: str
    inputs: tuple[Input, ...]
    pasts: tuple[str, ...]
    outputs: tuple[str, ...]
    logits: str | None = None
    logits_type: str = "float"
    logits_dims: tuple[Dim, ...] | None = None
    takes: tuple[Take, ...] = ()
    sizes: Mapping[str, SizeOf] = field(default_factory=dict)


@record
class SlotPlan:
    """One tensor of the cache.

    Attributes:
        past: The input that it is fed to.
        present: The output of a decode step that carries it on; None where it keeps its first value.
        made: The output that first fills it, of the encoder where `by_encoder`, else of the first call.
        dims: Its shape.
        carry: What becomes of the present (`kvdoctor.contract.Carry`); `hold` keeps the first value.
        batch_axis: The axis of the sequences; None where it has none. One entry of it is `heads` rows.
        length_axis: The axis of tokens or encoder states; None for a state of fixed size.
        rewinds: How it goes back to an earlier length: cut there, left as it is, or not at all.
        heads: Entries of the batch axis that belong to one sequence.
        zeros: The shape of its first value, in sequences and room, where the loop makes it; else None.
    """

    past: str
    present: str | None
    made: str | None
    by_encoder: bool
    dtype: str
    dims: tuple[Dim, ...]
    carry: Carry
    batch_axis: int | None
    length_axis: int | None
    rewinds: Literal["cut", "stays", "impossible"]
    heads: int = 1
    zeros: tuple[Dim, ...] | None = None

    @property
    def value(self) -> str:
        """The name of its value."""
        return f"cache {self.past}"

    @property
    def copies(self) -> bool:
        """Whether the next value is computed by the loop; else it is passed on without being looked at."""
        return self.carry not in ("feed-back", "hold")


@record
class LoopPlan:
    """All that a loop does: its calls and its cache.

    Attributes:
        model: The name of the model's folder or file, for texts.
        layout: The layout of the stack (docs/layouts.md).
        encode: The encoder's call; None without an encoder graph.
        embed: The call that makes embeddings of new tokens, before each call that takes them; None where none does.
        prefill: The first call.
        decode: The calls after it.
        slots: The cache.
        vocabulary: Entries of a row of logits; None where the graph does not say.
        context_limit: The most tokens of the cache; None where nothing says.
        longest: The most tokens of a sequence, where those that do not fit are written over the oldest; else None.
        one_token: Whether every call takes one new token.
        batch: The number of sequences where a graph takes one number only.
        capacity_is_chosen: Whether the caller chooses the length of the buffers.
        pads: Whether prompts of unequal length may be padded on the left.
        chunks: Whether a step on top of a cache may take several new tokens.
        rewindable: Whether the sequences may be rewound, where the cache allows it.
        reorderable: Whether sequences may be reordered, where there can be several.
        placeholders: Token ids whose places are for images or audio, which a program here does not take.
    """

    model: str
    layout: str
    encode: CallPlan | None
    embed: CallPlan | None
    prefill: CallPlan
    decode: CallPlan
    slots: tuple[SlotPlan, ...]
    vocabulary: int | None
    context_limit: int | None
    longest: int | None
    one_token: bool
    batch: int | None
    capacity_is_chosen: bool
    pads: bool
    chunks: bool = True
    rewindable: bool = True
    reorderable: bool = True
    placeholders: tuple[int, ...] = ()

    @property
    def calls(self) -> tuple[CallPlan, ...]:
        """Those of encode, embed, prefill and decode that the model has."""
        return tuple(call for call in (self.encode, self.embed, self.prefill, self.decode) if call is not None)

    @property
    def files(self) -> tuple[str, ...]:
        """The files, each once."""
        return tuple(dict.fromkeys(call.file for call in self.calls))

    @property
    def dtypes(self) -> frozenset[str]:
        """The element types of all tensors that the loop makes or reads."""
        made = {one.dtype for call in self.calls for one in call.inputs} | {slot.dtype for slot in self.slots}
        return frozenset(made | {call.logits_type for call in (self.prefill, self.decode)})

    @property
    def source(self) -> Input | None:
        """What the caller gives with the tokens: the input of the encoder, or its states where no graph makes them."""
        return next((one for call in self.calls for one in call.inputs if one.value == SOURCE), None)

    @property
    def source_axis(self) -> int:
        """The axis of the source that is its length."""
        dims = self.source.dims if self.source else ()
        return next((axis for axis, dim in enumerate(dims) if dim in ("encoder_input", "encoder")), len(dims) - 1)

    @property
    def rewinds(self) -> bool:
        """Whether every part of the cache can go back to an earlier length."""
        return self.rewindable and all(slot.rewinds != "impossible" for slot in self.slots)

    @property
    def reorders(self) -> bool:
        """Whether sequences can change places, as a beam search needs it."""
        return self.reorderable and self.batch is None


def nul_in(plan: LoopPlan) -> str | None:
    """The first name of a model that has a NUL, which ends a name in the C interface of the runtime."""
    return next((name for name in list_names(plan) if "\0" in name), None)


def refuses_in_c(plan: LoopPlan) -> str | None:
    """Why a binding that stands on the C interface of the runtime cannot serve a plan; None if it can."""
    if (name := nul_in(plan)) is not None:
        return f"a name of the model has a NUL ({name[:40]!r}), which ends a name in the C interface of the runtime"
    for call in (plan.prefill, plan.decode):
        if call.logits_type not in ("float", "float16", "bfloat16", "double"):
            return f"the logits have element type {call.logits_type}, for which there is no loop yet"
    return None


def list_names(plan: LoopPlan) -> Iterator[str]:
    """The files, inputs and outputs that a program names."""
    for call in plan.calls:
        yield call.file
        yield from (one.name for one in call.inputs)
        yield from call.pasts
        yield from call.outputs
    for slot in plan.slots:
        yield from (name for name in (slot.past, slot.present, slot.made) if name is not None)
