"""The decode loop of marian-4.57.6 (layout optimum-merged), written by kvdoctor 0.1.0.

    decoder = Decoder("path/to/the/model")
    decoder.encode(source)
    tokens = decoder.generate([[5, 6, 7]], most=20)

All names, types and sizes are those of the cache contract of this model; README.md says it in words.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnxruntime as ort

Array = np.ndarray[Any, Any]
Tokens = Sequence[Sequence[int]]
"""Token ids, a list for each sequence of the batch."""

ENCODER = "encoder_model.onnx"
DECODER = "decoder_model_merged.onnx"
MOST_TOKENS = 64
"""The most tokens that a sequence may have."""


class Slot(NamedTuple):
    """One tensor of the cache.

    Attributes:
        past: The input that it is fed to.
        made: The output that first fills it, of the first call.
        present: The output of each later call that carries it on; None where the first value is kept.
        shape: Its sizes; an axis whose size is known only when the loop runs has a name.
        batch_axis: The axis of the sequences.
        length_axis: The axis of the tokens.
    """

    past: str
    made: str | None
    present: str | None
    dtype: str
    shape: tuple[int | str, ...]
    batch_axis: int | None
    length_axis: int | None


CACHE = (
    Slot(
        past="past_key_values.0.decoder.key",
        made="present.0.decoder.key",
        present="present.0.decoder.key",
        dtype="float32",
        shape=("batch", 4, "past", 8),
        batch_axis=0,
        length_axis=2,
    ),
    Slot(
        past="past_key_values.0.decoder.value",
        made="present.0.decoder.value",
        present="present.0.decoder.value",
        dtype="float32",
        shape=("batch", 4, "past", 8),
        batch_axis=0,
        length_axis=2,
    ),
    Slot(
        past="past_key_values.0.encoder.key",
        made="present.0.encoder.key",
        present=None,
        dtype="float32",
        shape=("batch", 4, "encoder", 8),
        batch_axis=0,
        length_axis=2,
    ),
    Slot(
        past="past_key_values.0.encoder.value",
        made="present.0.encoder.value",
        present=None,
        dtype="float32",
        shape=("batch", 4, "encoder", 8),
        batch_axis=0,
        length_axis=2,
    ),
    Slot(
        past="past_key_values.1.decoder.key",
        made="present.1.decoder.key",
        present="present.1.decoder.key",
        dtype="float32",
        shape=("batch", 4, "past", 8),
        batch_axis=0,
        length_axis=2,
    ),
    Slot(
        past="past_key_values.1.decoder.value",
        made="present.1.decoder.value",
        present="present.1.decoder.value",
        dtype="float32",
        shape=("batch", 4, "past", 8),
        batch_axis=0,
        length_axis=2,
    ),
    Slot(
        past="past_key_values.1.encoder.key",
        made="present.1.encoder.key",
        present=None,
        dtype="float32",
        shape=("batch", 4, "encoder", 8),
        batch_axis=0,
        length_axis=2,
    ),
    Slot(
        past="past_key_values.1.encoder.value",
        made="present.1.encoder.value",
        present=None,
        dtype="float32",
        shape=("batch", 4, "encoder", 8),
        batch_axis=0,
        length_axis=2,
    ),
)

FIRST_OUTPUTS = [
    "logits",
    "present.0.decoder.key",
    "present.0.decoder.value",
    "present.0.encoder.key",
    "present.0.encoder.value",
    "present.1.decoder.key",
    "present.1.decoder.value",
    "present.1.encoder.key",
    "present.1.encoder.value",
]
"""What the first call returns."""
OUTPUTS = [
    "logits",
    "present.0.decoder.key",
    "present.0.decoder.value",
    "present.1.decoder.key",
    "present.1.decoder.value",
]


class Decoder:
    """The model, and the cache of one batch of sequences.

    The cache goes from step to step as the runtime made it, without a copy to numpy.
    A value is released as soon as the next step has replaced it.

    Attributes:
        length: Tokens in the cache, padding counted.
        most: The most tokens that a sequence may have.
        trace: Takes what each call fed and got, for `kvdoctor step-test MODEL --trace FILE`.
    """

    def __init__(
        self,
        folder: str | Path,
        providers: Sequence[str] = ("CPUExecutionProvider",),
    ) -> None:
        """Open the files in `folder`."""

        def opened(file: str) -> ort.InferenceSession:
            if not Path(folder, file).is_file():
                raise FileNotFoundError(f"there is no {file} in {folder}")
            return ort.InferenceSession(str(Path(folder, file)), providers=list(providers))

        self._encoder = opened(ENCODER)
        self._decoder = opened(DECODER)
        self.most = MOST_TOKENS
        place = os.environ.get("KVDOCTOR_TRACE")
        self.trace: Callable[[Mapping[str, Any]], None] | None = partial(_append, Path(place)) if place else None
        self.reset()

    def reset(self) -> None:
        """Begin anew: no sequences, and nothing encoded."""
        self._made: dict[str, ort.OrtValue] = {}
        self._source_mask: Array | None = None
        self._moved = False
        self._sources = 0
        self._clear([])

    def _clear(self, padding: list[int]) -> None:
        self.length = 0
        self._padding = padding
        self._cache: dict[str, ort.OrtValue] = {}

    def encode(self, source: Array, mask: Array | None = None) -> None:
        """Run the encoder; the sequences after it are about this `source`.

        Args:
            source: int64[batch, encoder_input]
            mask: int[batch, length], 0 for padding on the right; without it all of the source is read.
        """
        self.reset()
        source = np.ascontiguousarray(source, np.int64)
        if source.ndim != 2 or not source.size:
            raise ValueError(f"the source has 2 axes and is not empty; got shape {list(source.shape)}")
        if source.min() < 0:  # a Gather counts it from the end
            raise ValueError("the ids of the source are 0 or more")
        self._sources = source.shape[0]
        batch = source.shape[0]
        encoder_input = source.shape[1]
        expected = (batch, encoder_input)
        if mask is not None and np.shape(mask) != expected:
            raise ValueError(f"the mask has shape {list(expected)}; got {list(np.shape(mask))}")
        self._source_mask = None if mask is None else np.asarray(mask)
        feeds = {
            "input_ids": _value(source),
            "attention_mask": _value(self._encoder_mask((batch, encoder_input)).astype(np.int64)),
        }
        names = [
            "last_hidden_state",
        ]
        self._made = self._run(self._encoder, ENCODER, feeds, names)

    def prefill(self, prompts: Tokens) -> Array:
        """Begin sequences with their prompts; returns the last logits of each, float[batch, vocabulary]."""
        if not self._made or self._moved:
            raise ValueError("encode() first, and again after reorder()")
        longest = max(map(len, prompts), default=0)
        if not longest or not min(map(len, prompts)):
            raise ValueError("every sequence begins with at least one token")
        if len(prompts) != self._sources:
            raise ValueError(f"there are {self._sources} sources: give a prompt for each; got {len(prompts)}")
        if min(map(len, prompts)) < longest:
            raise ValueError("the prompts of a batch must have the same length: the loop does not pad for this model")
        tokens = _ids(prompts)
        self._clear([0] * len(prompts))
        return self._advance(tokens)

    def step(self, tokens: Tokens) -> Array:
        """Continue each sequence with its new tokens; returns logits as `prefill` does."""
        if not self.length:
            raise ValueError("begin with prefill()")
        ids = _ids(tokens)
        if len(ids) != len(self._padding):
            raise ValueError(f"a step takes tokens of each of {len(self._padding)} sequences")
        return self._advance(ids)

    def _advance(self, tokens: Array) -> Array:
        """Run one call on new tokens, int64[batch, new], and keep what it returns of the cache."""
        if self.length + tokens.shape[1] > self.most:
            raise ValueError(f"a sequence has at most {self.most} tokens here")
        if not self.length:
            self._cache = {slot.past: self._first_value(slot, len(tokens)) for slot in CACHE}
        first, feeds = not self.length, self._feeds(tokens)
        outputs = self._run(self._decoder, DECODER, feeds, FIRST_OUTPUTS if first else OUTPUTS)
        del feeds  # the values that are replaced below are released with it
        for slot in CACHE:
            name = slot.made if first else slot.present
            if name in outputs:
                self._cache[slot.past] = outputs.pop(name)
        self.length += tokens.shape[1]
        logits: Array = outputs["logits"].numpy()
        rows = logits.shape[1] if logits.ndim == 3 else 1
        last: Array = logits.reshape(len(tokens), rows, -1)[:, -1].astype(np.float32)
        return last

    def _feeds(self, tokens: Array) -> dict[str, ort.OrtValue]:
        batch = len(tokens)
        past = self.length
        encoder = self._encoder_length()
        return {
            "encoder_attention_mask": _value(self._encoder_mask((batch, encoder)).astype(np.int64)),
            "input_ids": _value(tokens),
            "encoder_hidden_states": self._made["last_hidden_state"],
            "use_cache_branch": _value(np.full((1,), past > 0, np.bool_)),
            **self._cache,
        }

    def _first_value(self, slot: Slot, batch: int) -> ort.OrtValue:
        """What the first call is fed: zeros that this branch of the graph does not read."""
        sizes = {"batch": batch, "past": 1, "encoder": 1}
        shape = [sizes.get(size, 1) if isinstance(size, str) else size for size in slot.shape]
        return _value(np.zeros(shape, slot.dtype))

    def rewind(self, count: int) -> None:
        """Forget the last `count` tokens of every sequence. At least one token must stay."""
        shortest = self.length - max(self._padding, default=0)
        if not 0 <= count < shortest:
            raise ValueError(f"cannot forget {count} tokens: the shortest sequence has {shortest}")
        self.length -= count
        for slot in CACHE:
            if "past" in slot.shape:
                entries = self._cache[slot.past].numpy()
                self._cache[slot.past] = _value(entries.take(range(self.length), slot.length_axis))

    def reorder(self, rows: Sequence[int]) -> None:
        """Make row i of the batch a copy of what row `rows[i]` was, as a beam search needs it."""
        if not self.length or not rows or not all(0 <= row < len(self._padding) for row in rows):
            raise ValueError(f"rows {list(rows)} of {len(self._padding)} sequences cannot be taken")
        for slot in CACHE:
            self._cache[slot.past] = _rows(self._cache[slot.past], slot, rows)
        self._padding = [self._padding[row] for row in rows]
        self._made["last_hidden_state"] = _value(self._made["last_hidden_state"].numpy()[list(rows)])
        if self._source_mask is not None:
            self._source_mask = self._source_mask[list(rows)]
        self._moved = True

    def generate(
        self,
        prompts: Tokens,
        most: int = 20,
        stop: Sequence[int] = (),
        choose: Callable[[Array], int] | None = None,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Decode until every sequence has ended; returns the new tokens of each, the stop token not among them.

        Args:
            prompts: What each sequence begins with.
            most: The most new tokens.
            stop: Tokens that end a sequence.
            choose: Picks a token of logits float[vocabulary]; without it the likeliest is taken.
            on_token: Called for each new token with the row and the token.
        """
        if most < 1:
            raise ValueError("most is 1 or more")
        made: list[list[int]] = [[] for _ in prompts]
        running = [True] * len(made)
        logits = self.prefill(prompts)
        while True:
            chosen = [int(row.argmax()) if choose is None else choose(row) for row in logits]
            for row, token in enumerate(chosen):
                running[row] = running[row] and token not in stop
                if running[row]:
                    made[row].append(token)
                    if on_token is not None:
                        on_token(row, token)
            if not any(running) or max(map(len, made)) >= most or self.length >= self.most:
                return made
            logits = self.step([[token] for token in chosen])

    def _encoder_length(self) -> int:
        """The number of encoder states."""
        return int(self._made["last_hidden_state"].shape()[1])

    def _encoder_mask(self, shape: tuple[int, ...]) -> Array:
        """The mask given to `encode`, else ones: one of another length belongs to the encoder's input alone."""
        given = self._source_mask
        return np.ones(shape, np.int64) if given is None or given.shape != shape else given

    def _run(
        self, session: ort.InferenceSession, file: str, feeds: dict[str, ort.OrtValue], names: Sequence[str]
    ) -> dict[str, ort.OrtValue]:
        """Run one call; what it returns stays with the runtime until it is read."""
        outputs: dict[str, ort.OrtValue] = {}
        error = None
        try:
            outputs = dict(zip(names, session.run_with_ort_values(list(names), feeds), strict=True))
        except Exception as raised:
            error = str(raised)
            raise
        finally:
            if self.trace is not None:
                self.trace({"file": file, "fed": _noted(feeds), "got": _noted(outputs), "error": error})
        return outputs


