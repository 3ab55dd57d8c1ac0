"""Coupled feeds: mask length = past + new, positions offset by the past, everything from one seed. numpy only.

Filling each input on its own is what makes generic runners fail healthy decoders; here every size follows from the
contract and one `Scenario`. Sizes of the default scenario differ pairwise, since equal sizes hide mistakes.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from kvdoctor.contract import Axis, CacheContract, Graph, PhaseName, Port, Slot
from kvdoctor.samples import Samples

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

HIDDEN = -1e4
"""What an additive mask adds to the scores of entries that must not be seen; within the range of float16."""

ROTARY_BASE = 10_000.0
SPARE = 5
"""Tokens that a buffer whose capacity is not declared gets beyond those of the scenario."""


class Value(Protocol):
    """A tensor as the runtime holds it; the array is made only when asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    def array(self) -> Array: ...  # noqa: D102


class Past(dict[str, "Value | Array"]):
    """Past inputs by name, and how many tokens they hold."""

    def __init__(self, values: "Mapping[str, Value | Array] | None" = None, length: int = 0) -> None:
        super().__init__(values or {})
        self.length = length


Loop = Literal["plain", "held"]

Way = Literal["run", "io-binding", "basic", "off"]
"""How a call is run: plainly, with bound inputs and outputs, or at a lower level of graph optimisation."""


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Call:
    """What an experiment wants run: a phase and its feeds; past and new in tokens.

    `expected` float[batch, n, vocabulary] is what the logits of the last n positions are held against. A `control`
    must differ from it, and names what was `spoilt`. The answer to a `reference` is kept for equal feeds. A `timing`
    is repeated, and its median kept under `label`. A `noise` call measures what the graph's own arithmetic makes of
    splitting a sequence, without a cache. A `probe` is answered without outputs where it fails, and is not on record.
    `via` names another way to run the same file.
    `slots` are tensors of a cache by the name of the present that is held against them.
    """

    phase: PhaseName
    feeds: "Mapping[str, Value | Array]"
    past: int
    new: int
    expected: Array | None = None
    kind: Literal["step", "reference", "control", "timing", "noise", "probe"] = "step"
    label: str = ""
    via: Way = "run"
    slots: "Mapping[str, Value | Array]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
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
        """float[batch, new, vocabulary]; where a graph gives only the last token's it may leave their axis out."""
        logits = self.outputs[self.logits_name].array()
        if logits.ndim == 1:
            return logits.reshape(1, 1, -1)
        return logits.reshape(logits.shape[0], 1, -1) if logits.ndim in (2, 4) else logits


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the encoder gave: its states float[batch, encoder, hidden], and all its outputs by name.

    `fed` is what it was fed, by name; empty where no encoder was run and its states are made up.
    """

    states: Array | None = None
    outputs: Mapping[str, Array] = field(default_factory=dict)
    fed: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Deal:
    """A contract with the sizes, tokens and encoder outputs of one scenario: makes all calls.

    `tokens` int64[batch * codebooks, total] are the whole sequence; `padding` says how many of them, row by row, are no
    words but padding on the left, to be masked and not to be counted; `encoder_padding` how many encoder states are
    none, on the right. `samples` are what the user gives in place of made-up tokens and encoder inputs. `drawn` are the
    rows of an earlier deal that this one has, where it has not all of them in their order.
    """

    contract: CacheContract
    scenario: Scenario
    encoded: Encoded = Encoded()
    tokens: Array = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    padding: tuple[int, ...] = ()
    encoder_padding: tuple[int, ...] = ()
    samples: Samples = field(default_factory=Samples)
    drawn: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.tokens.size:
            shape = (self.scenario.batch * self.contract.codebooks, self.scenario.total)
            made = _tokens(self.contract, shape, self.scenario.seed)
            object.__setattr__(self, "tokens", self.samples.tokens(made))

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """The slots by the name of their past."""
        return {slot.past: slot for slot in self.contract.slots}

    @cached_property
    def capacity(self) -> int:
        """Tokens of a buffer that declares no capacity: the whole sequence, and no less than a layer's window."""
        windows = [slot.window for slot in self.contract.slots if slot.window is not None]
        return max(self.scenario.total + SPARE, *windows, 0)

    def row(self, index: int) -> "Deal":
        """The deal of one row of the batch alone."""
        return self.rows((index,))

    def rows(self, order: Sequence[int]) -> "Deal":
        """The deal of some rows of the batch, in that order; a row may come twice."""
        states = None if self.encoded.states is None else self.encoded.states[list(order)]
        batched = {s.filled_by: s.axes.index("batch") for s in self.contract.slots if "batch" in s.axes}
        outputs = {
            name: np.take(array, order, axis=batched[name]) if name in batched else array
            for name, array in self.encoded.outputs.items()
        }
        scenario = replace(self.scenario, batch=len(order))
        drawn = tuple(self.drawn[row] if self.drawn else row for row in order)
        tokens, encoded = self.tokens[self.of_rows(order)], Encoded(states, outputs)
        return Deal(self.contract, scenario, encoded, tokens, samples=self.samples, drawn=drawn)

    def of_rows(self, order: Sequence[int]) -> list[int]:
        """Where the tokens and the logits of some rows of the batch stand: each has as many rows as codebooks."""
        books = self.contract.codebooks
        return [row * books + book for row in order for book in range(books)]

    def behind(self, start: int) -> "Deal":
        """The deal of the same sequence without its first `start` tokens."""
        scenario = replace(self.scenario, prompt=max(self.scenario.prompt - start, 1))
        scenario = replace(scenario, steps=self.scenario.total - start - scenario.prompt + 1)
        return replace(self, scenario=scenario, tokens=self.tokens[:, start:])

    def elsewhere(self, start: int) -> "Deal":
        """The deal of another sequence from a token on."""
        tokens = self.tokens.copy()
        tokens[:, start:] += 1
        return replace(self, tokens=tokens)

    def reordered(self, past: Past, order: Sequence[int]) -> Past:
        """The past of some rows of the batch, in that order: what a beam search feeds."""
        moved: dict[str, Any] = dict(past)
        for slot in self.contract.slots:
            value = as_array(past[slot.past])
            if "batch" in slot.axes:
                moved[slot.past] = np.take(value, order, axis=slot.axes.index("batch"))
            elif "batch_heads" in slot.axes:
                at, heads = slot.axes.index("batch_heads"), self.contract.heads or 1
                moved[slot.past] = np.take(value, [r * heads + h for r in order for h in range(heads)], axis=at)
        return Past(moved, past.length)

    def reference(self, stop: int | None = None) -> Call:
        """The first `stop` tokens (all of them) in one call without a cache."""
        stop = stop or self.scenario.total
        return self._call("prefill", 0, stop, self.first_past(0), 0, kind="reference")

    def whole(self, stop: int | None = None) -> "Generator[Call, Answer, Array]":
        """The logits of a reference run, float[batch, stop, vocabulary].

        A graph that gives the logits of the last token alone is run once for each length.
        """
        logits, _ = yield from self.whole_answer(stop)
        return logits

    def whole_answer(self, stop: int | None = None) -> "Generator[Call, Answer, tuple[Array, Answer]]":
        """The same, and what came back of the whole sequence: logits, and the slots that grow."""
        stop = stop or self.scenario.total
        if not self.contract.last_logits_only:
            answer = yield self.reference(stop)
            return answer.logits, answer
        found: list[Array] = []
        for length in range(1, stop + 1):
            answer = yield self.reference(length)
            found.append(answer.logits[:, -1:])
        return np.concatenate(found, axis=1), answer

    def prefill(self, stop: int, expected: Array | None = None, dummy: int = 0) -> Call:
        """The first `stop` tokens; past inputs that grow get a dummy of length `dummy` filled with zeros."""
        past = self.first_past(dummy)
        counted = dummy if self.contract.first_step == "empty-past" else 0
        return self._call("prefill", 0, stop, past, counted, expected=expected)

    def decode(self, start: int, stop: int, past: Past, expected: Array | None = None, **more: Any) -> Call:
        """Tokens start to stop on top of a cache, which is as long as `past` says."""
        return self._call("decode", start, stop, past, self.past_length(past), expected=expected, **more)

    def carry(self, past: Past | None, answer: Answer, loop: Loop) -> Past:
        """What the given loop feeds next. `past` is None after the prefill.

        plain: every slot that was returned is fed back. held: the slots that the contract holds keep their value.
        """
        before = self.first_past(0) if past is None else past
        carried = Past(length=answer.past + answer.new)
        for slot in self.contract.slots:
            returned = slot.filled_by if past is None else slot.present
            keep = past is not None and (slot.present is None or (loop == "held" and slot.carry == "hold"))
            if keep or returned is None or slot.filled_in == "encode":
                carried[slot.past] = before[slot.past]
            else:
                carried[slot.past] = self._next(slot, before, answer, answer.outputs[returned])
        return carried

    def past_length(self, past: Past) -> int:
        """Tokens in the cache: read off the first slot that grows, else counted."""
        for slot in self.contract.growing:
            return past[slot.past].shape[slot.axes.index("past")]
        return past.length

    def spoil(self, past: Past) -> "list[tuple[str, Past]]":
        """The same past with one kind of cache filled with zeros, each with its name: the positive controls."""
        spoilt = []
        for kind in dict.fromkeys(slot.kind for slot in self.contract.slots):
            if kind in ("counter", "encoder-states"):
                continue
            zeros = {slot.past: np.zeros_like(as_array(past[slot.past])) for slot in self.contract.of_kind(kind)}
            word = "cache" if kind.endswith("attention") else "slots"
            spoilt.append((f"{kind} {word} zeroed", Past({**past, **zeros}, past.length)))
        return spoilt

    def controls(self, start: int, stop: int, past: Past, expected: Array) -> "Iterator[Call]":
        """The same decode call over each spoilt past."""
        for spoilt, spoilt_past in self.spoil(past):
            yield self.decode(start, stop, spoilt_past, expected[:, start:stop], kind="control", label=spoilt)

    def placeholder(self, slot: Slot, length: int) -> Array:
        """Zeros in the shape of a slot, `length` long on its sequence axis if it grows."""
        sizes: dict[Axis, int] = {
            "batch": self.scenario.batch,
            "batch_heads": self.scenario.batch * (self.contract.heads or 1),
            "past": length,
            "encoder": length,
            "capacity": 0 if slot.carry == "extend" else self.capacity,
        }
        shape = [d if isinstance(d, int) else sizes.get(a, 1) for d, a in zip(slot.shape, slot.axes, strict=True)]
        return np.zeros(shape, NUMPY_TYPES[slot.dtype])

    def first_past(self, length: int) -> Past:
        """What the first step is fed as past, with dummies of a length where the cache grows."""
        made = self.encoded.outputs
        past = Past()
        for slot in self.contract.slots:
            encoded = made.get(slot.filled_by or "") if slot.filled_in == "encode" else None
            past[slot.past] = self.placeholder(slot, length) if encoded is None else encoded
        return past

    def _next(self, slot: Slot, before: Past, answer: Answer, present: Value) -> "Value | Array":
        """The next past of a slot by its carry rule."""
        at = slot.length_axis
        if slot.carry in ("feed-back", "hold") or at is None:
            return present
        rows = present.array()
        if slot.carry == "append":
            return np.concatenate([as_array(before[slot.past]), rows], axis=at)
        if slot.carry == "extend":
            return rows
        if slot.carry == "drop-oldest":
            return np.delete(rows, 0, axis=at)
        buffer = as_array(before[slot.past])
        if slot.carry == "shift":
            kept = np.take(buffer, range(rows.shape[at], buffer.shape[at]), axis=at)
            return np.concatenate([kept, rows], axis=at)
        written: Array = buffer.copy()
        place: list[Any] = [slice(None)] * written.ndim
        place[at] = slice(answer.past, answer.past + rows.shape[at])
        written[tuple(place)] = rows
        return written

    def _call(self, phase: PhaseName, start: int, stop: int, past: Past, past_length: int, **more: Any) -> Call:
        graph = self.contract.graph(phase)
        sizes: dict[Axis, int] = {
            "batch": self.scenario.batch,
            "batch_codebooks": self.scenario.batch * self.contract.codebooks,
            "new": stop - start,
            "past": past_length,
            "total": past_length + stop - start,
            "encoder": self._encoder_length(past),
            "encoder_input": self.scenario.encoder,
            "capacity": self.capacity,
        }
        feeds = {port.name: self._feed(port, phase, (start, stop), past, sizes) for port in graph.inputs}
        return Call(phase=phase, feeds=feeds, past=past_length, new=stop - start, **more)

    def _encoder_length(self, past: Past) -> int:
        """How many encoder states there are: by the states, else by the cache that was made of them."""
        if self.encoded.states is not None:
            return int(self.encoded.states.shape[1])
        for slot in self.contract.slots:
            if "encoder" in slot.axes and slot.past in past:
                length = past[slot.past].shape[slot.axes.index("encoder")]
                return length or self.scenario.encoder
        return self.scenario.encoder

    def _feed(  # noqa: C901, PLR0912 - one case for each role
        self, port: Port, phase: PhaseName, span: tuple[int, int], past: Past, sizes: dict[Axis, int]
    ) -> "Value | Array":
        kind, begin = NUMPY_TYPES[port.dtype], sizes["past"]
        if port.role == "past":
            return self._past(port, past, sizes["new"])
        shape = _sized(port, sizes)
        made: Any
        match port.role:
            case "token_ids":
                made = self.tokens[:, span[0] : span[1]]
                made = made if len(shape) == 2 else made.reshape(-1)
            case "token_and_position":
                made = np.stack([self.tokens[:, span[0]], np.full(len(self.tokens), begin)], axis=1)
            case "embeddings":
                made = _word_table(self.contract, shape[-1])[self.tokens[:, span[0] : span[1]]]
            case "attention_mask":
                columns = np.arange(shape[-1])
                made = np.broadcast_to((columns >= _by_row(self.padding, shape)) & (columns < sizes["total"]), shape)
            case "encoder_mask":
                made = np.broadcast_to(np.arange(shape[-1]) < shape[-1] - _by_row(self.encoder_padding, shape), shape)
            case "additive_mask":
                shape = _sized(port, {**sizes, "total": self._columns(past, sizes["total"])})
                seen = _seen(shape, port, self.contract, (begin, sizes["total"]))
                # Integer masks are those of Llama-2-Onnx: -1 where a query may look, 0 elsewhere.
                made = (
                    seen if kind is np.bool_ else np.where(seen, *((0.0, HIDDEN) if "float" in port.dtype else (-1, 0)))
                )
            case "position_ids" | "cache_position":
                counted = np.arange(begin, sizes["total"]) - _by_row(self.padding, shape)
                made = np.broadcast_to(np.maximum(counted, 0), shape)
            case "rotary_cos" | "rotary_sin":
                angles = _angles(begin, sizes["total"], shape[-1])
                made = np.broadcast_to(np.cos(angles) if port.role == "rotary_cos" else np.sin(angles), shape)
            case "encoder_states" if self.encoded.states is not None:
                made = self.encoded.states
            case "encoder_input":
                # Noise is drawn row after row: the first rows are the same, however many follow.
                rows = max(self.drawn) + 1 if self.drawn else shape[0]
                made = _encoder_feed(port, (rows, *shape[1:]), self.contract, self.scenario)
                given = self.samples.laid_over(port.name, made)
                return np.take(given, self.drawn, axis=0) if self.drawn else given
            case "branch_switch":
                made = np.full(shape, self.contract.phases[phase].switch)
            case "logits_to_keep" | "block_table":
                made = np.zeros(shape)
            case "beam_input":
                made = np.full(shape, 1 if len(shape) < 2 else 0)
            case "scale":
                made = np.ones(shape)
            case "setting" if port.value is not None:
                made = np.full(shape, port.value)
            case "write_index" | "past_length" | "total_length" | "last_index" | "new_length":
                made = np.full(shape, _count(port, sizes))
            case _:
                raise ValueError(f"input {port.name!r} has role {port.role}, which no feed is known for")
        return np.array(made, dtype=kind, order="C")

    def _columns(self, past: Past, total: int) -> int:
        """How many entries a mask with a row for each query covers: the whole of a buffer of fixed size."""
        for slot in self.contract.slots:
            if slot.growth == "static" and slot.carry != "extend" and slot.past in past:
                return past[slot.past].shape[slot.axes.index("capacity")]
        return total

    def _past(self, port: Port, past: Past, new: int) -> "Value | Array":
        slot = self.slots[port.name]
        if slot.carry != "extend" or slot.length_axis is None:
            return past[port.name]
        held = as_array(past[port.name])
        width = [(0, new if axis == slot.length_axis else 0) for axis in range(held.ndim)]
        return np.pad(held, width)


