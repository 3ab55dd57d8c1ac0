"""Makes the inputs of a call so that they fit together: mask length = past + new, positions offset by the past.

Generic runners fill each input on its own and so fail on healthy decoders. Here every size follows from the
contract and one `Scenario`. Sizes of the default scenario differ pairwise, since equal sizes hide mistakes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

import numpy as np

from kvdoctor.contract import Axis, CacheContract, PhaseName, Port, Slot
from kvdoctor.decode.calls import (
    NUMPY_TYPES,
    TOO_SHORT,
    Answer,
    Array,
    Asking,
    Call,
    Conditions,
    CountRows,
    Embed,
    Encoded,
    Loop,
    Past,
    Scenario,
    Value,
    Way,
    as_array,
)
from kvdoctor.decode.inputs import StepInputs, fill_input, random_tokens, resolve_shape, synthetic_ids_or_features
from kvdoctor.decode.samples import Samples
from kvdoctor.decode.tolerances import Tolerance, find_tolerance
from kvdoctor.errors import CannotCheck
from kvdoctor.records import record


def fill_front(logits: Array, total: int) -> Array:
    """The logits of the last tokens of so many, with zeros for those before, float[batch, total, vocabulary]."""
    return np.pad(logits, ((0, 0), (total - logits.shape[1], 0), (0, 0)))


SPARE, NOISE = 5, (1, 2, 4, 8)
"""Tokens that a buffer gets as well whose capacity is not declared; sizes of noise in controls on token ids."""


@record(slots=False)
class FeedBuilder(Conditions):
    """A contract with the sizes, tokens and encoder outputs of one scenario: makes all calls.

    `tokens` int64[batch * codebooks, total] are the whole sequence; `padding` says how many of them, row by row, are
    padding on the left, to be masked and not counted, and `gap` the same of those before token `gap_end`;
    `encoder_padding` how many encoder states are padding on the right. `samples` are the user's, in place of synthetic
    tokens and encoder inputs. `drawn` are the rows of an earlier builder that this one has, unless it has all of them
    in order. `embed` makes embeddings of tokens by the contract's embedding graph; without it they are synthetic.
    `adapted` feeds an adapter of noise to inputs of LoRA.
    `count_rows` counts the rows for images and audio: a token of the id -1 - n stands for row n of these, those of the
    first encoder first. `loop` is the one that `begin` and `go_on` run, and `via` how all calls but references are run.
    """

    contract: CacheContract
    scenario: Scenario
    encoded: Encoded = field(default_factory=Encoded)
    tokens: Array = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    padding: tuple[int, ...] = ()
    encoder_padding: tuple[int, ...] = ()
    gap: tuple[int, ...] = ()
    gap_end: int = 0
    samples: Samples = field(default_factory=Samples)
    drawn: tuple[int, ...] = ()
    embed: Embed | None = None
    adapted: bool = False
    count_rows: CountRows | None = None
    loop: Loop = "held"
    via: Way = "run"

    def __post_init__(self) -> None:
        if not self.tokens.size:
            shape = (self.scenario.batch * self.contract.codebooks, self.scenario.total)
            made = random_tokens(self.contract, shape, self.scenario.seed)
            object.__setattr__(self, "tokens", self.samples.tokens(made))

    @property
    def tolerance(self) -> Tolerance:
        """How far logits of this contract may lie apart and still be the same."""
        return find_tolerance(self.contract.exactness, self.tolerances)

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """The slots by the name of their past."""
        return {slot.past: slot for slot in self.contract.slots}

    @cached_property
    def capacity(self) -> int:
        """Tokens of a buffer that declares no capacity: the whole sequence, and no less than a layer's window."""
        windows = [slot.window for slot in self.contract.slots if slot.window is not None]
        return max(self.scenario.total + SPARE, *windows, 0)

    @property
    def encoder_states(self) -> int:
        """The number of encoder states."""
        return self._encoder_length(self.first_past(0))

    def row(self, index: int) -> "FeedBuilder":
        """A builder for one row of the batch alone."""
        return self.rows((index,))

    def rows(self, order: Sequence[int]) -> "FeedBuilder":
        """A builder for some rows of the batch, in that order; a row may occur twice."""
        states = None if self.encoded.states is None else self.encoded.states[list(order)]
        filled = {slot.filled_by: slot for slot in self.contract.slots}
        outputs = {
            name: self.take_rows(filled[name], array, order) if name in filled else array
            for name, array in self.encoded.outputs.items()
        }
        return replace(
            self,
            scenario=replace(self.scenario, batch=len(order)),
            encoded=Encoded(states, outputs),
            tokens=self.tokens[self.token_rows(order)],
            drawn=tuple(self.drawn[row] if self.drawn else row for row in order),
            padding=(),
            encoder_padding=(),
            gap=(),
        )

    def token_rows(self, order: Sequence[int]) -> list[int]:
        """Where the tokens of some rows of the batch stand: each has as many rows as codebooks."""
        return self._rows_of(order, self.contract.codebooks)

    def logits_rows(self, order: Sequence[int]) -> list[int]:
        """Where the logits of some rows of the batch stand: one for each codebook, or one for all."""
        graph = self.contract.graph("prefill")
        logits, tokens = graph.port("logits"), graph.port("token_ids")
        by_book = logits is not None and "codebooks" in logits.axes
        by_book = by_book or (tokens is not None and "batch_codebooks" in tokens.axes)
        return self._rows_of(order, self.contract.codebooks if by_book else 1)

    @staticmethod
    def _rows_of(order: Sequence[int], books: int) -> list[int]:
        return [row * books + book for row in order for book in range(books)]

    def without_first(self, start: int) -> "FeedBuilder":
        """A builder for the same sequence without its first `start` tokens."""
        scenario = replace(self.scenario, prompt=max(self.scenario.prompt - start, 1))
        scenario = replace(scenario, steps=self.scenario.total - start - scenario.prompt + 1)
        return replace(self, scenario=scenario, tokens=self.tokens[:, start:])

    def with_other_tokens(self, start: int) -> "FeedBuilder":
        """A builder for a sequence with other tokens from `start` on."""
        tokens = self.tokens.copy()
        tokens[:, start:] += 1
        return replace(self, tokens=tokens)

    def reorder_past(self, past: Past, order: Sequence[int]) -> Past:
        """The past of some rows of the batch, in that order: what a beam search feeds."""
        moved: dict[str, Any] = dict(past)
        for slot in self.contract.slots:
            moved[slot.past] = self.take_rows(slot, as_array(past[slot.past]), order)
        return Past(moved, past.length)

    def take_rows(self, slot: Slot, array: Array, order: Sequence[int]) -> Array:
        """The entries of some rows of the batch in a slot's tensor; all where it has no axis of rows."""
        if "batch" in slot.axes:
            return np.take(array, order, axis=slot.axes.index("batch"))
        if "batch_heads" in slot.axes:
            at, heads = slot.axes.index("batch_heads"), self.contract.heads or 1
            return np.take(array, [row * heads + head for row in order for head in range(heads)], axis=at)
        return array

    def reference(self, stop: int | None = None) -> Call:
        """The first `stop` tokens (all of them) in one call without a cache."""
        stop = stop or self.scenario.total
        return self._call("prefill", 0, stop, self.first_past(0), 0, kind="reference")

    def whole(self, stop: int | None = None, start: int = 0) -> Asking[Array]:
        """The logits of a reference run, float[batch, stop, vocabulary].

        A graph that gives the logits of the last token alone is run once for each length, those up to `start` left out.
        """
        stop = stop or self.scenario.total
        if not self.contract.last_logits_only:
            return (yield self.reference(stop)).logits
        found: list[Array] = []
        for length in range(start + 1, stop + 1):
            answer = yield self.reference(length)
            found.append(answer.logits[:, -1:])
        return fill_front(np.concatenate(found, axis=1), stop)

    def prefill(self, stop: int, expected: Array | None = None, dummy: int = 0) -> Call:
        """The first `stop` tokens; past inputs that grow get a dummy of length `dummy` filled with zeros."""
        past = self.first_past(dummy)
        counted = dummy if self.contract.first_step == "empty-past" else 0
        return self._call("prefill", 0, stop, past, counted, expected=expected)

    def decode(self, start: int, stop: int, past: Past, expected: Array | None = None, **more: Any) -> Call:
        """Tokens start to stop on top of a cache, which is as long as `past` says."""
        return self._call("decode", start, stop, past, self.past_length(past), expected=expected, **more)

    def resized(self, prompt: int, total: int) -> "FeedBuilder":
        """A builder of a sequence of another length, of which so many tokens are in the prefill."""
        scenario = replace(self.scenario, prompt=prompt, steps=total - prompt + 1)
        return replace(self, scenario=scenario, tokens=self.tokens[:, :0])

    def begin(self, expected: Array | None = None, stop: int | None = None) -> Asking[Past]:
        """Prefill the prompt, or `stop` tokens, compared with the logits `expected`; gives the past of the loop."""
        stop = stop or self.scenario.prompt
        answer = yield self.prefill(stop, None if expected is None else expected[:, :stop])
        return self.carry(None, answer, self.loop)

    def run_through(self, expected: Array, size: int = 1) -> Asking[Past]:
        """The prompt and the loop to the end of the sequence; gives the past of the last call."""
        past = yield from self.begin(expected)
        before, _ = yield from self.go_on(past, self.scenario.prompt, self.scenario.total, expected, size)
        return before

    def go_on(
        self, past: Past | None, start: int, stop: int, expected: Array | None = None, size: int = 1
    ) -> Asking[tuple[Past, Past]]:
        """The loop from token `start` to `stop`, `size` tokens a call; compared with the logits `expected` of all.

        A `past` of None begins with a prefill.

        Returns:
            The past of the last call, and the one after it.
        """
        before = after = self.first_past(0) if past is None else past
        for position in range(start, stop, size):
            end, before = min(position + size, stop), after
            wanted = None if expected is None else expected[:, position:end]
            call = self.prefill(end, wanted) if past is None else self.decode(position, end, after, wanted)
            past = after = self.carry(past, (yield call), self.loop)
        return before, after

    def carry(self, past: Past | None, answer: Answer, loop: Loop, first: Past | None = None) -> Past:
        """What the given loop feeds next. `past` is None after the prefill, which was fed `first`, or the usual.

        plain: every slot that was returned is fed back. held: the slots that the contract holds keep their value.
        """
        before = (first or self.first_past(0)) if past is None else past
        carried = Past(length=answer.past + answer.new, calls=(*(past.calls if past is not None else ()), answer.new))
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

    @property
    def returns_ids(self) -> bool:
        """Whether a token id is returned in place of logits, which shows little of a difference."""
        logits = self.contract.graph("decode").port("logits")
        return logits is not None and "int" in logits.dtype

    def corrupt(self, past: Past) -> "list[tuple[str, Past]]":
        """The same past with one kind of cache filled with zeros, each with its name: the positive controls.

        Where token ids are returned, the likeliest token may well stay the same: then noise of several sizes follows.
        """
        found, ids = [], self.returns_ids
        for kind in dict.fromkeys(slot.kind for slot in self.contract.slots):
            if kind in ("counter", "encoder-states"):
                continue
            noun = "cache" if kind.endswith("attention") else "slots"
            for size in (0, *NOISE) if ids else (0,):
                held = {slot.past: as_array(past[slot.past]) for slot in self.contract.of_kind(kind)}
                noise = np.random.default_rng(size).standard_normal
                wrong = {name: np.asarray(size * noise(one.shape), one.dtype) for name, one in held.items()}
                label = f"{kind} {noun} {'replaced' if ids else 'zeroed'}"
                found.append((label, Past({**past, **wrong}, past.length)))
        return found

    def controls(self, start: int, stop: int, past: Past, expected: Array) -> "Iterator[Call]":
        """The same decode call over each corrupted past."""
        for label, corrupted in self.corrupt(past):
            yield self.decode(start, stop, corrupted, expected[:, start:stop], kind="control", label=label)

    def placeholder(self, slot: Slot, length: int) -> Array:
        """Zeros in the shape of a slot, `length` long on its sequence axis if it grows."""
        sizes: dict[Axis, int] = {
            "batch": self.scenario.batch,
            "batch_heads": self.scenario.batch * (self.contract.heads or 1),
            "past": length,
            "encoder": length,
            "capacity": 0 if slot.carry == "extend" else self.capacity,
        }
        return np.zeros(slot.sized(sizes), NUMPY_TYPES[slot.dtype])

    def first_past(self, length: int) -> Past:
        """What the first step is fed as past, with dummies of a length where the cache grows."""
        made = self.encoded.outputs
        past = Past()
        for slot in self.contract.slots:
            encoded = made.get(slot.filled_by or "") if slot.filled_in == "encode" else None
            past[slot.past] = self.placeholder(slot, length) if encoded is None else encoded
        return past

    def _next(self, slot: Slot, before: Past, answer: Answer, present: Value) -> "Value | Array":
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
        if stop > self.scenario.total:
            raise CannotCheck(TOO_SHORT)
        total = past_length + stop - start
        sizes: dict[Axis, int] = {
            "batch": self.scenario.batch,
            "batch_codebooks": self.scenario.batch * self.contract.codebooks,
            "new": stop - start,
            "past": past_length,
            "total": total,
            "encoder": self._encoder_length(past),
            "encoder_input": self.scenario.encoder,
            "capacity": self.capacity,
        }
        tokens = self.tokens[:, start:stop]
        embedded = self.embed(phase, tokens) if self.embed is not None else {}
        step = StepInputs(self, phase, tokens, past_length, sizes, self._columns(past, total), embedded)
        feeds = {port.name: self._feed(port, past, step) for port in self.contract.graph(phase).inputs}
        via = "run" if more.get("kind") == "reference" else self.via
        return Call(phase=phase, feeds=feeds, past=past_length, new=stop - start, via=via, **more)

    def _feed(self, port: Port, past: Past, step: StepInputs) -> "Value | Array":
        if port.role == "past":
            return self._past(port, past, step.sizes["new"])
        if port.role not in ("encoder_input", "condition"):
            return fill_input(port, step)
        # The same in all calls. Noise is drawn row after row: the first rows are the same, however many follow.
        shape, whole = resolve_shape(port, step.sizes), self.samples.arrays.get(port.name)
        if "batch" not in port.axes and whole is not None and whole.shape == shape:
            return whole  # one value for all sequences
        if not shape:  # a call that is computed from shapes alone knows of no given values
            return synthetic_ids_or_features(port, shape, self.contract, self.scenario)
        rows = max(self.drawn) + 1 if self.drawn else shape[0]
        if port.role == "condition" and whole is not None and whole.shape[1:] == shape[1:]:
            return np.take(whole, self.drawn or range(rows), axis=0, mode="wrap")  # other rows may be out of range
        made = synthetic_ids_or_features(port, (rows, *shape[1:]), self.contract, self.scenario)
        given = self.samples.overlay(port.name, made)
        return np.take(given, self.drawn, axis=0) if self.drawn else given

    def _encoder_length(self, past: Past) -> int:
        """How many encoder states there are: by the states, else by the cache that was made of them."""
        if self.encoded.states is not None:
            return int(self.encoded.states.shape[1])
        for slot in self.contract.slots:
            if "encoder" in slot.axes and slot.past in past:
                length = past[slot.past].shape[slot.axes.index("encoder")]
                return length or self.scenario.encoder
        return self.scenario.encoder

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
