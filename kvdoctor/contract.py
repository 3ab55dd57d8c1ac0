"""The cache contract: what a decode loop must feed, feed back and hold. Standard library only.

A contract describes a *stack*, the graphs that decode together, and says how to drive it. Layouts differ in its
values alone, so experiments, checks and reports hold no code for one exporter.

Shapes are written as `float[batch, kv_heads, past, head_dim]`: the names below are what an axis can count.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from kvdoctor.records import record

Dim = int | str | None
"""A declared size: a number, a symbolic name, or None where the file declares nothing."""

RowAxis = Literal["batch", "batch_heads", "batch_codebooks", "codebooks", "batch_new"]
LengthAxis = Literal["new", "past", "total", "capacity", "encoder", "encoder_input"]
WidthAxis = Literal["kv_heads", "head_dim", "hidden", "vocabulary", "layers", "parts", "channels", "state"]
Axis = Literal[RowAxis, LengthAxis, WidthAxis, "blocks", "block", "fixed"]
"""What an axis counts.

new + past = total, and capacity, the length of a buffer of fixed size, in tokens; `encoder` counts encoder states;
`batch_heads` is batch times heads, `batch_new` batch times new tokens, `codebooks` the streams of tokens that make one
sequence of audio, `batch_codebooks` batch times these; `parts` holds key and value, `layers` all layers of a stacked
cache; `channels` and `state` are the widths of convolution and recurrent states; `blocks` of `block` tokens make a
paged cache.
"""

TokenRole = Literal["token_ids", "token_and_position", "embeddings"]
MaskRole = Literal["attention_mask", "padding_mask", "additive_mask"]
PositionRole = Literal["position_ids", "rotary_cos", "rotary_sin", "cache_position", "write_index"]
CountRole = Literal[
    "past_length", "total_length", "last_index", "last_new_index", "new_length", "batch_size", "row_index"
]
SwitchRole = Literal["has_past", "first_call", "branch_switch", "logits_to_keep"]
EncoderRole = Literal["encoder_mask", "encoder_states", "encoder_input", "encoder_length", "features"]
CallerRole = Literal["setting", "condition", "token_states", "unused", "beam_input", "block_table", "scale", "adapter"]
CarriedRole = Literal["past", "present", "logits", "next_token", "auxiliary"]
Role = Literal[TokenRole, MaskRole, PositionRole, CountRole, SwitchRole, EncoderRole, CallerRole, CarriedRole]
"""The part a port plays.

`padding_mask` is a mask in which 1 hides an entry; `cache_position` is the arange past..total, `write_index` the past
length as the place to write at; `last_index` is total - 1 (`seqlens_k`), `last_new_index` new - 1; `row_index` is the
arange 0..batch (a beam search that reorders nothing), `has_past` whether there is a past, `first_call` whether there is
none; `token_states` are hidden states of another model, one row for each new token (a draft head), and a `condition` is
what the caller has for a whole sequence (an encoder frame, a speaker vector); `features` of images or audio go into an
embedding graph, none of them where all tokens are text; a `setting` is a part of the configuration that is fed, or a
row that the caller chooses for all tokens (a language, a speaker, a kind), the number fed here in `value`; an `adapter`
is a matrix of LoRA, zeros without an adapter; nothing reads what is `unused`, which has to be fed all the same.
"""

StateKind = Literal["conv-state", "recurrent-state", "counter"]
SlotKind = Literal["self-attention", "cross-attention", "hidden-memory", "encoder-states", StateKind]
"""What a slot keeps.

Keys and values of the tokens so far, or of the encoder states; `hidden-memory` keeps hidden states from which keys and
values are computed anew; `encoder-states` are made by the first step and held; a convolution keeps its last inputs,
a recurrent or state space layer its state; a `counter` counts the tokens so far.
"""

Part = Literal["key", "value", "key-value", "latent", "state", "key-scale", "value-scale"]
"""What a slot holds of its layer.

`key-value` is both in one tensor, `state` what is neither; `key-scale` and `value-scale` are the scales of keys and
values that are stored in 8 or 4 bits.
"""

Growth = Literal["grow", "static", "shared", "ring", "delta", "replace", "constant", "paged"]
"""What a step does to the length of a slot.