def _ids(rows: Tokens) -> Array:
    """Token ids, int64[batch, new].

    Raises:
        ValueError: the rows have unequal lengths, or hold something else than ids.
    """
    ids = np.array([list(row) for row in rows] if len({len(row) for row in rows}) == 1 else [])
    if ids.ndim != 2 or not ids.size or ids.dtype.kind not in "iu":
        raise ValueError("token ids are whole numbers, as many for each sequence")
    if ids.min() < 0 or ids.max() >= 128:
        raise ValueError("token ids are 0 to 127")
    return ids.astype(np.int64)


def _value(array: Array) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"))


def _rows(value: ort.OrtValue, slot: Slot, rows: Sequence[int]) -> ort.OrtValue:
    """Some sequences of a tensor of the cache, in that order."""
    if slot.batch_axis is None:
        return value
    return _value(value.numpy().take(rows, slot.batch_axis))


def _noted(values: Mapping[str, ort.OrtValue]) -> dict[str, dict[str, Any]]:
    """Types, shapes and data; of a tensor of more than 64 elements a sample of so many."""
    noted = {}
    for name, value in values.items():
        flat = value.numpy().ravel()
        small = flat.size <= 64
        numbers = flat if small else flat[[k * (flat.size - 1) // 63 for k in range(64)]]
        data = [n if np.isfinite(n) else None for n in numbers.tolist()]  # JSON has no NaN and no infinity
        noted[name] = {"dtype": value.data_type(), "shape": value.shape(), "data" if small else "sample": data}
    return noted


def _append(trace: Path, entry: Mapping[str, Any]) -> None:
    with trace.open("a", encoding="utf-8") as lines:
        print(json.dumps(entry), file=lines)