def encoder_feeds(contract: CacheContract, scenario: Scenario) -> dict[str, Array]:
    """Synthesise the inputs of the encoder graph: ids and features from the seed, masks of ones."""
    graph: Graph = contract.graph("encode")
    sizes: dict[Axis, int] = {"batch": scenario.batch, "encoder_input": scenario.encoder, "fixed": scenario.encoder}
    feeds = {}
    for port in graph.inputs:
        shape = _sized(port, sizes)
        if port.role == "encoder_mask":
            feeds[port.name] = np.ones(shape, NUMPY_TYPES[port.dtype])
        elif port.role == "encoder_length":
            feeds[port.name] = np.full(shape, scenario.encoder, NUMPY_TYPES[port.dtype])
        else:
            feeds[port.name] = _encoder_feed(port, shape, contract, scenario)
    return feeds


def synthetic_encoder_states(contract: CacheContract, scenario: Scenario) -> Array | None:
    """Noise in place of encoder states, float[batch, encoder, hidden]; None where the decoder takes none."""
    ports = [port for graph in contract.graphs.values() for port in graph.inputs if port.role == "encoder_states"]
    if not ports:
        return None
    # One graph of a pair may know the width that the other leaves open.
    ports.sort(key=lambda port: not isinstance((port.shape or (None,))[-1], int))
    sizes: dict[Axis, int] = {"batch": scenario.batch, "encoder": scenario.encoder, "hidden": 16}
    rng = np.random.default_rng(scenario.seed + 1)
    return rng.standard_normal(_sized(ports[0], sizes)).astype(NUMPY_TYPES[ports[0].dtype])