grow: present = past + new. static: a buffer of fixed capacity, written in place. shared: grows, or is a buffer when
fed as one (GroupQueryAttention decides by the length it is fed). ring: fixed capacity, the oldest entries leave.
delta: only the new entries are returned. replace: a state of fixed size is returned anew. constant: never changes
after the first step. paged: blocks of a pool, addressed by a table.
"""

Carry = Literal["feed-back", "hold", "append", "write", "shift", "drop-oldest", "extend"]
"""What a right loop does to have the next past.

feed-back: the present. hold: the value it was first filled with. append: the past, then the present's rows.
write: the present's rows into the buffer at the past length. shift: the oldest rows out, the present's rows in at the
end. drop-oldest: the present without its first row. extend: the present and one row of zeros.
"""

First = Literal["empty", "dummy", "zeros", "encoder", "prefill", "ignored"]
"""What the first step feeds a slot.

empty: length 0. dummy: length 1, masked. zeros: a buffer or state of zeros. encoder: an output of the encoder graph.
prefill: nothing, another graph makes it. ignored: anything, the branch does not read it.
"""

Exactness = Literal["float", "float16", "bfloat16", "static-quantization", "dynamic-quantization", "int4-cache"]
"""The arithmetic of a graph. What is rounded to few bits on its way has a scale of its own, or one from all tokens."""

PhaseName = Literal["encode", "embed", "vision", "audio", "prefill", "decode", "generate"]
"""What a graph is run for: the encoder's states, the embeddings of new tokens, rows for the placeholders of images or
of audio among these, the first step, a later one, the whole loop by an operator (in the jobs of a worker alone)."""

DECODING: tuple[PhaseName, ...] = ("prefill", "decode")
"""The phases that take the cache or make it; what the others compute goes into these."""

SCALE_SUFFIX = "_scale"
"""What follows the name of stored values in the name of their scale: `past_key_values.0.key_scale`."""

OF_FEATURES: tuple[PhaseName, ...] = ("vision", "audio")
"""The phases that make rows for the places of placeholders among the embeddings."""

ITEM_BYTES = {
    "double": 8,
    "int64": 8,
    "float": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of the element types a cache is seen in."""


@record
class Port:
    """One input or output of a graph, with the part it plays. `value` is the number a `setting` is fed."""

    name: str
    dtype: str
    shape: tuple[Dim, ...] | None
    role: Role
    axes: tuple[Axis, ...] = ()
    value: float | None = None

    def dim(self, axis: Axis) -> Dim:
        """Give the declared size of an axis: a number or a name; None where none is declared."""
        if self.shape is None or axis not in self.axes or len(self.shape) != len(self.axes):
            return None
        return self.shape[self.axes.index(axis)]

    def size(self, axis: Axis) -> int | None:
        """Give the declared size of an axis where it is a number."""
        size = self.dim(axis)
        return size if isinstance(size, int) else None


@record
class Stage:
    """One file of a pipeline: the names of its inputs and outputs, each with the one that it has in the pipeline.

    An output of one stage that has the name of an input of a later one is handed on.
    """

    file: str
    inputs: dict[str, str]
    outputs: dict[str, str]


