"""The decoder: opens the files of a model, runs its calls, and holds the cache of one batch of sequences."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from .cache import CARRIES, Cache, Values
from .contract import Call, Contract, ContractError, File, compare, read_contract
from .sampling import Choose, constrain, likeliest
from .values import GIVEN, Array, Step, Value, as_float32, as_value, numpy_type

Tokens = Sequence[Sequence[int]]
"""Token ids, a list for each sequence of the batch."""
Trace = Callable[[Mapping[str, Any]], None]
"""Takes a call: its `file`, the tensors `fed` and `got` by name, and the `error` or None."""


class Decoder:
    """A model, and the cache of one batch of sequences.

    The cache goes from call to call as the runtime made it. A step that fails changes nothing: the sequences are those
    before it; after a prefill that fails there are none. A decoder is used by one thread at a time.

    Attributes:
        contract: What `contract.json` says.
        length: Tokens in the cache, padding counted.
        most: The most tokens that a sequence may have.
        trace: Called after each call of a session, for a record of what was fed and returned.
    """

    def __init__(
        self,
        folder: str | Path,
        contract: str | Path | Contract,
        providers: Sequence[str] = ("CPUExecutionProvider",),
        options: ort.SessionOptions | None = None,
        capacity: int = 512,
    ) -> None:
        """Open the files of a model.

        Args:
            folder: Where they are.
            contract: `contract.json`, or what `read_contract` made of it.
            providers: Execution providers, the preferred one first.
            options: Session options, of threads for example.
            capacity: Room for tokens in a cache whose length the caller chooses.

        Raises:
            ContractError: the contract is of another schema or model, or asks for what this program does not do.
            FileNotFoundError: a file is missing.
        """
        self.contract = contract if isinstance(contract, Contract) else read_contract(contract)
        calls = (self.contract.encode, self.contract.embed, self.contract.prefill, self.contract.decode)
        self._values = {id(call): _make_values(call) for call in calls if call}
        self._sessions = {
            file.file: _open(Path(folder), file, providers, options or ort.SessionOptions())
            for file in self.contract.files
        }
        limit = self.contract.context_limit or sys.maxsize
        self._capacity = capacity if self.contract.capacity_is_chosen else self.contract.context_limit or 1
        self.most = min(limit, capacity) if self.contract.capacity_is_chosen else limit
        self.trace: Trace | None = None
        self.reset()

    def reset(self) -> None:
        """Begin anew: no sequences, and nothing encoded."""
        self._given: Values = {}
        """The source, without a name, and what the encoder made of it."""
        self._mask: Array | None = None
        self._source: tuple[int, int] | None = None
        """Its sequences, 0 where it has no axis of them, and its length."""
        self._moved = False
        self._clear(())

    def _clear(self, padding: Sequence[int]) -> None:
        self.length = 0
        self._padding = tuple(padding)
        self._cache: Cache | None = None
        self._logits: ort.OrtValue | None = None

    def encode(self, source: Array, mask: Array | None = None) -> None:
        """Say what the sequences are about, and run the encoder where there is one.

        Args:
            source: In the type and the axes of `contract.source`.
            mask: int[batch, length], 0 for padding on the right; without it all of the source is read.

        Raises:
            ValueError: the model takes no source, or one of another shape.
        """
        due = self.contract.source
        if due is None:
            raise ValueError("this model takes no source")
        given: Array = np.ascontiguousarray(source, numpy_type(due.dtype))
        wrong = [dim for dim, size in zip(due.dims, given.shape, strict=False) if isinstance(dim, int) and dim != size]
        if given.ndim != len(due.dims) or not given.size or wrong:
            raise ValueError(
                f"the source has the axes {list(due.dims)} and is not empty; got shape {list(given.shape)}"
            )
        if given.dtype.kind in "iu" and given.min() < 0:  # a Gather counts it from the end
            raise ValueError("the ids of the source are 0 or more")
        self.reset()
        batch = 0 if due.batch_axis is None else given.shape[due.batch_axis]
        shape = (batch, given.shape[self.contract.source_axis or 0])
        if mask is not None and np.shape(mask) != shape:
            raise ValueError(f"the mask has shape {list(shape)}; got {list(np.shape(mask))}")
        self._mask = None if mask is None else np.asarray(mask)
        self._given, self._source = {None: as_value(given)}, shape
        if self.contract.encode is not None:
            step = Step(given, {"batch": batch or 1, "encoder_input": shape[1]}, (), self._mask)
            self._given |= self._call(self.contract.encode, step)

    def prefill(self, prompts: Tokens) -> Array:
        """Begin sequences with their prompts; the last logits of each, float32[batch, vocabulary].

        Shorter prompts are padded on the left where the contract has `pads`.

        Raises:
            ValueError: the prompts do not fit the model or each other, or there is no source yet.
        """
        if self.contract.source is not None and (self._source is None or self._moved):
            raise ValueError("encode() first, and again after reorder()")
        tokens, padding = self._pad(prompts)
        if self._source and self._source[0] not in (0, len(tokens)):
            raise ValueError(f"there are {self._source[0]} sources: give a prompt for each; got {len(tokens)}")
        if self.contract.batch not in (None, len(tokens)):
            raise ValueError(f"this model takes a batch of {self.contract.batch}; got {len(tokens)} prompts")
        self._refuse_length(tokens.shape[1])
        self._clear(padding)
        parts = np.split(tokens, tokens.shape[1], axis=1) if self.contract.one_token else [tokens]
        try:
            return [self._advance(np.ascontiguousarray(part)) for part in parts][-1]
        except BaseException:
            self._clear(())
            raise

    def step(self, tokens: Tokens) -> Array:
        """Continue each sequence with its new tokens; logits as `prefill` returns them.

        Raises:
            ValueError: there are no sequences yet, or the tokens do not fit them; nothing has changed.
        """
        if not self.length:
            raise ValueError("begin with prefill()")
        ids = self._check(tokens)
        if len(ids) != len(self._padding) or (ids.shape[1] != 1 and not self.contract.chunks):
            count = "tokens" if self.contract.chunks else "one token"
            raise ValueError(f"a step takes {count} of each of {len(self._padding)} sequences")
        self._refuse_length(self.length + ids.shape[1])
        return self._advance(ids)

    @property
    def logits(self) -> Array:
        """The logits of all new tokens of the last call, float32[batch, new, vocabulary].

        A graph that returns those of its last token alone has one for `new`.
        """
        if self._logits is None:
            raise ValueError("begin with prefill()")
        made, batch = as_float32(self._logits), len(self._padding)
        return made if made.ndim == 3 and len(made) == batch else made.reshape(batch, 1, -1)

    def rewind(self, count: int) -> None:
        """Forget the last `count` tokens of every sequence. At least one token must stay.

        Raises:
            ValueError: the cache of this model cannot go back, or not so far.
        """
        shortest = self.length - max(self._padding, default=0)
        if not self.contract.rewinds or not 0 <= count < shortest:
            reason = f"the shortest sequence has {shortest}" if self.contract.rewinds else "this cache cannot go back"
            raise ValueError(f"cannot forget {count} tokens: {reason}")
        if self._cache is not None and count:
            self._cache.cut(self.length - count)
        self.length -= count

    def reorder(self, rows: Sequence[int]) -> None:
        """Make row i of the batch a copy of what row `rows[i]` was, as a beam search needs it.

        Raises:
            ValueError: the sequences of this model cannot change places, or there is no such row.
        """
        if not self.contract.reorders:
            raise ValueError("the sequences of this model cannot change places")
        if self._cache is None or not rows or not all(0 <= row < len(self._padding) for row in rows):
            raise ValueError(f"rows {list(rows)} of {len(self._padding)} sequences cannot be taken")
        self._cache.reorder(rows)
        self._padding = tuple(self._padding[row] for row in rows)
        states = {one.made for one in self.contract.decode.inputs if one.rule == "encoder-states"}
        self._given |= {name: as_value(self._given[name].numpy()[list(rows)]) for name in states}
        if self._mask is not None:
            self._mask = self._mask[list(rows)]
        self._moved = True

    def stream(
        self,
        prompts: Tokens,
        most: int = 20,
        stop: Sequence[int] | None = None,
        choose: Choose | None = None,
        continued: bool = False,
    ) -> Iterator[list[int | None]]:
        """Decode step by step: the new token of each sequence, None for one that has ended.

        Close the iterator, or leave it, to end early; the sequences can then be continued with `step`.

        Args:
            prompts: What each sequence begins with.
            most: The most new tokens of a sequence.
            stop: Tokens that end a sequence, and are not returned; None for those of the contract.
            choose: Picks a token; None takes the likeliest. `Sampling(...).chooser()` draws.
            continued: Go on from the sequences as they are: `prompts` are their new tokens. The last tokens of an
                earlier turn are not in the cache yet: they come first.
        """
        if most < 1:
            raise ValueError("most is 1 or more")
        ends = frozenset(self.contract.generation.end if stop is None else stop)
        sequences = [list(prompt) for prompt in prompts]
        begun, running = [len(one) for one in sequences], [True] * len(sequences)
        logits = self.step(prompts) if continued else self.prefill(prompts)
        for count in range(1, most + 1):
            chosen = [
                (choose or likeliest)(constrain(row, one, first, self.contract.generation), one)
                for row, one, first in zip(logits, sequences, begun, strict=True)
            ]
            running = [goes_on and token not in ends for goes_on, token in zip(running, chosen, strict=True)]
            if not any(running):
                return
            for one, token in zip(sequences, chosen, strict=True):
                one.append(token)
            yield [token if goes_on else None for goes_on, token in zip(running, chosen, strict=True)]
            if count == most or self.length >= self.most:
                return
            logits = self.step([[token] for token in chosen])

    def generate(
        self,
        prompts: Tokens,
        most: int = 20,
        stop: Sequence[int] | None = None,
        choose: Choose | None = None,
        continued: bool = False,
    ) -> list[list[int]]:
        """The new tokens of each sequence that `stream` yields."""
        made: list[list[int]] = [[] for _ in prompts]
        for tokens in self.stream(prompts, most, stop, choose, continued):
            for row, token in zip(made, tokens, strict=True):
                row.extend([] if token is None else [token])
        return made

    def _advance(self, tokens: Array) -> Array:
        """Run one call on new tokens, int64[batch, new], and take over what it returns of the cache."""
        batch, new = tokens.shape
        past, total = self.length, self.length + new
        sizes = {"batch": batch, "new": new, "past": past, "total": total, "last": total - 1, "last-new": new - 1}
        sizes |= {"constant": 0, "capacity": self._capacity, "encoder_input": self._source[1] if self._source else 0}
        call = self.contract.decode if past else self.contract.prefill
        cache = self._cache or Cache(self.contract.slots, sizes)
        if self._cache is None and self.contract.encode is not None:
            cache.take(self.contract.encode.fills, self._given, 0)
        step = Step(tokens, sizes, self._padding if any(self._padding) else (), self._mask)
        outputs = self._call(call, step, cache.values)
        cache.take(call.fills, outputs, past)
        self._cache, self.length, self._logits = cache, total, outputs[call.logits]
        return self.logits[:, -1]

    def _call(self, call: Call, step: Step, cache: Values | None = None) -> Values:
        if call.encoder is not None:
            values = cache if cache is not None and call.encoder.place == "cache" else self._given
            step.sizes["encoder"] = values[call.encoder.name].shape()[call.encoder.axis]
        given = self._given
        if self.contract.embed is not None and any(one.rule == "embeddings" for one in call.inputs):
            given = {**given, **self._call(self.contract.embed, step)}
        feeds = {past: cache[past] for past in call.pasts} if cache is not None else {}
        for one, value in zip(call.inputs, self._values[id(call)], strict=True):
            feeds[one.name] = given[one.made] if value is None else value.make(step)
        return self._run(call, feeds)

    def _run(self, call: Call, feeds: dict[str, ort.OrtValue]) -> Values:
        outputs: Values = {}
        error = None
        try:
            values = self._sessions[call.file].run_with_ort_values(call.outputs, feeds)
            outputs = dict(zip(call.outputs, values, strict=True))
        except Exception as raised:
            error = str(raised)
            raise
        finally:
            if self.trace is not None:
                self.trace({"file": call.file, "fed": feeds, "got": outputs, "error": error})
        return outputs

    def _refuse_length(self, total: int) -> None:
        if total > self.most:
            raise ValueError(f"a sequence has at most {self.most} tokens here")

    def _pad(self, prompts: Tokens) -> tuple[Array, list[int]]:
        longest = max(map(len, prompts), default=0)
        padding = [longest - len(prompt) for prompt in prompts]
        if not longest or not all(map(len, prompts)):
            raise ValueError("every sequence begins with at least one token")
        if any(padding) and not self.contract.pads:
            raise ValueError("the prompts of a batch must have the same length: padding is not right with this model")
        rows = [[0] * padded + list(prompt) for padded, prompt in zip(padding, prompts, strict=True)]
        return self._check(rows), padding

    def _check(self, rows: Tokens) -> Array:
        """Token ids, int64[batch, new].

        Raises:
            ValueError: the rows have unequal lengths, or hold something else than ids that the model takes.
        """
        vocabulary = self.contract.vocabulary or sys.maxsize
        width = len(rows[0]) if len(rows) else 0
        for row in rows:
            if len(row) != width or not width:
                raise ValueError("give token ids, as many for each sequence")
            for token in row:
                if not 0 <= token < vocabulary:
                    raise ValueError(f"token id {token} is not one of 0 to {vocabulary - 1}")
                if token in self.contract.placeholders:
                    raise ValueError(f"token {token} stands for an image or audio, which this program does not take")
        ids = np.array(rows)
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise ValueError("token ids are whole numbers, a list for each sequence")
        return ids.astype(np.int64, copy=False)


def _make_values(call: Call) -> list[Value | None]:
    """What makes each input; None for those that a graph or the caller made."""
    for fill in call.fills:
        if fill.carry not in CARRIES:
            raise ContractError(f"{fill.output!r} is carried by {fill.carry!r}, which this program does not know")
    return [None if one.rule in GIVEN else Value(one) for one in call.inputs]


def _open(folder: Path, file: File, providers: Sequence[str], options: ort.SessionOptions) -> ort.InferenceSession:
    path = folder / file.file
    if not path.is_file():
        raise FileNotFoundError(f"there is no {file.file} in {folder}")
    if unknown := [one for one in providers if one not in ort.get_available_providers()]:
        known = ", ".join(ort.get_available_providers())
        raise ValueError(f"there is no provider {unknown[0]!r} here; there is {known}")
    session = ort.InferenceSession(str(path), options, providers=list(providers))
    compare(file, session)
    return session
