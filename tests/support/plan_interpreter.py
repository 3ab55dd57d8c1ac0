"""Runs the plan of a loop without a template: each rule of `kvdoctor/loops/plan.py` as its docstring has it.

It is written for reading, not for speed: every value is a numpy array, every call copies the cache.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from kvdoctor.loops.plan import CallPlan, Input, LoopPlan, SlotPlan

Array = np.ndarray[Any, Any]
Rows = Sequence[Sequence[int]]
Sizes = dict[str, int]

NUMPY = {"float": np.float32, "float16": np.float16, "bool": np.bool_}


def numpy_type(name: str) -> Any:
    """The element type of an ONNX tensor, for numpy."""
    return NUMPY.get(name) or np.dtype(name).type


def shape_of(dims: Sequence[int | str], sizes: Sizes) -> tuple[int, ...]:
    """A shape; an axis that no loop counts has length 1."""
    return tuple(dim if isinstance(dim, int) else sizes.get(dim, 1) for dim in dims)


def _last_rows(logits: Array, batch: int) -> Array:
    """The logits of the last new token of each sequence; they have an axis of tokens where there are three axes."""
    rows = logits[:, -1] if logits.ndim == 3 and len(logits) == batch else logits
    return rows.reshape(batch, -1)


class PlanInterpreter:
    """One model, and the cache of one batch of sequences."""

    def __init__(self, plan: LoopPlan, folder: Path, capacity: int = 512) -> None:
        self.plan = plan
        self.capacity = capacity if plan.capacity_is_chosen else plan.context_limit
        limits = [limit for limit in (plan.context_limit, self.capacity) if limit is not None]
        self.most = min(limits, default=None)
        self.sessions = {
            file: ort.InferenceSession(str(folder / file), providers=["CPUExecutionProvider"]) for file in plan.files
        }
        self.source: Array | None = None
        self.source_mask: Array | None = None
        self.encoded: dict[str, Array] = {}
        self._begin([])

    def _begin(self, padding: list[int]) -> None:
        self.length = 0
        self.padding = padding
        self.cache: dict[str, Array] = {}

    # What a caller does.

    def encode(self, source: Array, mask: Array | None = None) -> None:
        """Read what the sequences are about."""
        assert self.plan.source is not None
        self._begin([])
        self.source = source.astype(numpy_type(self.plan.source.dtype))
        self.source_mask = mask
        if self.plan.encode is not None:
            sizes = {"encoder_input": self._source_length(), "batch": self._source_size("batch", 0)}
            self.encoded = self._call(self.plan.encode, sizes, None)

    def prefill(self, prompts: Rows) -> Array:
        """Begin sequences; the last logits of each."""
        longest = max(map(len, prompts))
        padding = [longest - len(prompt) for prompt in prompts]
        assert self.plan.pads or not any(padding), "no padding for this model"
        assert self.plan.batch in (None, len(prompts)), f"a batch of {self.plan.batch}"
        self._begin(padding)
        tokens = np.array([[0] * padded + list(prompt) for padded, prompt in zip(padding, prompts, strict=True)])
        calls = np.split(tokens, longest, axis=1) if self.plan.one_token else [tokens]
        return [self._advance(part) for part in calls][-1]

    def step(self, rows: Rows) -> Array:
        """Continue each sequence with its new tokens; the last logits of each."""
        tokens = np.array(rows)
        assert self.length, "begin with prefill"
        assert self.plan.chunks or tokens.shape[1] == 1, "one token a step"
        return self._advance(tokens)

    def rewind(self, count: int) -> None:
        """Forget the last tokens of every sequence."""
        assert self.plan.rewinds, "a part of the cache cannot go back"
        self.length -= count
        for slot in self.plan.slots:
            if slot.rewinds == "cut":
                self.cache[slot.past] = self.cache[slot.past].take(range(self.length), slot.length_axis)

    def reorder(self, rows: Sequence[int]) -> None:
        """Let row i of the batch be what row `rows[i]` was."""
        assert self.plan.reorders, "the rows cannot change places"
        for slot in self.plan.slots:
            if slot.batch_axis is not None:
                shared = slot.heads if slot.dims[slot.batch_axis] == "batch_heads" else 1
                entries = [row * shared + head for row in rows for head in range(shared)]
                self.cache[slot.past] = self.cache[slot.past].take(entries, slot.batch_axis)
        self.padding = [self.padding[row] for row in rows]
        if self.source_mask is not None:
            self.source_mask = self.source_mask[list(rows)]
        if self.plan.encode is None and self.source is not None:
            self.source = self.source[list(rows)]
        if self.plan.encode is not None and self.plan.encode.states is not None:
            self.encoded[self.plan.encode.states] = self.encoded[self.plan.encode.states][list(rows)]

    # What a call is.

    def _advance(self, tokens: Array) -> Array:
        """One call on new tokens, prefill or decode, and what is kept of it."""
        batch, new = tokens.shape
        total = self.length + new
        if self.most is not None and total > self.most:
            raise ValueError(f"{total} tokens, of {self.most} at most")
        first = not self.length
        call = self.plan.prefill if first else self.plan.decode
        if first:
            self.cache = {slot.past: self._first_value(slot, batch) for slot in self.plan.slots}
        sizes = {"batch": batch, "new": new, "past": self.length, "total": total}
        outputs = self._call(call, sizes, tokens)
        for slot in self.plan.slots:
            name = slot.present if not first else None if slot.by_encoder else slot.made
            if name is not None:
                self.cache[slot.past] = self._next_value(slot, outputs[name])
        self.length = total
        assert call.logits is not None
        return _last_rows(outputs[call.logits].astype(np.float32), batch)

    def _call(self, call: CallPlan, sizes: Sizes, tokens: Array | None) -> dict[str, Array]:
        if self.capacity is not None:
            sizes = sizes | {"capacity": self.capacity}
        if "encoder" in call.sizes:
            sizes = sizes | {"encoder": self._encoder_length()}
        embedded = self._embed(sizes, tokens) if call.of_rule("embeddings") else {}
        made = {
            one.name: embedded[one.made] if one.rule == "embeddings" else self._value(one, sizes, tokens)
            for one in call.inputs
        }
        feeds = {one.name: made[one.name].astype(numpy_type(one.dtype)) for one in call.inputs}
        feeds |= {past: self.cache[past] for past in call.pasts}
        outputs = self.sessions[call.file].run(list(call.outputs), feeds)
        return dict(zip(call.outputs, outputs, strict=True))

    def _embed(self, sizes: Sizes, tokens: Array | None) -> dict[str, Array]:
        """What the embedding graph makes of the new tokens."""
        assert self.plan.embed is not None
        return self._call(self.plan.embed, sizes, tokens)

    def _value(self, one: Input, sizes: Sizes, tokens: Array | None) -> Array:
        shape = shape_of(one.dims, sizes)
        if one.rule == "tokens":
            assert tokens is not None
            return tokens.reshape(shape) if len(shape) == 1 else tokens
        if one.rule == "encoder-input":
            assert self.source is not None
            return self.source
        if one.rule == "encoder-states":
            return self._states()
        made: Callable[[Input, tuple[int, ...], Sizes], Array] = {
            "attention-mask": self._attention_mask,
            "causal-mask": self._causal_mask,
            "positions": self._positions,
            "number": self._number,
            "encoder-mask": self._encoder_mask,
        }[one.rule]
        return made(one, shape, sizes)

    def _attention_mask(self, _: Input, shape: tuple[int, ...], sizes: Sizes) -> Array:
        mask: Array = np.zeros((len(self.padding), shape[-1]))
        for row, padded in enumerate(self.padding):
            mask[row, padded : sizes["total"]] = 1
        if len(shape) == 1:
            return mask.reshape(shape)
        return np.broadcast_to(mask.reshape(len(mask), *[1] * (len(shape) - 2), -1), shape)

    def _causal_mask(self, one: Input, shape: tuple[int, ...], sizes: Sizes) -> Array:
        queries, columns = shape[-2:]
        first = 0 if one.dims[-2] == "total" else sizes["past"]
        oldest = columns - sizes["total"] if one.from_right else 0
        mask = np.full((queries, columns), one.hidden)
        for query in range(queries):
            mask[query, max(oldest, 0) : max(oldest + first + query + 1, 0)] = one.shown
        return np.broadcast_to(mask, shape)

    def _positions(self, _: Input, shape: tuple[int, ...], sizes: Sizes) -> Array:
        counted = np.arange(sizes["past"], sizes["total"])
        rows = np.stack([np.maximum(counted - padded, 0) for padded in self.padding])
        return np.broadcast_to(rows if len(shape) > 1 else counted, shape)

    def _number(self, one: Input, shape: tuple[int, ...], sizes: Sizes) -> Array:
        counted: dict[str, float] = {"constant": one.value}
        if one.count != "constant":
            counted = {
                "past": sizes["past"],
                "total": sizes["total"],
                "last": sizes["total"] - 1,
                "new": sizes["new"],
                "cached": int(sizes["past"] > 0),
            }
        return np.full(shape, counted[one.count])

    def _encoder_mask(self, _: Input, shape: tuple[int, ...], __: Sizes) -> Array:
        """The caller's mask, but where the encoder shortens what it reads: all its states count."""
        given = self.source_mask
        return given if given is not None and given.shape == shape else np.ones(shape)

    # What the cache is.

    def _first_value(self, slot: SlotPlan, batch: int) -> Array:
        if slot.by_encoder:
            assert slot.made is not None
            return self.encoded[slot.made]
        sizes = {"batch": batch, "batch_heads": batch * slot.heads, "past": slot.first_length}
        sizes |= {"encoder": slot.first_length, "capacity": self.capacity or 1}
        return np.zeros(shape_of(slot.dims, sizes), numpy_type(slot.dtype))

    def _next_value(self, slot: SlotPlan, present: Array) -> Array:
        if not slot.copies:
            return present
        axis = slot.length_axis
        assert axis is not None
        past, count = self.cache[slot.past], present.shape[axis]
        if slot.carry == "append":
            return np.concatenate([past, present], axis)
        if slot.carry == "shift":
            return np.concatenate([past.take(range(count, past.shape[axis]), axis), present], axis)
        if slot.carry == "drop-oldest":
            return present.take(range(1, count), axis)
        assert slot.carry == "write"
        written: Array = past.copy()
        np.moveaxis(written, axis, 0)[self.length : self.length + count] = np.moveaxis(present, axis, 0)
        return written

    # What the source is.

    def _states(self) -> Array:
        if self.plan.encode is not None and self.plan.encode.states is not None:
            return self.encoded[self.plan.encode.states]
        assert self.source is not None
        return self.source

    def _encoder_length(self) -> int:
        source = self.plan.source
        if self.plan.encode is not None and self.plan.encode.states is not None:
            return int(self._states().shape[1])
        if source is not None and source.rule == "encoder-states":
            return int(self._states().shape[1])
        slot = self.plan.encoder_slot
        if slot is not None and slot.length_axis is not None and (self.length or slot.by_encoder):
            return int(self.cache[slot.past].shape[slot.length_axis])
        return self._source_length()

    def _source_length(self) -> int:
        return self._source_size("encoder_input", -1)

    def _source_size(self, axis: str, otherwise: int) -> int:
        assert self.plan.source is not None
        assert self.source is not None
        dims = list(self.plan.source.dims)
        return int(self.source.shape[dims.index(axis) if axis in dims else otherwise])