@record
class Graph:
    """One ONNX file of the stack, `file` relative to the model's folder.

    A pipeline is one graph of several files, its `stages`, which a call runs one after the other.
    """

    file: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    stages: tuple[Stage, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """The files that a call runs."""
        return tuple(stage.file for stage in self.stages) or (self.file,)

    def port(self, role: Role) -> Port | None:
        """Give the first port of that role, inputs before outputs, or None."""
        return next((port for port in (*self.inputs, *self.outputs) if port.role == role), None)

    def mapped(self, change: Callable[[Port], Port]) -> "Graph":
        """The graph with each port changed."""
        return replace(self, inputs=tuple(map(change, self.inputs)), outputs=tuple(map(change, self.outputs)))

    @property
    def declared_new_tokens(self) -> Dim:
        """The declared size of the axis of new tokens: a number or a name; None where none is declared."""
        port = self.port("token_ids") or self.port("embeddings")
        return port.dim("new") if port is not None else None


@record
class Phase:
    """Which graph serves a phase, and the value of the branch switch there (None where there is no switch)."""

    graph: str
    switch: bool | None = None


@record
class Slot:
    """One layer's key or value (or another state), seen as past and present.

    `layer` is None where one tensor stacks all layers, `part` says what it holds of the layer. `filled_by` is the
    output that first fills the slot, of the phase `filled_in`; `present` is the decode output that carries it on.
    `emptied` says that the decode graph itself returns a constant without elements under the present's name.

    `window` is how many tokens the layer's attention looks back over, by the graph or a config; `trimmed` says that the
    graph cuts old entries off, so that the length does not tell the tokens; `prepended` that new entries come first.

    The last seven are what dataflow proves, None where it does not tell. In the decode graph: `used_as` says whether
    the past is a key or a value to its attention, `used_at` which attention over such slots that is, counted from 0,
    `continues_as` the output that its content reaches, `takes_new` whether new tokens reach the present, `takes_mask`
    whether a mask reaches that of a state directly. Where the slot is first filled `made_as` and `made_at` say this.
    """

    kind: SlotKind
    layer: int | None
    part: Part
    dtype: str
    shape: tuple[Dim, ...]
    axes: tuple[Axis, ...]
    past: str
    present: str | None
    filled_by: str | None
    carry: Carry
    emptied: bool = False
    growth: Growth = "grow"
    first: First = "empty"
    filled_in: PhaseName = "prefill"
    window: int | None = None
    trimmed: bool = False
    prepended: bool = False
    used_as: Literal["key", "value", "key-value"] | None = None
    used_at: int | None = None
    continues_as: str | None = None
    takes_new: bool | None = None
    takes_mask: bool | None = None
    made_as: Literal["key", "value", "key-value"] | None = None
    made_at: int | None = None

    @property
    def is_given(self) -> bool:
        """Whether no graph makes the slot: the caller gives it once (a prefix that was tuned), and holds it."""
        return self.growth == "constant" and self.filled_by is None and self.kind == "self-attention"

    @property
    def length_axis(self) -> int | None:
        """The index of the axis that counts tokens or encoder states, None for a state without one."""
        return next((i for i, axis in enumerate(self.axes) if axis in ("past", "capacity", "encoder")), None)

    def size(self, axis: Axis) -> int | None:
        """Give the declared size of an axis where it is a number."""
        size = self.shape[self.axes.index(axis)] if axis in self.axes else None
        return size if isinstance(size, int) else None

    def sized(self, sizes: Mapping[Axis, int]) -> tuple[int, ...]:
        """Give its shape where open axes have these sizes, and all others 1."""
        return tuple(d if isinstance(d, int) else sizes.get(a, 1) for d, a in zip(self.shape, self.axes, strict=True))

    def bytes_per_position(self) -> int | None:
        """Bytes that one sequence position of one batch row takes; None where a size is not known."""
        counted = ("batch", "past", "capacity", "encoder")
        widths = [self.shape[i] for i, axis in enumerate(self.axes) if axis not in counted]
        numbers = [width for width in widths if isinstance(width, int)]
        if len(numbers) != len(widths) or self.dtype not in ITEM_BYTES:
            return None
        return math.prod(numbers) * ITEM_BYTES[self.dtype]


@record
class Features:
    """Rows that an encoder of images or audio makes, for the places of a placeholder token among the embeddings.

    `output` of the graph of `phase` has them, float[..., rows, hidden]. `token` is the id of the placeholder, `rows`
    the number of them for one image (or one audio clip), as `declared` says; None where no config gives it. A call
    takes so many `pieces` at once.
    """

    phase: PhaseName
    output: str
    token: int | None = None
    rows: int | None = None
    declared: str = ""
    pieces: int = 1


@record
class MissingPart:
    """Something that stands in the way of driving a stack, or is not as its name says: the subject, and the reason.

    `contradicts` says that the graph contradicts itself there; else it only leaves something open.
    """

    subject: str
    reason: str
    contradicts: bool = False


Basis = Literal["name", "declared", "dataflow", "type", "given"]
"""What speaks for a reading: a port's name, declared names of axes, its use in the graph, its type, or the caller."""


@record
class Reading:
    """One way to read a port: its role and its axes. `text` says what a loop feeds, or what comes back."""

    port: Port
    text: str
    basis: Basis


@record
class Ambiguity:
    """A port that the file allows more than one reading of, best first; the contract has the first one.

    `unknown` says that nothing in the file speaks for any of them, so that a run has to. `settled` says how the first
    one was settled; empty where it is open.
    """

    subject: str
    graph: str
    readings: tuple[Reading, ...]
    unknown: bool = False
    settled: str = ""


@record
class CacheContract:
    """How to drive one stack.

    `first_step` says what the first call gets: a past of length 0, the no-past branch of a merged decoder, or the
    graph without past of a pair. `exactness` is what the arithmetic of the graph allows two ways of computing the
    same logits to differ by: its weakest float type, or how it is quantized.
    `context_limit` is in tokens, from the side-car config; so are `heads`, the number of attention heads, where an axis
    counts batch times heads, and `codebooks`, the rows of tokens for each sequence. `contradictions` are promises of
    names that the dataflow refutes; the contract follows the dataflow. `missing` is empty for a contract that can be
    driven. `features` are rows for images and audio, which take the places of embeddings. `ambiguities` are ports with
    more than one reading, which runs settle. `ring` is the number of tokens after which buffers are full, where the
    graph then writes over the oldest entries: 0 where the loop chooses it, None where the graph may not.
    """

    layout: str
    graphs: dict[str, Graph]
    phases: dict[str, Phase]
    slots: tuple[Slot, ...]
    first_step: Literal["empty-past", "no-past-branch", "no-past-graph"]
    exactness: Exactness = "float"
    vocabulary: int | None = None
    context_limit: int | None = None
    heads: int | None = None
    codebooks: int = 1
    evidence: tuple[str, ...] = ()
    contradictions: tuple[MissingPart, ...] = ()
    missing: tuple[MissingPart, ...] = ()
    features: tuple[Features, ...] = ()
    ambiguities: tuple[Ambiguity, ...] = ()
    ring: int | None = None

    def with_ports(self, change: Callable[[Port], Port]) -> "CacheContract":
        """The contract with each input and output of its graphs changed."""
        return replace(self, graphs={name: graph.mapped(change) for name, graph in self.graphs.items()})

    def graph(self, phase: PhaseName) -> Graph:
        """Give the graph that serves a phase."""
        return self.graphs[self.phases[phase].graph]

    @property
    def has_known_names(self) -> bool:
        """Whether the graph's tensors have the names of a known exporter."""
        return not self.layout.startswith(("unnamed-", "torch-"))

    def of_kind(self, kind: str) -> tuple[Slot, ...]:
        """Give the slots of one kind, in layer order."""
        return tuple(slot for slot in self.slots if slot.kind == kind)

    @property
    def growing(self) -> tuple[Slot, ...]:
        """The slots whose past gets longer with each step, so that its length tells how many tokens it holds."""
        growing = (slot for slot in self.slots if slot.growth in ("grow", "shared", "delta") and not slot.trimmed)
        return tuple(slot for slot in growing if "past" in slot.axes)

    @property
    def frozen_past(self) -> int | None:
        """The length that the past of a slot which must grow is fixed at; None where none is a number."""
        return next((size for slot in self.growing if (size := slot.size("past")) is not None), None)

    @property
    def fixed_batch(self) -> int | None:
        """The number of sequences where a decoder graph takes one number only."""
        return self._fixed("batch")

    @property
    def capacity(self) -> int | None:
        """Tokens that the smallest buffer of fixed size holds; None where none is a number."""
        sizes = [slot.size("capacity") for slot in self.slots if slot.growth in ("static", "delta", "ring")]
        return min((size for size in sizes if size is not None), default=None)

    @property
    def usable_length(self) -> int | None:
        """Tokens that a sequence may have, by the config or by the smallest buffer; None where neither says."""
        limits = (self.context_limit, self.capacity)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def longest_sequence(self) -> int | None:
        """Tokens that a sequence may have at most: one goes on in rings whose entries keep their places."""
        buffers = [slot for slot in self.slots if slot.growth in ("static", "delta", "ring")]
        if self.ring is None or any(slot.growth != "static" for slot in buffers):
            return self.usable_length
        sizes = (size for slot in buffers if (size := slot.size("capacity")) != self.ring)
        return min((size for size in (self.context_limit, *sizes) if size is not None), default=None)

    @property
    def encoder_length(self) -> int | None:
        """The number of encoder states where a decoder graph takes one number only."""
        return self._fixed("encoder")

    def _fixed(self, axis: Axis) -> int | None:
        """The number that inputs of decoders declare for an axis; that of a past may be meant for another use."""
        graphs = (self.graphs[served.graph] for phase, served in self.phases.items() if phase in DECODING)
        for port in (port for graph in graphs for port in graph.inputs):
            if (port.role != "past" or axis == "batch") and (size := port.size(axis)) is not None:
                return size
        return None

    @property
    def held(self) -> tuple[Slot, ...]:
        """The slots that a right loop holds."""
        return tuple(slot for slot in self.slots if slot.carry == "hold")

    @property
    def new_tokens(self) -> int | None:
        """The number of new tokens that the first step takes where it is fixed; None where any number will do."""
        return self._fixed_new_tokens("prefill")

    @property
    def step_tokens(self) -> int | None:
        """The number of new tokens that a later step takes where it is fixed."""
        return self._fixed_new_tokens("decode")

    def _fixed_new_tokens(self, phase: PhaseName) -> int | None:
        graph = self.graph(phase)
        tokens = graph.port("token_ids")
        if graph.port("token_and_position") is not None or (tokens is not None and "new" not in tokens.axes):
            return 1
        size = graph.declared_new_tokens
        return size if isinstance(size, int) else None

    @property
    def takes_tokens(self) -> bool:
        """Whether a decode step takes tokens or their embeddings, or gives logits: else it is a stage or a stream."""
        roles: tuple[Role, ...] = ("token_ids", "token_and_position", "embeddings", "logits", "next_token")
        return any(self.graph("decode").port(role) is not None for role in roles)

    @property
    def no_decoder(self) -> str | None:
        """Why the stack is no decoder with a KV cache, by its inputs, outputs and states; None where it may be one."""
        if not self.takes_tokens:
            return "it takes no tokens and returns no logits (one operator, a stage of a pipeline, a decoder of frames)"
        decode, kept = self.graph("decode"), {slot.kind for slot in self.slots}
        if not kept or not kept <= {"recurrent-state", "conv-state", "counter"}:
            return None
        if decode.port("logits") is None and decode.port("next_token") is None:
            return "it has recurrent states and returns no logits (the prediction network of a transducer)"
        return None

    @property
    def last_logits_only(self) -> bool:
        """Whether a call with several new tokens gives the logits of the last one alone."""
        port = self.graph("prefill").port("logits")
        if port is None or port.shape is None or self.new_tokens is not None:
            return False
        return "batch_new" not in port.axes and ("new" not in port.axes or port.size("new") == 1)

    @property
    def has_encoder_states(self) -> bool:
        """Whether the decoder takes the states of an encoder."""
        return any(graph.port("encoder_states") for graph in self.graphs.values())

    @property
    def has_encoder(self) -> bool:
        """Whether the model has an encoder: of its own, or one whose states or keys and values the decoder takes."""
        return self.has_encoder_states or bool(self.of_kind("cross-attention")) or "encode" in self.phases


def with_reading(contract: CacheContract, ambiguity: Ambiguity, reading: Reading) -> CacheContract:
    """The contract under another reading of a port."""
    graph = contract.graphs[ambiguity.graph].mapped(lambda one: reading.port if one.name == ambiguity.subject else one)
    return replace(contract, graphs={**contract.graphs, ambiguity.graph: graph})


def describe(dtype: str, shape: Sequence[Dim] | None) -> str:
    """Write a tensor type as the field does: `float[batch, 4, past, 8]`."""
    if shape is None:
        return f"{dtype}[no declared shape]"
    return f"{dtype}[{', '.join('?' if size is None else str(size) for size in shape)}]"
