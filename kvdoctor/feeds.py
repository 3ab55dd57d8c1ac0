"""Coupled feeds: mask length = past + new, positions offset by the past, everything from one seed. numpy only.

Filling each input on its own is what makes generic runners fail healthy decoders; here every size follows from the
contract and one `Scenario`. Sizes of the default scenario differ pairwise, since equal sizes hide mistakes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np

from kvdoctor.contract import Axis, CacheContract, Graph, PhaseName, Port, Slot

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


class Value(Protocol):
    """A tensor as the runtime holds it; the array is made only when asked for."""

    @property
    def shape(self) -> tuple[int, ...]: ...  # noqa: D102
    def array(self) -> Array: ...  # noqa: D102


Past = dict[str, "Value | Array"]
"""Past inputs by name."""

Loop = Literal["plain", "held"]


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
    splitting a sequence, without a cache.
    """

    phase: PhaseName
    feeds: "Mapping[str, Value | Array]"
    past: int
    new: int
    expected: Array | None = None
    kind: Literal["step", "reference", "control", "timing", "noise"] = "step"
    label: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: outputs by name."""

    outputs: Mapping[str, Value]
    logits_name: str

    @property
    def logits(self) -> Array:
        """float[batch, new, vocabulary]."""
        return self.outputs[self.logits_name].array()


@dataclass(frozen=True)
class Deal:
    """A contract with the sizes, tokens int64[batch, total] and encoder states of one scenario: makes all calls.

    `encoder_states` float[batch, encoder, hidden] is None where the decoder takes none.
    """

    contract: CacheContract
    scenario: Scenario
    encoder_states: Array | None = None
    tokens: Array = field(default_factory=lambda: np.zeros((0, 0), np.int64))

    def __post_init__(self) -> None:
        if not self.tokens.size:
            shape = (self.scenario.batch, self.scenario.total)
            object.__setattr__(self, "tokens", _tokens(self.contract, shape, self.scenario.seed))

    def row(self, index: int) -> "Deal":
        """The deal of one row of the batch alone."""
        states = None if self.encoder_states is None else self.encoder_states[index : index + 1]
        scenario = replace(self.scenario, batch=1)
        return Deal(self.contract, scenario, states, self.tokens[index : index + 1])

    def reference(self, stop: int | None = None) -> Call:
        """The first `stop` tokens (all of them) in one call without a cache."""
        stop = stop or self.scenario.total
        return self._call("prefill", 0, stop, self._placeholders(0), 0, kind="reference")

    def prefill(self, stop: int, expected: Array | None = None, dummy: int = 0) -> Call:
        """The first `stop` tokens; past inputs get a dummy of length `dummy` filled with zeros."""
        past = self._placeholders(dummy)
        counted = dummy if self.contract.first_step == "empty-past" else 0
        return self._call("prefill", 0, stop, past, counted, expected=expected)

    def decode(self, start: int, stop: int, past: Past, expected: Array | None = None, **more: Any) -> Call:
        """Tokens start to stop on top of a cache, which is as long as `past` says."""
        return self._call("decode", start, stop, past, self.past_length(past), expected=expected, **more)

    def carry(self, past: Past | None, answer: Answer, loop: Loop) -> Past:
        """What the given loop feeds next. `past` is None after the prefill.

        plain: every slot that was returned is fed back. held: the slots that the contract holds keep their value.
        """
        carried: Past = {}
        for slot in self.contract.slots:
            returned = slot.filled_by if past is None else slot.present
            keep = past is not None and (slot.present is None or (loop == "held" and slot.carry == "hold"))
            if keep or returned is None:
                carried[slot.past] = past[slot.past] if past else self.placeholder(slot, 0)
            else:
                carried[slot.past] = answer.outputs[returned]
        return carried

    def past_length(self, past: Past) -> int:
        """Tokens in the cache, read off the first self-attention slot."""
        for slot in self.contract.of_kind("self-attention"):
            return past[slot.past].shape[slot.axes.index("past")]
        return 0

    def spoil(self, past: Past) -> "list[tuple[str, Past]]":
        """The same past with one kind of cache filled with zeros, each with its name: the positive controls."""
        spoilt = []
        for kind in ("self-attention", "cross-attention"):
            slots = self.contract.of_kind(kind)
            if slots:
                zeros: Past = {slot.past: np.zeros_like(as_array(past[slot.past])) for slot in slots}
                spoilt.append((f"{kind} cache zeroed", {**past, **zeros}))
        return spoilt

    def placeholder(self, slot: Slot, length: int) -> Array:
        """Zeros in the shape of a slot, `length` long on its sequence axis."""
        sizes = {"batch": self.scenario.batch, "past": length, "encoder": length}
        shape = [d if isinstance(d, int) else sizes[a] for d, a in zip(slot.shape, slot.axes, strict=True)]
        return np.zeros(shape, NUMPY_TYPES[slot.dtype])

    def _placeholders(self, length: int) -> Past:
        return {slot.past: self.placeholder(slot, length) for slot in self.contract.slots}

    def _call(self, phase: PhaseName, start: int, stop: int, past: Past, past_length: int, **more: Any) -> Call:
        graph = self.contract.graph(phase)
        sizes: dict[Axis, int] = {
            "batch": self.scenario.batch,
            "new": stop - start,
            "past": past_length,
            "total": past_length + stop - start,
            "encoder": 0 if self.encoder_states is None else self.encoder_states.shape[1],
        }
        feeds = {port.name: self._feed(port, phase, (start, stop), past, sizes) for port in graph.inputs}
        return Call(phase=phase, feeds=feeds, past=past_length, new=stop - start, **more)

    def _feed(
        self, port: Port, phase: PhaseName, span: tuple[int, int], past: Past, sizes: dict[Axis, int]
    ) -> "Value | Array":
        if port.role == "past":
            return past[port.name]
        shape = _sized(port, sizes)
        made: Any
        match port.role:
            case "token_ids":
                made = self.tokens[:, span[0] : span[1]]
            case "attention_mask" | "encoder_mask":
                made = np.ones(shape)
            case "position_ids" | "cache_position":
                made = np.broadcast_to(np.arange(sizes["past"], sizes["total"]), shape)
            case "encoder_states" if self.encoder_states is not None:
                made = self.encoder_states
            case "branch_switch":
                made = np.full(shape, self.contract.phases[phase].switch)
            case "logits_to_keep":
                made = np.zeros(shape)
            case _:
                raise ValueError(f"input {port.name!r} has role {port.role}, which no feed is known for")
        return np.asarray(made, dtype=NUMPY_TYPES[port.dtype])


def encoder_feeds(contract: CacheContract, scenario: Scenario) -> dict[str, Array]:
    """Synthesise the inputs of the encoder graph: ids and features from the seed, masks of ones."""
    graph: Graph = contract.graph("encode")
    rng = np.random.default_rng(scenario.seed + 1)
    sizes: dict[Axis, int] = {"batch": scenario.batch, "encoder_input": scenario.encoder, "fixed": scenario.encoder}
    feeds = {}
    for port in graph.inputs:
        shape, kind = _sized(port, sizes), NUMPY_TYPES[port.dtype]
        if port.role == "encoder_mask":
            feeds[port.name] = np.ones(shape, kind)
        elif np.issubdtype(kind, np.integer):
            feeds[port.name] = rng.integers(*_plain_words(contract), shape).astype(kind)
        else:
            feeds[port.name] = rng.standard_normal(shape).astype(kind)
    return feeds


def synthetic_encoder_states(contract: CacheContract, scenario: Scenario) -> Array | None:
    """Noise in place of encoder states, float[batch, encoder, hidden]; None where the decoder takes none."""
    ports = [port for graph in contract.graphs.values() for port in graph.inputs if port.role == "encoder_states"]
    if not ports:
        return None
    sizes: dict[Axis, int] = {"batch": scenario.batch, "encoder": scenario.encoder, "hidden": 16}
    rng = np.random.default_rng(scenario.seed + 1)
    return rng.standard_normal(_sized(ports[0], sizes)).astype(NUMPY_TYPES[ports[0].dtype])


def as_array(value: "Value | Array") -> Array:
    """Give the numpy array of a value, whoever holds it."""
    return value if isinstance(value, np.ndarray) else value.array()


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