def synthetic_cross_caches(contract: CacheContract, scenario: Scenario) -> dict[str, Array]:
    """Noise in place of the caches that an encoder would make, by the name of its output."""
    rng = np.random.default_rng(scenario.seed + 2)
    sizes: dict[Axis, int] = {"batch": scenario.batch, "encoder": scenario.encoder}
    made = {}
    for slot in contract.slots:
        if slot.filled_in == "encode" and slot.filled_by is not None:
            shape = [d if isinstance(d, int) else sizes.get(a, 1) for d, a in zip(slot.shape, slot.axes, strict=True)]
            made[slot.filled_by] = rng.standard_normal(shape).astype(NUMPY_TYPES[slot.dtype])
    return made


def as_array(value: "Value | Array") -> Array:
    """Give the numpy array of a value, whoever holds it."""
    return value if isinstance(value, np.ndarray) else value.array()


def _encoder_feed(port: Port, shape: tuple[int, ...], contract: CacheContract, scenario: Scenario) -> Array:
    """Words or features for an encoder."""
    rng, kind = np.random.default_rng(scenario.seed + 1), NUMPY_TYPES[port.dtype]
    if np.issubdtype(kind, np.integer):
        return rng.integers(*_plain_words(contract), shape).astype(kind)
    return rng.standard_normal(shape).astype(kind)


def _by_row(padding: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """The padding of each row, int64[batch, 1], for an input of that shape; 0 where there is none."""
    return np.array(padding).reshape(-1, 1) if padding and len(shape) > 1 else np.zeros(1, np.int64)


def _count(port: Port, sizes: dict[Axis, int]) -> int:
    """The number that a length input stands for."""
    counts = {
        "total_length": sizes["total"],
        "last_index": sizes["total"] - 1,
        "new_length": sizes["new"],
    }
    return counts.get(port.role, sizes["past"])


def _seen(shape: tuple[int, ...], port: Port, contract: CacheContract, span: tuple[int, int]) -> Array:
    """Which entries a query may look at, bool in the shape of a mask with a row for each query.

    Columns count from the start of the cache; from its end where the loop shifts entries in from the right. Rows are
    the new tokens, or, in a square mask, all positions.
    """
    begin, end = span
    rows = np.arange(shape[-2]) if port.axes[-2] == "total" else np.arange(begin, end)
    columns = np.arange(shape[-1])
    moving = any(slot.carry == "shift" or slot.growth == "ring" for slot in contract.slots)
    if moving and not any(slot.carry == "drop-oldest" for slot in contract.slots):
        columns = columns - (shape[-1] - end)
    seen = (columns[None, :] <= rows[:, None]) & (columns[None, :] >= 0)
    return np.broadcast_to(seen, shape)


def _angles(begin: int, end: int, half: int) -> Array:
    """The angles of rotary positions, float[new, head_dim / 2]."""
    return np.arange(begin, end)[:, None] * ROTARY_BASE ** (-np.arange(half) / half)


def _word_table(contract: CacheContract, width: int) -> Array:
    """Made up embeddings, float[vocabulary, width], in place of those of a file that is not here."""
    return np.random.default_rng(7).standard_normal((max(contract.vocabulary or 16, 4), width))


def _tokens(contract: CacheContract, shape: tuple[int, ...], seed: int) -> Array:
    """Random ids, int64[batch, total], of plain words."""
    return np.random.default_rng(seed).integers(*_plain_words(contract), shape)


def _plain_words(contract: CacheContract) -> tuple[int, int]:
    """The middle half of the vocabulary: padding and other special tokens stand at its ends.

    A padding token is no word like others: M2M100 counts positions without it, so that its cached and its uncached
    positions rightly differ from then on.
    """
    size = max(contract.vocabulary or 16, 4)
    return size // 4, size - size // 4


def _sized(port: Port, sizes: Mapping[Axis, int]) -> tuple[int, ...]:
    """The shape of a port under the given sizes: declared numbers stay, axes get what they count."""
    return tuple(
        dim if isinstance(dim, int) else sizes.get(axis, 1)
        for dim, axis in zip(port.shape or (), port.axes, strict=True)
    )
